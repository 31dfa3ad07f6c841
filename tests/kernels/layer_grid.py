"""The layer grid: the cross product of weight formats, column orders and shards, activation schemes, dtypes and shapes.

`check_grid` runs every kernel on every layer of the grid that it accepts, against an exact float64 GEMM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from bitline import types as t
from bitline.kernels.base import Kernel
from bitline.platform import Platform
from bitline.select import verdict_of
from bitline.testing.generators import inputs, random_weight
from bitline.testing.poison import poison
from bitline.testing.tolerance import FACTOR, baseline_error, reference64
from bitline.types import ActSpec, LinearSpec, Verdict, no

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
LIKE_INPUT = None  # 16-bit scales in the input's dtype
WHOLE, ROW = 1 << 20, 1 << 20  # of a scale block: all rows, all columns; clipped to the layer's shape

# name: (weight type, zero, scale block, scale dtype, block of a second-level scale), as the readers produce them.
FORMATS = {
    "gptq g32": (t.uint4b8, "none", (1, 32), LIKE_INPUT, None), "gptq g128": (t.uint4b8, "none", (1, 128), LIKE_INPUT, None),
    "gptq row": (t.uint4b8, "none", (1, ROW), LIKE_INPUT, None), "gptq f32": (t.uint4b8, "none", (1, 64), F32, None),
    "gptq 8": (t.uint8b128, "none", (1, 32), LIKE_INPUT, None), "gptq 8 row": (t.uint8b128, "none", (1, ROW), LIKE_INPUT, None),
    **{f"gptq {b}": (t.unsigned(b, symmetric=True), "none", (1, 32), LIKE_INPUT, None) for b in (2, 3, 5, 6, 7)},
    "awq g32": (t.uint4, "int", (1, 32), LIKE_INPUT, None), "awq row": (t.uint4, "int", (1, ROW), LIKE_INPUT, None),
    **{f"asym {b}": (t.unsigned(b, symmetric=False), "int", (1, 16), LIKE_INPUT, None) for b in (2, 3, 5, 6, 7, 8)},
    "hqq 4": (t.uint4, "float", (1, 64), LIKE_INPUT, None), "hqq 1": (t.uint1, "float", (1, 32), F16, None),
    "int4": (t.int4, "none", (1, 32), LIKE_INPUT, None), "int4 row": (t.int4, "none", (1, ROW), F32, None),
    "int8 row": (t.int8, "none", (1, ROW), F32, None), "int8 row 16": (t.int8, "none", (1, ROW), LIKE_INPUT, None),
    "int8": (t.int8, "none", (WHOLE, ROW), F32, None), "q8_0": (t.int8, "none", (1, 32), F16, None),
    "q4_k": (t.uint4, "float", (1, 32), torch.uint8, (1, 256)), "q6_k": (t.uint6b32, "none", (1, 16), torch.int8, (1, 256)),
    "tq2_0": (t.uint2b1, "none", (1, 256), F16, None), "iq4_nl": (t.iq4_nl, "none", (1, 32), F16, None),
    "iq2": (t.iq2, "none", (1, 8), F32, None), "nf4": (t.nf4, "none", (1, 64), F32, None),
    "fp8": (t.float8_e4m3fn, "none", (WHOLE, ROW), F32, None), "fp8 row": (t.float8_e4m3fn, "none", (1, ROW), F32, None),
    "fp8 row 16": (t.float8_e4m3fn, "none", (1, ROW), LIKE_INPUT, None), "e5m2": (t.float8_e5m2, "none", (WHOLE, ROW), F32, None),
    "fp8 block": (t.float8_e4m3fn, "none", (128, 128), F32, None), "blocks": (t.uint4b8, "none", (16, 32), F32, None),
    "mxfp8": (t.float8_e4m3fn, "none", (1, 32), E8M0, None), "mxfp6": (t.float6_e3m2, "none", (1, 32), E8M0, None),
    "mxfp4": (t.float4_e2m1, "none", (1, 32), E8M0, None), "nvfp4": (t.float4_e2m1, "none", (1, 16), E4M3, (WHOLE, ROW)),
}  # fmt: skip
ORDERS = {"": {}, "act-order": {"act_order": True}, "ragged": {"ragged": True}, "shard": {"block_offset": (3, 5)}}
ACTS = (
    None, ActSpec(t.int8), ActSpec(t.int8, True, "token", 0, False), ActSpec(t.int8, True, "tensor"),
    ActSpec(t.int8, False, "tensor"), ActSpec(t.int8, False, "tensor", 0, False), ActSpec(t.int8, True, "group", 32),
    ActSpec(t.float8_e4m3fn), ActSpec(t.float8_e4m3fn, False, "tensor"), ActSpec(t.float8_e4m3fn, True, "group", 128),
    ActSpec(t.float8_e4m3fn, True, "group", 32, scale="e8m0"), ActSpec(t.float4_e2m1, True, "group", 32, scale="e8m0"),
    ActSpec(t.float4_e2m1, True, "group", 16, scale="e4m3"),
)  # fmt: skip
SHAPES = ((64, 256), (33, 200), (7, 77))  # whole groups; a partial group; multiples of nothing
M = (1, 6)


def layers(name: str) -> Iterator[LinearSpec]:
    """Every layer of a format; every other one has a bias."""
    weight, zero, (rows, columns), scale, second_level = FORMATS[name]
    grid = itertools.product(ORDERS.values(), ACTS, (BF16, F16, F32), SHAPES)
    for i, (order, act, dtype, (n, k)) in enumerate(grid):
        block = min(rows, n), min(columns, k)
        offset = order.get("block_offset", (0, 0))
        inside = offset[0] % block[0] if block[0] < n else 0, offset[1] % block[1] if block[1] < k else 0
        if order and "block_offset" in order and not any(inside):
            continue  # without scale blocks along a side, a shard has no offset
        scale2_block = None if second_level is None else (min(second_level[0], n), min(second_level[1], k))
        if scale2_block is not None and ("ragged" in order or "block_offset" in order):
            continue  # readers and shards give these layers whole blocks only
        yield LinearSpec(
            n, k, weight, block, inside, scale or (dtype if dtype != F32 else BF16), zero, scale2_block,
            "act_order" in order, "ragged" in order, act, dtype, bool(i % 2),
        )  # fmt: skip


def accepts(kernel: type[Kernel], spec: LinearSpec) -> Verdict:
    """As selection asks a kernel: its input dtypes, then `can_implement`."""
    if spec.act_dtype not in kernel.act_dtypes:
        return no(f"input dtype {spec.act_dtype}", "another")
    return verdict_of(kernel.can_implement, spec)


def check_grid(name: str, kernels: Iterable[tuple[type[Kernel], Platform | str]]) -> dict[str, int]:
    """Run every (kernel, platform) on every layer of a format that it accepts; returns the number of layers per kernel name.

    An AssertionError lists the failures: an output that is too far off, an exception after acceptance, a refusal without a
    reason, a cost that is not positive.
    """
    accepted: dict[str, int] = {}
    failures: list[str] = []
    pairs = [(k, Platform.parse(p) if isinstance(p, str) else p) for k, p in kernels]
    for seed, spec in enumerate(layers(name)):
        runnable = []
        for kernel, platform in pairs:
            verdict = accepts(kernel, spec)
            if verdict:
                runnable.append((kernel, platform))
            elif not verdict.reason:
                failures.append(f"{kernel.__name__} refuses {spec.key} without a reason")
        if not runnable:
            continue
        weight = random_weight(spec, seed)
        bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
        xs = [inputs(m, spec, seed + m) for m in M]
        exact = [reference64(x, weight) for x in xs]
        # The tolerance is a multiple of torch's error; for float32 at large M, since the largest error of few outputs varies.
        x = inputs(33, spec, seed) if spec.act_dtype == F32 else xs[-1]
        expected = reference64(x, weight) if spec.act_dtype == F32 else exact[-1]
        error = baseline_error(x, weight, expected)
        allowed = FACTOR * error + torch.finfo(spec.act_dtype).eps * float(expected.abs().max())
        for kernel, platform in runnable:
            accepted[kernel.__name__] = accepted.get(kernel.__name__, 0) + 1
            try:
                with poison():
                    packed = list(kernel.pack(weight).values())
                    outs = [kernel.apply(x, packed, bias, spec) for x in xs]
            except Exception as error:
                failures.append(f"{kernel.__name__} accepts {spec.key} and raises {type(error).__name__}: {error}")
                continue
            if not kernel.cost(spec, platform, 1) > 0:
                failures.append(f"{kernel.__name__}: no cost for {spec.key}")
            for out, e in zip(outs, exact, strict=True):
                off = float((out.double() - e).abs().nan_to_num(torch.inf).max())
                if out.shape != e.shape or out.dtype != spec.act_dtype or not off <= (allowed if kernel.exact else torch.inf):
                    failures.append(f"{kernel.__name__} on {spec.key} with M={len(e)}: off by {off:.3g}, allowed {allowed:.3g}")
    assert not failures, f"{len(failures)} of the layers:\n" + "\n".join(failures[:20])
    return accepted
