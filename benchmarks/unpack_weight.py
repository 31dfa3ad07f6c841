"""The native core's unpacking of packed weights to bfloat16 at each ISA level, against the torch code's.

    python benchmarks/unpack_weight.py [--rounds 9] [--out FILE]

Medians in milliseconds; all ways take turns, into memory that is there already. `new_memory`: the highest level, with the page
faults of a new tensor.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _machine import machine
from torch import Tensor

from bitline import native, types
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel
from bitline.kernels.cpu.unpack_weight import unpack_in_torch
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

SHAPES = ((1536, 576), (4096, 4096))
LEVELS = [level for level in ("avx2", "avx512", "neon") if level in native.isas()]
BEST = LEVELS[-1]
BF16 = 2  # csrc/gemm.h: enum Dtype


def specs(n: int, k: int) -> dict[str, LinearSpec]:
    base = LinearSpec(n, k, types.uint4b8, (1, 128))
    return {
        "4 bits": base,
        "4 bits, groups of 32, offsets": base.replace(weight=types.uint4, zero="float", block=(1, 32)),
        "4 bits, act-order": base.replace(act_order=True),
        "3 bits": base.replace(weight=types.uint3b4),
        "8 bits": base.replace(weight=types.int8),
        "NF4": base.replace(weight=types.nf4),
        "E4M3": base.replace(weight=types.float8_e4m3fn),
        "E2M3": base.replace(weight=types.float6_e2m3),
    }


def at_level(level: str, packed: Tensor, out: Tensor) -> None:
    native.use_isa(level)
    core = native.core()
    assert core is not None and core.gemm_unpack(packed.data_ptr(), out.data_ptr(), BF16) == 0


def ways(packed: Tensor, n: int, k: int) -> dict[str, Callable[[], object]]:
    out = torch.zeros(n, k, dtype=torch.bfloat16)
    return {
        **{level: lambda level=level: at_level(level, packed, out) for level in LEVELS},
        "new_memory": lambda: at_level(BEST, packed, torch.empty(n, k, dtype=torch.bfloat16)),
        "torch": lambda: unpack_in_torch(packed, torch.bfloat16),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for n, k in SHAPES:
        for name, spec in specs(n, k).items():
            calls = ways(CPUWNA16LinearKernel.pack(random_weight(spec, 1))["weight"], n, k)
            times: dict[str, list[float]] = {way: [] for way in calls}
            for _ in range(arguments.rounds + 1):
                for way, call in calls.items():
                    start = time.perf_counter()
                    call()
                    times[way].append((time.perf_counter() - start) * 1e3)
            rows.append({"n": n, "k": k, "weight": name, "ms": {way: statistics.median(of[1:]) for way, of in times.items()}})
            print(rows[-1], flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
