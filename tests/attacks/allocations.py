"""Measure the largest allocations of reading the layers of every base: a script that test_allocations.py runs on larger shapes.

What torch allocates is counted by its profiler, what Python does by tracemalloc. One line of JSON for each family: its name,
the bytes of its files, of the largest part of a weight, of the largest tensor on the way, and the most that Python held.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import bases_gguf
import bases_more  # noqa: F401  (its families are among the bases once it is imported)
import corpus_float  # noqa: F401
from bases import FAMILIES, K, N, entry, gguf_bytes, write
from oracle_gguf import NUMBERS
from outcomes import temporary_folder
from torch.profiler import ProfilerActivity, profile

import bitline
from bitline import bitstream
from bitline.formats.io import mapped_file


def _read(path: Path) -> int:
    """Read every layer. Returns the bytes of the largest tensor of a weight."""
    weights = [record.weight() for record in bitline.open_checkpoint(path).layers()]
    return max(tensor.nbytes for weight in weights for tensor in weight.tensors().values())


def measure(path: Path) -> tuple[int, int, int, int]:
    """Bytes of the files, of the largest tensor of a weight, of the largest intermediate tensor, and of Python's peak."""
    size = sum(p.stat().st_size for p in path.rglob("*")) if path.is_dir() else path.stat().st_size
    part = _read(path)  # so that imports do not count as allocations
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        _read(path)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    events = seen.profiler.kineto_results.events()
    return size, part, max((event.nbytes() for event in events if event.name() == "[memory]"), default=0), held


def main() -> None:
    bitstream.ROW_CHUNK_BYTES = 1 << 12  # small chunks, so that other allocations show
    mapped_file.MAX_READ_BYTES = 0  # map every tensor, since mappings are not allocations
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # the first profile imports modules
    for base in FAMILIES:
        with temporary_folder() as folder:
            print(json.dumps([base, *measure(write(folder, *FAMILIES[base]()))]), flush=True)
    for kind in bases_gguf.TYPES:
        with temporary_folder() as folder:
            path = folder / "model.gguf"
            path.write_bytes(gguf_bytes([], [entry("a.weight", [K, N], NUMBERS[kind], 0)], bases_gguf.rows(kind, N, K)))
            print(json.dumps([f"gguf-{kind}", *measure(path)]), flush=True)


if __name__ == "__main__":
    main()
