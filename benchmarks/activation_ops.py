"""bitline.ops on a GPU: microseconds of each operator as a captured graph, and of a copy of as many bytes.

    python benchmarks/activation_ops.py --out benchmarks/results/h200_activation_ops.json

Calls go round over inputs of more than 300 MB together, or over 64, so that large ones are not in the L2 cache. `bytes`: what an
operator has to read and write. `copy_us`: torch's copy of half as many bytes. `chain_us`: the norm or the gate by torch's
operators, one after another as transformers runs them, then `ops.quantize`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine import machine
from _measure import copies, replay_us

from bitline import ops, types
from bitline.kernels.triton.act_quant import Source
from bitline.types import ActSpec

E4M3, INT8 = types.float8_e4m3fn, types.int8
ACTS = {
    "FP8 token": ActSpec(E4M3), "FP8 static": ActSpec(E4M3, False, "tensor"), "FP8 group 128": ActSpec(E4M3, True, "group", 128),
    "FP8 group 32 E8M0": ActSpec(E4M3, True, "group", 32, scale="e8m0"), "int8 token": ActSpec(INT8),
    "int8 token asym": ActSpec(INT8, symmetric=False),
}  # fmt: skip
SOURCES = ("quantize", "rms_norm", "silu_mul")


def inputs(source: str, m: int, k: int) -> tuple[torch.Tensor, ...]:
    """x; x and residual; or gate and up in one tensor."""
    if source == "silu_mul":
        return (torch.randn(m, 2 * k, device="cuda").bfloat16(),)
    return tuple(torch.randn(m, k, device="cuda").bfloat16() for _ in range(1 + (source == "rms_norm")))


def call(source: str, act: ActSpec, given: tuple[torch.Tensor, ...], gain: torch.Tensor, scale: torch.Tensor | None) -> Any:
    if source == "rms_norm":
        return ops.rms_norm_quantize(given[0], gain, 1e-5, act, given[1], scale)
    return ops.quantize(given[0], act, scale) if source == "quantize" else ops.silu_mul_quantize(given[0], None, act, scale)


def chain(source: str, act: ActSpec, given: tuple[torch.Tensor, ...], gain: torch.Tensor, scale: torch.Tensor | None) -> Any:
    """The same values by one operator of torch after another."""
    gate, up = given[0].chunk(2, -1)
    norm = Source(given[0], "rms_norm", gain, given[-1], 1e-5)
    x, total = norm.unfused() if source == "rms_norm" else Source(gate, "silu_mul", up).unfused()
    return ops.quantize(x, act, scale), total


def moved_bytes(source: str, act: ActSpec, m: int, k: int) -> int:
    """Bytes read and written: 2 for each activation, 1 for each code, and the scales."""
    scales = 0 if not act.dynamic else m * (k // act.group_size if act.group_size else 1)
    activations = {"quantize": 1, "rms_norm": 3, "silu_mul": 2}[source]
    return m * k * (2 * activations + 1) + 4 * scales + (2 * k if source == "rms_norm" else 0)


def timed(sets: list[tuple[torch.Tensor, ...]], run: Callable[[tuple[torch.Tensor, ...]], Any]) -> float:
    """Microseconds a call, going round over sets of inputs."""
    return replay_us([lambda given=given: run(given) for given in sets], 6, 3)


def measure(source: str, name: str, m: int, k: int, *, with_chain: bool) -> dict[str, Any]:
    act, moved = ACTS[name], moved_bytes(source, ACTS[name], m, k)
    scale = None if act.dynamic else torch.full((1,), 0.01, device="cuda")
    gain = torch.randn(k, device="cuda").bfloat16()
    sets = [inputs(source, m, k) for _ in range(copies(moved))][:64]
    us = timed(sets, lambda given: call(source, act, given, gain, scale))
    half = [torch.empty(moved // 2, dtype=torch.uint8, device="cuda").random_() for _ in range(min(64, copies(moved)))]
    copy_us = replay_us([lambda t=t: t.clone() for t in half], 6, 3)
    row = {"op": source, "scheme": name, "m": m, "k": k, "bytes": moved, "us": us, "copy_us": copy_us}
    if with_chain:
        row["chain_us"] = timed(sets, lambda given: chain(source, act, given, gain, scale))
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16,64,256,1024,4096")
    parser.add_argument("--k", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for source in SOURCES:
        for name in ACTS:
            for m in map(int, options.batches.split(",")):
                rows.append(measure(source, name, m, options.k, with_chain=source != "quantize" and name == "FP8 token"))
            mine = [r for r in rows if (r["op"], r["scheme"]) == (source, name)]
            cells = (f"M={r['m']} {r['us']:.1f} us {100 * r['copy_us'] / r['us']:.0f}%" for r in mine)
            print(source, name, " | ".join(cells), [r.get("chain_us") for r in mine if "chain_us" in r], flush=True)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine("cuda"), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
