"""Round-to-nearest quantization of a weight, to what compressed-tensors' own producer would have written.

Scales, zero points and codes follow compressed-tensors 0.20 (quantization/utils/helpers.py `calculate_qparams`,
quantization/lifecycle/forward_helpers.py `_quantize`) with llm-compressor's memoryless min-max observer, on its plain
torch path: every step is done in the weight's own dtype, so a bfloat16 weight is divided by a bfloat16 scale to a
bfloat16 quotient before it is rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.act_quant import exact_div, mx_exponent, round_to
from bitline.errors import InputError
from bitline.types import ActSpec, LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The smallest scale of a block that is all zero: the producer puts the scale dtype's epsilon there.
_ZERO_E4M3_SCALE = 0.125


@dataclass(frozen=True)
class Scheme:
    """One preset.

    block: rows and columns of one scale, 0 for all there are. groups: the group sizes a caller may ask for, None for
    any. scale: "float" has the weight's dtype, "e8m0" is an MX scale, "e4m3" NVFP4's under a global one.
    """

    name: str
    weight: ScalarType
    block: tuple[int, int]
    act: ActSpec | None = None
    symmetric: bool = True
    scale: Literal["float", "e8m0", "e4m3"] = "float"
    groups: tuple[int, ...] | None = None


_E4M3, _E2M1 = types.float8_e4m3fn, types.float4_e2m1
_INT8_TOKEN = ActSpec(types.int8)

_ALL = (
    *(Scheme(f"W{b}A16", types.unsigned(b, symmetric=True), (1, 128)) for b in range(2, 9)),
    Scheme("W4A16_ASYM", types.uint4, (1, 128), symmetric=False),
    Scheme("W8A8", types.int8, (1, 0), _INT8_TOKEN, groups=(-1,)),
    Scheme("W4A8", types.uint4b8, (1, 128), _INT8_TOKEN),
    Scheme("W4AFP8", types.uint4b8, (1, 128), ActSpec(_E4M3)),
    Scheme("FP8", _E4M3, (0, 0), ActSpec(_E4M3, dynamic=False, granularity="tensor"), groups=()),
    Scheme("FP8_DYNAMIC", _E4M3, (1, 0), ActSpec(_E4M3), groups=(-1,)),
    Scheme("FP8_BLOCK", _E4M3, (128, 128), ActSpec(_E4M3, granularity="group", group_size=128), groups=(128,)),
    Scheme("MXFP8", _E4M3, (1, 32), ActSpec(_E4M3, granularity="group", group_size=32, scale="e8m0"), scale="e8m0", groups=(32,)),
    Scheme("MXFP8A16", _E4M3, (1, 32), scale="e8m0", groups=(32,)),
    Scheme("MXFP4", _E2M1, (1, 32), ActSpec(_E2M1, granularity="group", group_size=32, scale="e8m0"), scale="e8m0", groups=(32,)),
    Scheme("MXFP4A16", _E2M1, (1, 32), scale="e8m0", groups=(32,)),
    Scheme("NVFP4", _E2M1, (1, 16), ActSpec(_E2M1, granularity="group", group_size=16, scale="e4m3"), scale="e4m3", groups=(16,)),
    Scheme("NVFP4A16", _E2M1, (1, 16), scale="e4m3", groups=(16,)),
)  # fmt: skip
SCHEMES: dict[str, Scheme] = {s.name: s for s in _ALL}


def quantize(
    w: Tensor,
    scheme: str,
    group_size: int | None = None,
    bias: Tensor | None = None,
    input_scale: Tensor | float | None = None,
) -> QuantizedWeight:
    """Quantize w [N, K] (bfloat16, float16 or float32) by rounding to nearest, without calibration data.

    scheme: a preset of compressed-tensors: W2A16 … W8A16, W4A16_ASYM, W8A8, W4A8, W4AFP8, FP8, FP8_DYNAMIC, FP8_BLOCK,
        MXFP8, MXFP8A16, MXFP4, MXFP4A16, NVFP4, NVFP4A16.
    group_size: columns per scale of an integer scheme, -1 for one scale per row; by default the preset's. The last
        group is short where it does not divide K.
    input_scale: what only calibration can tell, by default 1. FP8: the static scale that inputs are divided by (with 1,
        inputs from 2**-6 to 448 keep E4M3's full precision). NVFP4: the global scale of the input's block scales
        (448 * 6 / the largest input uses their whole range).

    The weight stays on w's device, its act_dtype is w's. Rows are worked on in chunks: beside w and the result there
    are at most a few copies of the scales. Raises InputError for an unknown scheme, a group size that the scheme does
    not have, and a w that is not a finite two-dimensional floating-point tensor.
    """
    plan = SCHEMES.get(scheme.upper())
    if plan is None:
        raise InputError("unknown quantization scheme", found=repr(scheme), expected=", ".join(SCHEMES))
    low, high = _check_weight(w)
    n, k = w.shape
    bn, bk = _block(plan, group_size, n, k)
    peak = torch.maximum(high, -low)
    divisor = _global_scale(peak) if plan.scale == "e4m3" else None

    one_scale = (bn, bk) == (n, k) and n > 1  # known already, so that its rows can be cut anywhere
    step = bitstream.rows_per_chunk(k) if one_scale else -(-bitstream.rows_per_chunk(k) // bn) * bn
    grid = (-(-n // bn), -(-k // bk))
    codes = torch.empty(n, bitstream.row_bytes(k, plan.weight.bits), dtype=torch.uint8, device=w.device)
    scale = torch.empty(grid, dtype=w.dtype, device=w.device)
    zero = None if plan.symmetric else torch.empty(grid, dtype=torch.uint8, device=w.device)
    for r in range(0, n, step):
        rows = w[r : r + step]
        cut = slice(r // bn, -(-(r + rows.shape[0]) // bn))
        blocks = _blocks(rows, bn, bk)
        smallest, largest = (low, high) if one_scale else (blocks.amin((1, 3)), blocks.amax((1, 3)))
        smallest, largest = smallest.clamp(max=0).view(-1, grid[1]), largest.clamp(min=0).view(-1, grid[1])
        part, part_zero = _scales(plan, smallest, largest, divisor)
        scale[cut] = part
        if zero is not None and part_zero is not None:
            zero[cut] = (part_zero + (1 << (plan.weight.bits - 1))).to(torch.uint8)
        divide_by = part if divisor is None else part / divisor
        raw = _codes(plan, blocks, divide_by, part_zero)
        raw = raw.reshape(-1, raw.shape[2] * raw.shape[3])[: rows.shape[0], :k]
        codes[r : r + step] = bitstream.pack(raw, plan.weight.bits)

    given = _input_scale(plan, input_scale, w.device)
    spec = LinearSpec(
        n, k, plan.weight, (bn, bk), zero="none" if plan.symmetric else "int", act=plan.act, act_dtype=w.dtype,
        bias=bias is not None, scale2_block=None if divisor is None else (n, k),
        scale_dtype={"float": w.dtype, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[plan.scale],
    )  # fmt: skip
    return QuantizedWeight(
        spec, codes, _stored(plan, scale), zero, bias=bias, input_scale=given,
        scale2=None if divisor is None else divisor.double().reciprocal().view(1, 1),
    )  # fmt: skip


def _check_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest weight, both scalars, of a w that can be quantized."""
    if not isinstance(w, Tensor) or w.dim() != 2 or w.numel() == 0:
        found = f"shape {list(w.shape)}" if isinstance(w, Tensor) else type(w).__name__
        raise InputError("a weight to quantize is a two-dimensional tensor [N, K]", found=found)
    if w.dtype not in _DTYPES:
        raise InputError("cannot quantize a weight of this dtype", found=w.dtype, expected="bfloat16, float16 or float32",
                         fix="convert it first, for example w.float()")  # fmt: skip
    low, high = torch.aminmax(w)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        row = next(i for i in range(w.shape[0]) if not bool(torch.isfinite(w[i]).all()))
        column = int((~torch.isfinite(w[row])).nonzero()[0])
        raise InputError("cannot quantize a weight that is not finite", found=f"{float(w[row, column])} at [{row}, {column}]",
                         expected="finite values")  # fmt: skip
    return low, high


def _block(plan: Scheme, group_size: int | None, n: int, k: int) -> tuple[int, int]:
    bn, bk = plan.block
    if group_size is not None:
        if plan.groups is not None and group_size not in plan.groups:
            only = " or ".join(str(g) for g in plan.groups) or "no group size: it has one scale"
            raise InputError(f"{plan.name} cannot have this group size", found=group_size, expected=only)
        if isinstance(group_size, bool) or not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise InputError("a group size is a positive number of columns", found=group_size, expected=">= 1, or -1 for a row")
        bk = max(group_size, 0) if plan.groups is None else bk
    return min(bn or n, n), min(bk or k, k)


def _blocks(rows: Tensor, bn: int, bk: int) -> Tensor:
    """[R, K] as blocks [R/bn, bn, K/bk, bk], the short ones filled up with zeros, which change no scale."""
    pad = (-rows.shape[1] % bk, -rows.shape[0] % bn if bn > 1 else 0)
    if bn >= rows.shape[0]:  # one scale for all rows: any number of them is one block
        bn, pad = rows.shape[0], (pad[0], 0)
    if any(pad):
        rows = torch.nn.functional.pad(rows, (0, pad[0], 0, pad[1]))
    return rows.reshape(rows.shape[0] // bn, bn, rows.shape[1] // bk, bk)


def _scales(plan: Scheme, low: Tensor, high: Tensor, divisor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scale and signed zero point of each block, from its smallest (<= 0) and largest (>= 0) weight."""
    peak = torch.maximum(high, -low)
    if plan.scale == "e8m0":
        return _mx_scale(peak, plan.weight.max()), None
    if not plan.symmetric:
        floor = -(1 << (plan.weight.bits - 1))
        scale = exact_div(high - low, (1 << plan.weight.bits) - 1)
        zero = (floor - low / scale).clamp_(floor, -floor - 1).round_().nan_to_num_(0.0)
        return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale), zero
    half_range = plan.weight.max() if plan.weight.kind == "float" else ((1 << plan.weight.bits) - 1) / 2
    scale = exact_div(peak, half_range)
    if divisor is None:
        return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale), None
    local = (divisor * scale).clamp_(max=448.0).to(torch.float8_e4m3fn).to(scale.dtype)
    return torch.where(local == 0, _ZERO_E4M3_SCALE, local), None


def _mx_scale(peak: Tensor, largest: float) -> Tensor:
    """A power of two for each block, as a number of peak's dtype; `largest` is the element type's largest value."""
    exponent = mx_exponent(peak.float(), largest)
    smallest = math.frexp(torch.finfo(peak.dtype).tiny)[1] - math.frexp(largest)[1]
    biased = torch.where((peak > 0) & (exponent >= smallest), exponent + 127, 0).clamp_(0, 254)
    scale = torch.ldexp(torch.ones_like(peak, dtype=torch.float32), biased - 127).to(peak.dtype)
    return torch.where(scale == 0, 1.0, scale)  # float16 has no 2**-127, which a block of zeros asks for


def _global_scale(peak: Tensor) -> Tensor:
    """NVFP4's global scale, float32 [1]: the largest weight times it is 448 * 6. 1 where that has no finite value."""
    scale = 448.0 * 6.0 / peak.clamp(min=torch.finfo(peak.dtype).tiny)
    return scale.nan_to_num(nan=1.0, posinf=1.0).float().reshape(1)


def _codes(plan: Scheme, blocks: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """One code per byte, uint8 in the blocks' shape."""
    scaled = (blocks / scale[:, None, :, None]).add_(0.0)  # a weight of -0 gets the producer's code, that of +0
    if plan.weight.name == "float8_e4m3fn":
        return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    if plan.weight.name == "float4_e2m1":
        rounded = round_to(scaled.float(), "float4_e2m1")
        index = _E2M1_CODE.to(blocks.device)[(rounded.abs() * 2).to(torch.int32)]
        return index | (torch.signbit(rounded).to(torch.uint8) << 3)
    if zero is not None:
        scaled.add_(zero[:, None, :, None].to(scaled.dtype))
    middle = 1 << (plan.weight.bits - 1)
    signed = scaled.clamp_(-middle, middle - 1).round_().to(torch.int8)
    raw = signed.view(torch.uint8)
    return raw if plan.weight.signed else raw + middle  # modulo 256


_E2M1_CODE = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)  # by twice the magnitude


def _stored(plan: Scheme, scale: Tensor) -> Tensor:
    """Scales in the dtype of the file."""
    if plan.scale == "e4m3":
        return scale.to(torch.float8_e4m3fn)
    if plan.scale == "e8m0":
        return (torch.frexp(scale.float()).exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale


def _input_scale(plan: Scheme, given: Tensor | float | None, device: torch.device) -> Tensor | None:
    if plan.act is None or (plan.act.dynamic and plan.act.scale != "e4m3"):
        if given is not None:
            raise InputError(f"{plan.name} has no input scale", found=given, fix="leave input_scale out")
        return None
    value = torch.as_tensor(1.0 if given is None else given, dtype=None if isinstance(given, Tensor) else torch.float32)
    if value.numel() != 1 or not bool(torch.isfinite(value) & (value > 0)):
        raise InputError("an input scale is one positive number", found=given)
    return value.to(device).reshape(1)
