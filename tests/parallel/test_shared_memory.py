"""Gathers through shared memory: bits, sizes, a rank that ended, and a file system without room. Ranks here are threads."""

import os
import sys
import threading

import pytest
import torch

from bitline import BitlineError
from bitline.parallel import shared_memory
from bitline.parallel.shared_memory import SharedGather, size_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory of Linux")


def ranks_of(tmp_path, world, capacity=4096):
    path = tmp_path / "shared"
    path.write_bytes(bytes(size_of(world, capacity)))
    return [SharedGather(os.open(path, os.O_RDWR), rank, world, capacity, 60.0) for rank in range(world)]


def part(rank, call):
    size = 1 + 37 * call % 1024
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * call + rank))


def test_all_ranks_get_all_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(SharedGather, "_has_ended", lambda self, rank: False)  # threads of one process share its locks
    world, wrong = 3, []

    def run(gather):
        for call in range(300):
            dtype = (torch.float32, torch.bfloat16, torch.int64)[call % 3]
            want = torch.stack([part(r, call).to(dtype) for r in range(world)])[:, : 4096 // dtype.itemsize]
            if not torch.equal(gather(want[gather.rank].contiguous()), want):
                wrong.append((gather.rank, call))

    threads = [threading.Thread(target=run, args=(gather,)) for gather in ranks_of(tmp_path, world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_rank_that_ended_or_does_not_come(tmp_path, monkeypatch):
    first, _ = ranks_of(tmp_path, 2)
    with pytest.raises(BitlineError, match=r"failed or ended.*rank 1"):  # this process can take the second rank's lock
        first(torch.ones(3))
    monkeypatch.setattr(SharedGather, "_has_ended", lambda self, rank: False)
    first.seconds = 0.5
    with pytest.raises(BitlineError, match="does not answer"):
        first(torch.ones(3))


def test_no_room(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    number = shared_memory._create(4096)
    assert number and shared_memory._path(number).stat().st_size == 4096
    shared_memory._path(number).unlink()
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shared_memory._create(4096) == 0 and not list(tmp_path.iterdir())
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "missing")
    assert shared_memory._create(4096) == 0
