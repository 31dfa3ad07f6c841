"""Specs, weights and inputs for tests: random over everything that is valid, or lossless."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.types import ActSpec, LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

_SIZES_N = (1, 2, 3, 8, 16, 17, 32, 40, 64, 96, 128, 130)
_SIZES_K = (1, 5, 16, 32, 33, 64, 96, 100, 128, 129, 192, 256, 300)
_GROUPS = (1, 2, 3, 8, 16, 24, 32, 33, 64, 128)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TOKEN_ACTS = tuple(
    ActSpec(dtype, dynamic, how, 0, symmetric)  # type: ignore[arg-type]
    for dtype in (types.int8, types.float8_e4m3fn)
    for dynamic, how in ((True, "token"), (True, "tensor"), (False, "tensor"))
    for symmetric in ((True, False) if dtype is types.int8 else (True,))
)
_GROUP_ACTS = (
    ActSpec(types.float8_e4m3fn, granularity="group", group_size=128),
    ActSpec(types.int8, granularity="group", group_size=32),
    ActSpec(types.float8_e4m3fn, granularity="group", group_size=32, scale="e8m0"),
    ActSpec(types.float4_e2m1, granularity="group", group_size=32, scale="e8m0"),
    ActSpec(types.float4_e2m1, granularity="group", group_size=16, scale="e4m3"),
)


def random_spec(seed: int) -> LinearSpec:
    """A valid spec: any scalar type, block, zero, second scale, column order, activation scheme and dtype. Small shapes."""
    r = random.Random(seed)
    n, k = r.choice(_SIZES_N), r.choice(_SIZES_K)
    weight = r.choice(list(types.SCALAR_TYPES.values()))
    block = r.choice([(n, k), (1, k), (128, 128), (16, 32)] + [(1, g) for g in _GROUPS] * 3)
    plain = weight.kind == "int" and not weight.signed and not weight.bias
    scale2, scale_dtype = None, r.choice(_FLOATS)
    ragged = r.random() < 0.15
    if not ragged and r.random() < 0.25:
        scale2 = r.choice([(n, k), (block[0], 8 * block[1]), (block[0], 2 * block[1])])
        scale_dtype = r.choice([torch.float8_e4m3fn, torch.uint8, torch.int8, torch.float16])
    elif weight.kind == "float" and r.random() < 0.4:
        scale_dtype = torch.float8_e8m0fnu
    offset = (0, 0)
    if not ragged and scale2 is None and r.random() < 0.2:
        offset = (r.randrange(min(block[0], 64)), r.randrange(min(block[1], 64)))
    zero: Any = r.choice(("none", "int", "float")) if plain else "none"
    if zero == "float" and scale_dtype.itemsize == 1 and scale_dtype.is_floating_point:
        scale_dtype = torch.float16  # offsets have the scales' dtype, and nobody stores them in FP8
    return LinearSpec(
        n, k, weight, block, offset, scale_dtype, zero=zero,
        scale2_block=scale2, act_order=k > 1 and r.random() < 0.2, ragged=ragged,
        act=r.choice((None, None, *_TOKEN_ACTS, *_GROUP_ACTS)), act_dtype=r.choice(_FLOATS), bias=r.random() < 0.3,
    )  # fmt: skip


def _generator(seed: int | torch.Generator) -> torch.Generator:
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)


def _grid(spec: LinearSpec) -> tuple[int, int]:
    """The scale grid; a ragged weight gets as many groups as a regular one would have, and one more."""
    return spec.grid[0], spec.grid[1] + spec.ragged


def _order(spec: LinearSpec, g: torch.Generator, groups: int) -> dict[str, Tensor | None]:
    """perm and group_index."""
    return {
        "perm": torch.randperm(spec.k, generator=g).int() if spec.act_order else None,
        "group_index": torch.randint(groups, (spec.k,), generator=g).sort().values.int() if spec.ragged else None,
    }


def _grid2(spec: LinearSpec) -> tuple[int, int] | None:
    return None if spec.scale2_block is None else spec.replace(block=spec.scale2_block, block_offset=(0, 0)).grid


def _scale2_dtype(spec: LinearSpec) -> torch.dtype:
    """As readers store it: float64 for one global scale, float32 for a finer one."""
    return torch.float64 if spec.scale2_block == (spec.n, spec.k) else torch.float32


def _to_scale(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive numbers in a scale's dtype, none of them rounded to zero; E8M0 takes the power of two below."""
    if dtype == torch.float8_e8m0fnu:
        return (torch.frexp(value).exponent + 126).clamp(0, 254).to(torch.uint8).view(dtype)
    if dtype.is_floating_point:
        return value.clamp(min=torch.finfo(dtype).tiny).to(dtype)
    return value.round().clamp(1, torch.iinfo(dtype).max).to(dtype)


def random_weight(spec: LinearSpec, seed: int | torch.Generator = 0, device: torch.device | str = "cpu") -> QuantizedWeight:
    """A valid weight of a spec, its codes drawn from all that stand for a finite number; products with `inputs` are moderate.

    Bits of a row past its last code are set at random, since no reader may look at them.
    """
    g = _generator(seed)
    grid, grid2 = _grid(spec), _grid2(spec)
    top = max(abs(spec.weight.min()), abs(spec.weight.max()), 1.0)
    # A second scale that is shared takes the small factor, so that the fine scales use their dtype's range.
    fine = {torch.uint8: 40.0, torch.int8: 40.0, torch.float8_e4m3fn: 200.0}.get(spec.scale_dtype, 1.0) if grid2 else 1.0
    spread = torch.rand(grid, generator=g) * 1.5 + 0.5
    scale = _to_scale(spread * (0.1 / top if grid2 is None else fine), spec.scale_dtype)
    tensors: dict[str, Tensor | None] = {"scale": scale, **_order(spec, g, grid[1])}
    if grid2 is not None:
        coarse = torch.rand(grid2, generator=g) + 0.5
        tensors["scale2"] = (coarse * 0.1 / top / fine).to(
            torch.float64 if spec.scale2_block == (spec.n, spec.k) else torch.float32
        )
    if spec.zero == "int":
        tensors["zero"] = torch.randint(1 << spec.weight.bits, grid, generator=g).to(torch.uint8)
    if spec.zero == "float":
        middle = -torch.rand(grid, generator=g) * 0.1
        if grid2 is not None and not spec.scale_dtype.is_floating_point:
            tensors["offset"] = torch.randint(1, 63, grid, generator=g).to(spec.scale_dtype)
            tensors["offset2"] = -torch.rand(grid2, generator=g) * 0.1 / 63
        else:
            tensors["offset"] = middle.to(spec.scale_dtype)
    codes = _pack(_random_codes(spec, g), spec, g)
    return _weight(spec, codes, tensors, g, device, input_scale=0.05)


def _random_codes(spec: LinearSpec, g: torch.Generator) -> Tensor:
    valid = torch.tensor([i for i, v in enumerate(spec.weight.values()) if abs(v) < float("inf")], dtype=torch.uint8)
    return valid[torch.randint(len(valid), (spec.n, spec.k), generator=g)]


def _pack(raw: Tensor, spec: LinearSpec, g: torch.Generator) -> Tensor:
    """Pack codes, and fill the bits that belong to no code with noise."""
    codes = bitstream.pack(raw, spec.weight.bits)
    used = spec.k * spec.weight.bits % 8
    if used:
        noise = torch.randint(256, (spec.n,), generator=g).to(torch.uint8)
        codes[:, -1] |= (noise >> used) << used
    return codes


def _weight(
    spec: LinearSpec, codes: Tensor, tensors: dict[str, Tensor | None], g: torch.Generator, device: Any, input_scale: float
) -> QuantizedWeight:
    """Add what an activation scheme and a bias need, and move it all."""
    act = spec.act
    if act is not None and not act.dynamic:
        tensors["input_scale"] = torch.tensor([input_scale])
        tensors["input_zero"] = None if act.symmetric else torch.tensor([3], dtype=torch.int32)
    elif act is not None and act.scale == "e4m3":
        tensors["input_scale"] = torch.tensor([1.0 if input_scale == 1.0 else 600.0])
    if spec.bias and "bias" not in tensors:
        tensors["bias"] = torch.randn(spec.n, generator=g).to(spec.act_dtype)
    return QuantizedWeight(spec, codes, **tensors).to(device)  # type: ignore[arg-type]


def inputs(m: int, spec: LinearSpec, seed: int | torch.Generator = 1, device: torch.device | str = "cpu") -> Tensor:
    """Normal values [m, K] in the spec's input dtype."""
    return torch.randn(m, spec.k, generator=_generator(seed)).to(spec.act_dtype).to(device)


# ---- lossless data: every product and partial sum is a small multiple of 1/2, so that one wrong term is seen ----------


def _markers(spec: LinearSpec) -> dict[int, float]:
    """Input columns whose value makes each dynamic scale of the input exactly 1. The weight is zero there."""
    act = spec.act
    if act is None or not act.dynamic or act.scale == "e8m0":
        return {}
    wide = act.group_size if act.granularity == "group" else spec.k
    low, high = -float(1 << (act.dtype.bits - 1)), float((1 << (act.dtype.bits - 1)) - 1)
    found = {}
    for start in range(0, spec.k, wide):
        if act.symmetric:
            found[start] = act.dtype.max() if act.dtype.kind == "float" else (high - low) / 2
        elif start + 1 < min(spec.k, start + wide):
            found[start], found[start + 1] = low, high
        else:
            found[start] = 0.0
    return found


def lossless_weight(spec: LinearSpec, seed: int | torch.Generator = 0, device: torch.device | str = "cpu") -> QuantizedWeight:
    """A weight whose product with `lossless_inputs` is exact in every input dtype, in whatever order it is summed.

    At most 8 weights of a row are not zero; those are 1/2, 1 or 2 in size, scales are powers of two, zero points and
    offsets are arbitrary. ValueError for a table type that has no 0, 1 or 2.
    """
    g = _generator(seed)
    grid, grid2 = _grid(spec), _grid2(spec)
    order = _order(spec, g, grid[1])
    power = torch.randint(2, grid, generator=g).float()  # the scale of a block is 1/2 or 1
    tensors: dict[str, Tensor | None] = {
        "scale": _to_scale(2.0 ** (power - (1 if grid2 is None else 0)), spec.scale_dtype),
        **order,
    }
    if grid2 is not None:
        tensors["scale2"] = torch.full(
            grid2, 0.5, dtype=torch.float64 if spec.scale2_block == (spec.n, spec.k) else torch.float32
        )
    middle = (
        torch.randint(1 << spec.weight.bits, grid, generator=g) if spec.zero != "none" else torch.zeros(grid, dtype=torch.int64)
    )
    if spec.zero == "int":
        tensors["zero"] = middle.to(torch.uint8)
    if spec.zero == "float":
        offset = -middle * 2.0 ** (power - 1)
        if grid2 is not None and not spec.scale_dtype.is_floating_point:
            # A one-byte offset has no room for every middle: 1 or 2 units of the second offset, so middles of 1 or 2.
            middle = middle.clamp(0, 2)
            tensors["offset"], tensors["offset2"] = (middle * 2**power).to(spec.scale_dtype), torch.full(grid2, -0.5)
        else:
            tensors["offset"] = offset.to(spec.scale_dtype)
    if spec.bias:
        tensors["bias"] = torch.randint(-8, 9, (spec.n,), generator=g).to(spec.act_dtype)
    raw = _lossless_codes(spec, middle, order, g)
    return _weight(spec, _pack(raw, spec, g), tensors, g, device, input_scale=1.0)


def _lossless_codes(spec: LinearSpec, middle: Tensor, order: dict[str, Tensor | None], g: torch.Generator) -> Tensor:
    """Codes of zero, but for up to 8 of each row, which are 1 or 2 steps from it."""
    rows = (torch.arange(spec.n) + spec.block_offset[0]) // spec.block[0]
    columns = (torch.arange(spec.k) + spec.block_offset[1]) // spec.block[1]
    if order["group_index"] is not None:
        columns = order["group_index"].long()
    value = middle[rows][:, columns].float()
    where = torch.rand(spec.n, spec.k, generator=g).topk(min(8, spec.k), 1).indices
    step = torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(4, where.shape, generator=g)]
    markers = torch.zeros(spec.k, dtype=torch.bool)
    markers[list(_markers(spec))] = True
    stored = markers if order["perm"] is None else markers[order["perm"].long()]
    moved = value.clone().scatter_add_(1, where, step)
    moved[:, stored] = value[:, stored]
    code, known = _encode(moved, spec.weight)
    zero, has_zero = _encode(value, spec.weight)
    if not bool(has_zero.all()):
        raise ValueError(f"{spec.weight.name} has no code for zero, so that no weight of it is lossless")
    return torch.where(known, code, zero)


def _encode(value: Tensor, scalar: ScalarType) -> tuple[Tensor, Tensor]:
    """The code of each value, uint8, and whether there is one."""
    table = {v: code for code, v in reversed(list(enumerate(scalar.values()))) if v == v}
    values = torch.tensor(sorted(table), dtype=torch.float32)
    codes = torch.tensor([table[v] for v in sorted(table)], dtype=torch.uint8)
    place = torch.searchsorted(values, value.contiguous()).clamp_(max=len(table) - 1)
    known = values[place] == value
    return torch.where(known, codes[place], 0), known


def lossless_inputs(m: int, spec: LinearSpec, seed: int | torch.Generator = 1, device: torch.device | str = "cpu") -> Tensor:
    """Integers from -2 to 2, [m, K], with the values that make a dynamic input scale 1 at columns where the weight is 0."""
    x = torch.randint(-2, 3, (m, spec.k), generator=_generator(seed)).float()
    for column, value in _markers(spec).items():
        x[:, column] = value
    return x.to(spec.act_dtype).to(device)
