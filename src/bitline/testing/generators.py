"""Specs, weights and inputs for tests: random over all that is valid, and lossless data for exact comparisons."""

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
_GROUP_SIZES = (1, 2, 3, 8, 16, 24, 32, 33, 64, 128)
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
    """A valid spec of small shape with any element type, scale block, zero point, scale2, act-order, activation scheme and dtype.

    Args:
        seed: Determines the spec.
    """
    r = random.Random(seed)
    n, k = r.choice(_SIZES_N), r.choice(_SIZES_K)
    weight = r.choice(list(types.SCALAR_TYPES.values()))
    block = r.choice([(n, k), (1, k), (128, 128), (16, 32)] + [(1, g) for g in _GROUP_SIZES] * 3)
    takes_zero_points = weight.kind == "int" and not weight.signed and not weight.bias
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
    zero: Any = r.choice(("none", "int", "float")) if takes_zero_points else "none"
    if zero == "float" and scale_dtype.itemsize == 1 and scale_dtype.is_floating_point:
        scale_dtype = torch.float16  # offsets have the scales' dtype, and no format stores them in FP8
    return LinearSpec(
        n, k, weight, block, offset, scale_dtype, zero=zero,
        scale2_block=scale2, act_order=k > 1 and r.random() < 0.2, ragged=ragged,
        act=r.choice((None, None, *_TOKEN_ACTS, *_GROUP_ACTS)), act_dtype=r.choice(_FLOATS), bias=r.random() < 0.3,
    )  # fmt: skip


def _generator(seed: int | torch.Generator) -> torch.Generator:
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)


def _grid(spec: LinearSpec) -> tuple[int, int]:
    """The scale grid; a ragged weight gets one group more than a regular one."""
    return spec.grid[0], spec.grid[1] + spec.ragged


def _column_order(spec: LinearSpec, g: torch.Generator, groups: int) -> dict[str, Tensor | None]:
    """perm and group_index, for act-order and ragged groups."""
    return {
        "perm": torch.randperm(spec.k, generator=g).int() if spec.act_order else None,
        "group_index": torch.randint(groups, (spec.k,), generator=g).sort().values.int() if spec.ragged else None,
    }


def _scale2_grid(spec: LinearSpec) -> tuple[int, int] | None:
    return None if spec.scale2_block is None else spec.replace(block=spec.scale2_block, block_offset=(0, 0)).grid


def _scale2_dtype(spec: LinearSpec) -> torch.dtype:
    """As readers store it: float64 for a global scale, float32 for super-block scales."""
    return torch.float64 if spec.scale2_block == (spec.n, spec.k) else torch.float32


def _to_scale(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive numbers in a scale's dtype, none rounded to zero; E8M0 rounds down to a power of two."""
    if dtype == torch.float8_e8m0fnu:
        return (torch.frexp(value).exponent + 126).clamp(0, 254).to(torch.uint8).view(dtype)
    if dtype.is_floating_point:
        return value.clamp(min=torch.finfo(dtype).tiny).to(dtype)
    return value.round().clamp(1, torch.iinfo(dtype).max).to(dtype)


def random_weight(spec: LinearSpec, seed: int | torch.Generator = 0, device: torch.device | str = "cpu") -> QuantizedWeight:
    """A valid random weight of a spec.

    Codes are drawn from all finite values. Scales keep outputs of `inputs` at moderate size. Padding bits of the packed rows are
    random, since no kernel may depend on them.

    Args:
        spec: Shape and scheme.
        seed: A seed, or the generator to draw from.
        device: Where the weight is.
    """
    g = _generator(seed)
    grid, scale2_grid = _grid(spec), _scale2_grid(spec)
    largest = max(abs(spec.weight.min()), abs(spec.weight.max()), 1.0)
    # With two levels, scale2 has the small factor, so that the block scales use their dtype's range.
    magnitudes = {torch.uint8: 40.0, torch.int8: 40.0, torch.float8_e4m3fn: 200.0}
    magnitude = magnitudes.get(spec.scale_dtype, 1.0) if scale2_grid else 1.0
    spread = torch.rand(grid, generator=g) * 1.5 + 0.5
    scale = _to_scale(spread * (0.1 / largest if scale2_grid is None else magnitude), spec.scale_dtype)
    tensors: dict[str, Tensor | None] = {"scale": scale, **_column_order(spec, g, grid[1])}
    if scale2_grid is not None:
        spread2 = torch.rand(scale2_grid, generator=g) + 0.5
        tensors["scale2"] = (spread2 * 0.1 / largest / magnitude).to(_scale2_dtype(spec))
    if spec.zero == "int":
        tensors["zero"] = torch.randint(1 << spec.weight.bits, grid, generator=g).to(torch.uint8)
    if spec.zero == "float":
        offset = -torch.rand(grid, generator=g) * 0.1
        if scale2_grid is not None and not spec.scale_dtype.is_floating_point:
            tensors["offset"] = torch.randint(1, 63, grid, generator=g).to(spec.scale_dtype)
            tensors["offset2"] = -torch.rand(scale2_grid, generator=g) * 0.1 / 63
        else:
            tensors["offset"] = offset.to(spec.scale_dtype)
    codes = _pack(_random_codes(spec, g), spec, g)
    return _weight(spec, codes, tensors, g, device, input_scale=0.05)


def _random_codes(spec: LinearSpec, g: torch.Generator) -> Tensor:
    valid = torch.tensor([i for i, v in enumerate(spec.weight.values()) if abs(v) < float("inf")], dtype=torch.uint8)
    codes = torch.empty(spec.n, spec.k, dtype=torch.uint8)
    for rows in codes.split(bitstream.rows_per_chunk(spec.k)):  # an index takes eight bytes
        rows.copy_(valid[torch.randint(len(valid), rows.shape, generator=g)])
    return codes


def _pack(raw: Tensor, spec: LinearSpec, g: torch.Generator) -> Tensor:
    """Pack codes, with random padding bits."""
    codes = bitstream.pack(raw, spec.weight.bits)
    used = spec.k * spec.weight.bits % 8
    if used:
        noise = torch.randint(256, (spec.n,), generator=g).to(torch.uint8)
        codes[:, -1] |= (noise >> used) << used
    return codes


def _weight(
    spec: LinearSpec, codes: Tensor, tensors: dict[str, Tensor | None], g: torch.Generator, device: Any, input_scale: float
) -> QuantizedWeight:
    """The weight, with static activation scales and a bias where the spec has them."""
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
    """Random inputs from a normal distribution.

    Args:
        m: Batch size M.
        spec: The layer; gives K and the input dtype.
        seed: A seed, or the generator to draw from.
        device: Where the inputs are.

    Returns:
        [M, K] in the spec's input dtype.
    """
    return torch.randn(m, spec.k, generator=_generator(seed)).to(spec.act_dtype).to(device)


# ---- lossless data: every product and partial sum is a small multiple of 1/2, so that any wrong term shows ------------


def _markers(spec: LinearSpec) -> dict[int, float]:
    """Input columns, with values, that make every dynamic activation scale exactly 1. The weight is zero there."""
    act = spec.act
    if act is None or not act.dynamic or act.scale == "e8m0":
        return {}
    width = act.group_size if act.granularity == "group" else spec.k
    low, high = -float(1 << (act.dtype.bits - 1)), float((1 << (act.dtype.bits - 1)) - 1)
    found = {}
    for start in range(0, spec.k, width):
        if act.symmetric:
            found[start] = act.dtype.max() if act.dtype.kind == "float" else (high - low) / 2
        elif start + 1 < min(spec.k, start + width):
            found[start], found[start + 1] = low, high
        else:
            found[start] = 0.0
    return found


def lossless_weight(spec: LinearSpec, seed: int | torch.Generator = 0, device: torch.device | str = "cpu") -> QuantizedWeight:
    """A weight whose GEMM with `lossless_inputs` is exact in every input dtype and reduction order.

    At most 8 weights per row are not zero, with magnitudes of 1/2, 1 or 2. Scales are powers of two; zero points and offsets are
    arbitrary.

    Args:
        spec: Shape and scheme.
        seed: A seed, or the generator to draw from.
        device: Where the weight is.

    Raises:
        ValueError: For a codebook type without 0, 1 or 2.
    """
    g = _generator(seed)
    grid, scale2_grid = _grid(spec), _scale2_grid(spec)
    order = _column_order(spec, g, grid[1])
    exponent = torch.randint(2, grid, generator=g).float()  # block scales are 1/2 or 1
    tensors: dict[str, Tensor | None] = {
        "scale": _to_scale(2.0 ** (exponent - (1 if scale2_grid is None else 0)), spec.scale_dtype),
        **order,
    }
    if scale2_grid is not None:
        tensors["scale2"] = torch.full(scale2_grid, 0.5, dtype=_scale2_dtype(spec))
    zero = (
        torch.randint(1 << spec.weight.bits, grid, generator=g) if spec.zero != "none" else torch.zeros(grid, dtype=torch.int64)
    )
    if spec.zero == "int":
        tensors["zero"] = zero.to(torch.uint8)
    if spec.zero == "float":
        offset = -zero * 2.0 ** (exponent - 1)
        if scale2_grid is not None and not spec.scale_dtype.is_floating_point:
            # A one-byte offset cannot hold every zero point times its scale, so zero points are at most 2.
            zero = zero.clamp(0, 2)
            tensors["offset"], tensors["offset2"] = (zero * 2**exponent).to(spec.scale_dtype), torch.full(scale2_grid, -0.5)
        else:
            tensors["offset"] = offset.to(spec.scale_dtype)
    if spec.bias:
        tensors["bias"] = torch.randint(-8, 9, (spec.n,), generator=g).to(spec.act_dtype)
    raw = _lossless_codes(spec, zero, order, g)
    return _weight(spec, _pack(raw, spec, g), tensors, g, device, input_scale=1.0)


def _lossless_codes(spec: LinearSpec, zero: Tensor, order: dict[str, Tensor | None], g: torch.Generator) -> Tensor:
    """Codes of the zero point, but for up to 8 per row, which are 1 or 2 from it."""
    rows = (torch.arange(spec.n) + spec.block_offset[0]) // spec.block[0]
    columns = (torch.arange(spec.k) + spec.block_offset[1]) // spec.block[1]
    if order["group_index"] is not None:
        columns = order["group_index"].long()
    zeros = zero[rows][:, columns].float()
    nonzero = torch.rand(spec.n, spec.k, generator=g).topk(min(8, spec.k), 1).indices
    distance = torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(4, nonzero.shape, generator=g)]
    markers = torch.zeros(spec.k, dtype=torch.bool)
    markers[list(_markers(spec))] = True
    stored = markers if order["perm"] is None else markers[order["perm"].long()]
    values = zeros.clone().scatter_add_(1, nonzero, distance)
    values[:, stored] = zeros[:, stored]
    codes, representable = _encode(values, spec.weight)
    zero_codes, has_zero = _encode(zeros, spec.weight)
    if not bool(has_zero.all()):
        raise ValueError(f"{spec.weight.name} has no code for zero, so there is no lossless weight of it")
    return torch.where(representable, codes, zero_codes)


def _encode(value: Tensor, scalar: ScalarType) -> tuple[Tensor, Tensor]:
    """The code of each value, uint8, and whether it has one."""
    table = {v: code for code, v in reversed(list(enumerate(scalar.values()))) if v == v}
    values = torch.tensor(sorted(table), dtype=torch.float32)
    codes = torch.tensor([table[v] for v in sorted(table)], dtype=torch.uint8)
    index = torch.searchsorted(values, value.contiguous()).clamp_(max=len(table) - 1)
    representable = values[index] == value
    return torch.where(representable, codes[index], 0), representable


def lossless_inputs(m: int, spec: LinearSpec, seed: int | torch.Generator = 1, device: torch.device | str = "cpu") -> Tensor:
    """Inputs for `lossless_weight`: integers from -2 to 2, and values that make dynamic scales 1 where the weight is 0.

    Args:
        m: Batch size M.
        spec: The layer; gives K, the activation scheme and the input dtype.
        seed: A seed, or the generator to draw from.
        device: Where the inputs are.

    Returns:
        [M, K] in the spec's input dtype.
    """
    x = torch.randint(-2, 3, (m, spec.k), generator=_generator(seed)).float()
    for column, value in _markers(spec).items():
        x[:, column] = value
    return x.to(spec.act_dtype).to(device)
