"""Gathers through shared memory: bits, sizes, a rank that ended, and a file system without room. Ranks here are threads."""

import os
import sys
import threading

import pytest
import torch

from bitline import BitlineError, native
from bitline.parallel import shared_memory
from bitline.parallel.group import _ordered_sum
from bitline.parallel.shared_memory import SharedGather, size_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory of Linux")


def ranks_of(tmp_path, world, capacity=4096):
    path = tmp_path / "shared"
    path.write_bytes(bytes(size_of(world, capacity)))
    return [SharedGather(os.open(path, os.O_RDWR), rank, world, capacity, 60.0) for rank in range(world)]


def part(rank, call):
    size = 1 + 37 * call % 1024
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * call + rank))


PYTHON = "in Python"  # of a thread's name: without the native core


@pytest.fixture
def some_in_python(monkeypatch):
    """Threads of one process share its locks; those that are named so run without the native core."""
    core_for = native.core_for
    monkeypatch.setattr(native, "core_for", lambda x: None if PYTHON in threading.current_thread().name else core_for(x))
    monkeypatch.setattr(SharedGather, "_has_ended", lambda self, rank: False)


def in_threads(gathers, run, in_python):
    """Run each rank in a thread. in_python: ranks without the native core."""
    threads = [
        threading.Thread(target=run, args=(gather,), name=PYTHON if gather.rank in in_python else "native") for gather in gathers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("in_python", [(), (0, 1, 2), (1,)])
def test_all_ranks_get_all_parts(in_python, tmp_path, some_in_python):
    world, wrong = 3, []

    def run(gather):
        for call in range(300):
            dtype = (torch.float32, torch.bfloat16, torch.int64)[call % 3]
            want = torch.stack([part(r, call).to(dtype) for r in range(world)])[:, : 4096 // dtype.itemsize]
            if not torch.equal(gather(want[gather.rank].contiguous()), want):
                wrong.append((gather.rank, call))

    in_threads(ranks_of(tmp_path, world), run, in_python)
    assert not wrong


@pytest.mark.skipif(native.core() is None, reason="needs the native core")
@pytest.mark.parametrize("in_python", [(), (2,)])
def test_sums_have_the_bits_of_the_sum_in_rank_order(in_python, tmp_path, some_in_python):
    world, wrong, kinds = 3, [], (torch.float32, torch.bfloat16)

    def run(gather):
        for call in range(200):
            dtype, to = kinds[call % 2], kinds[call // 2 % 2]
            parts = torch.stack([part(r, call).to(dtype) for r in range(world)])
            parts[1, :1] = torch.inf if call % 7 == 0 else -0.0
            want = (parts[0].float() + parts[1].float() + parts[2].float()).to(to)
            mine = parts[gather.rank].contiguous()
            y = gather.sum(mine, to)
            y = _ordered_sum(gather(mine), to) if y is None else y
            if not torch.equal(y, want):
                wrong.append((gather.rank, call))

    in_threads(ranks_of(tmp_path, world), run, in_python)
    assert not wrong


def test_sums_that_native_code_does_not_take(tmp_path):
    (alone,) = ranks_of(tmp_path, 1)
    assert alone.sum(torch.ones(3, dtype=torch.float16), torch.float32) is None
    assert alone.sum(torch.ones(3, requires_grad=True), torch.float32) is None


@pytest.mark.parametrize("with_core", [True, False])
def test_a_rank_that_ended_or_does_not_come(with_core, tmp_path, monkeypatch):
    if not with_core:
        monkeypatch.setattr(native, "core_for", lambda x: None)
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
