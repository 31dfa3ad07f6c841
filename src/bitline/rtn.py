"""Round-to-nearest (RTN) quantization, bit for bit what llm-compressor and compressed-tensors write without calibration.

Scales, zero points and codes follow compressed-tensors 0.20 (quantization/utils/helpers.py `calculate_qparams`,
quantization/lifecycle/forward_helpers.py `_quantize`) with llm-compressor's memoryless min-max observer. As on its eager path,
every operation is in the weight's dtype: a bfloat16 weight is divided by a bfloat16 scale, and the bfloat16 quotient rounded.
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
from bitline.host import without_default_device
from bitline.types import ActSpec, LinearSpec, ScalarType
from bitline.weight import QuantizedWeight

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ZERO_BLOCK_SCALE_E4M3 = 0.125  # of an NVFP4 block that is all zero: E4M3's epsilon, as compressed-tensors writes it


@dataclass(frozen=True)
class Preset:
    """A preset scheme of compressed-tensors.

    block: rows and columns of a scale block, 0 for the whole extent. group_sizes: those that a caller may ask for; None: any.
    scale: "float", the weight's dtype; "e8m0", MX; "e4m3", NVFP4's block scales under a global scale.
    """

    name: str
    weight: ScalarType
    block: tuple[int, int]
    act: ActSpec | None = None
    symmetric: bool = True
    scale: Literal["float", "e8m0", "e4m3"] = "float"
    group_sizes: tuple[int, ...] | None = None


_E4M3, _E2M1 = types.float8_e4m3fn, types.float4_e2m1
_INT8_TOKEN = ActSpec(types.int8)
_MXFP8_ACT = ActSpec(_E4M3, granularity="group", group_size=32, scale="e8m0")
_MXFP4_ACT = ActSpec(_E2M1, granularity="group", group_size=32, scale="e8m0")
_NVFP4_ACT = ActSpec(_E2M1, granularity="group", group_size=16, scale="e4m3")

_PRESETS = (
    *(Preset(f"W{b}A16", types.unsigned(b, symmetric=True), (1, 128)) for b in range(2, 9)),
    Preset("W4A16_ASYM", types.uint4, (1, 128), symmetric=False),
    Preset("W8A8", types.int8, (1, 0), _INT8_TOKEN, group_sizes=(-1,)),
    Preset("W4A8", types.uint4b8, (1, 128), _INT8_TOKEN),
    Preset("W4AFP8", types.uint4b8, (1, 128), ActSpec(_E4M3)),
    Preset("FP8", _E4M3, (0, 0), ActSpec(_E4M3, dynamic=False, granularity="tensor"), group_sizes=()),
    Preset("FP8_DYNAMIC", _E4M3, (1, 0), ActSpec(_E4M3), group_sizes=(-1,)),
    Preset("FP8_BLOCK", _E4M3, (128, 128), ActSpec(_E4M3, granularity="group", group_size=128), group_sizes=(128,)),
    Preset("MXFP8", _E4M3, (1, 32), _MXFP8_ACT, scale="e8m0", group_sizes=(32,)),
    Preset("MXFP8A16", _E4M3, (1, 32), scale="e8m0", group_sizes=(32,)),
    Preset("MXFP4", _E2M1, (1, 32), _MXFP4_ACT, scale="e8m0", group_sizes=(32,)),
    Preset("MXFP4A16", _E2M1, (1, 32), scale="e8m0", group_sizes=(32,)),
    Preset("NVFP4", _E2M1, (1, 16), _NVFP4_ACT, scale="e4m3", group_sizes=(16,)),
    Preset("NVFP4A16", _E2M1, (1, 16), scale="e4m3", group_sizes=(16,)),
)
SCHEMES: dict[str, Preset] = {s.name: s for s in _PRESETS}


@without_default_device
def quantize(
    w: Tensor,
    scheme: str,
    group_size: int | None = None,
    bias: Tensor | None = None,
    input_scale: Tensor | float | None = None,
) -> QuantizedWeight:
    """Quantize a weight by rounding to nearest, without calibration data.

    Scales, zero points and codes are bit for bit those that llm-compressor writes for a scheme. Rows are quantized in chunks, so
    memory holds little more than w and the result.

    Args:
        w: Weight [N, K] in bfloat16, float16 or float32, on any device; finite.
        scheme: A preset of compressed-tensors: W2A16 … W8A16, W4A16_ASYM, W8A8, W4A8, W4AFP8, FP8, FP8_DYNAMIC, FP8_BLOCK, MXFP8,
            MXFP8A16, MXFP4, MXFP4A16, NVFP4, NVFP4A16.
        group_size: Columns per scale of an integer scheme, -1 for one scale per row; the preset's by default. The last group is
            short where it does not divide K.
        bias: [N], kept as it is.
        input_scale: The static activation scale, which only calibration can tell; 1 by default. FP8: the divisor of inputs (with
            1, inputs from 2**-6 to 448 have E4M3's full precision). NVFP4: the global scale of the input's block scales;
            448 * 6 / amax(input) uses their whole range.

    Returns:
        The canonical weight, on w's device, with w's dtype as act_dtype.

    Raises:
        InputError: For an unknown scheme, a group size or input scale that the scheme does not have, and a w that is not a finite
            floating-point matrix.
    """
    preset = _preset(scheme)
    low, high = _check_weight(w)
    n, k = w.shape
    block = _block(preset, group_size, n, k)
    global_scale = _global_scale(torch.maximum(high, -low)) if preset.scale == "e4m3" else None
    codes, scale, zero = _quantize_rows(w, preset, block, (low, high), global_scale)
    static_scale = _input_scale(preset, input_scale, w.device)
    spec = _spec(preset, n, k, block, w.dtype, bias is not None)
    return QuantizedWeight(
        spec, codes, _stored_scale(preset, scale), zero, bias=bias, input_scale=static_scale,
        scale2=None if global_scale is None else global_scale.double().reciprocal().view(1, 1),
    )  # fmt: skip


def scheme_spec(n: int, k: int, scheme: str, group_size: int | None = None, dtype: torch.dtype = torch.bfloat16) -> LinearSpec:
    """The spec of the weight that `quantize` makes, without a bias.

    Args:
        n: Rows N.
        k: Columns K.
        scheme: As in `quantize`.
        group_size: As in `quantize`.
        dtype: The weight's, and act_dtype.

    Raises:
        InputError: For an unknown scheme, and a group size that it does not have.
    """
    preset = _preset(scheme)
    return _spec(preset, n, k, _block(preset, group_size, n, k), dtype, False)


def _preset(scheme: str) -> Preset:
    preset = SCHEMES.get(scheme.upper())
    if preset is None:
        raise InputError("unknown quantization scheme", found=repr(scheme), expected=", ".join(SCHEMES))
    return preset


def _spec(preset: Preset, n: int, k: int, block: tuple[int, int], dtype: torch.dtype, bias: bool) -> LinearSpec:
    return LinearSpec(
        n, k, preset.weight, block, zero="none" if preset.symmetric else "int", act=preset.act, act_dtype=dtype, bias=bias,
        scale2_block=(n, k) if preset.scale == "e4m3" else None,
        scale_dtype={"float": dtype, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[preset.scale],
    )  # fmt: skip


def _quantize_rows(
    w: Tensor, preset: Preset, block: tuple[int, int], bounds: tuple[Tensor, Tensor], global_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed codes, scales (in w's dtype) and zero points, in chunks of rows. bounds: w's smallest and largest value."""
    (n, k), (bn, bk) = w.shape, block
    per_tensor = block == (n, k) and n > 1  # its scale is known from `bounds`, so a chunk may end inside the block
    chunk = bitstream.rows_per_chunk(k) if per_tensor else -(-bitstream.rows_per_chunk(k) // bn) * bn
    grid = (-(-n // bn), -(-k // bk))
    codes = torch.empty(n, bitstream.row_bytes(k, preset.weight.bits), dtype=torch.uint8, device=w.device)
    scale = torch.empty(grid, dtype=w.dtype, device=w.device)
    zero = None if preset.symmetric else torch.empty(grid, dtype=torch.uint8, device=w.device)
    for r in range(0, n, chunk):
        rows = w[r : r + chunk]
        scale_rows = slice(r // bn, -(-(r + rows.shape[0]) // bn))
        blocks = _blocks(rows, bn, bk)
        low, high = bounds if per_tensor else (blocks.amin((1, 3)), blocks.amax((1, 3)))
        low, high = low.clamp(max=0).view(-1, grid[1]), high.clamp(min=0).view(-1, grid[1])
        chunk_scale, chunk_zero = _scales(preset, low, high, global_scale)
        scale[scale_rows] = chunk_scale
        if zero is not None and chunk_zero is not None:
            zero[scale_rows] = (chunk_zero + (1 << (preset.weight.bits - 1))).to(torch.uint8)
        divisor = chunk_scale if global_scale is None else chunk_scale / global_scale
        raw = _codes(preset, blocks, divisor, chunk_zero)
        raw = raw.reshape(-1, raw.shape[2] * raw.shape[3])[: rows.shape[0], :k]
        codes[r : r + chunk] = bitstream.pack(raw, preset.weight.bits)
    return codes, scale, zero


def _check_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of w, both scalars. An InputError where w cannot be quantized."""
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


def _block(preset: Preset, group_size: int | None, n: int, k: int) -> tuple[int, int]:
    """The scale block of a preset with the caller's group size."""
    bn, bk = preset.block
    if group_size is not None:
        if preset.group_sizes is not None and group_size not in preset.group_sizes:
            only = " or ".join(str(g) for g in preset.group_sizes) or "no group size: it has one scale"
            raise InputError(f"{preset.name} cannot have this group size", found=group_size, expected=only)
        if isinstance(group_size, bool) or not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise InputError("a group size is a positive number of columns", found=group_size, expected=">= 1, or -1 for a row")
        bk = max(group_size, 0) if preset.group_sizes is None else bk
    return min(bn or n, n), min(bk or k, k)


def _blocks(rows: Tensor, bn: int, bk: int) -> Tensor:
    """[R, K] as blocks [R/bn, bn, K/bk, bk], padded with zeros, which change no scale."""
    pad = (-rows.shape[1] % bk, -rows.shape[0] % bn if bn > 1 else 0)
    if bn >= rows.shape[0]:  # one block along N, of as many rows as there are
        bn, pad = rows.shape[0], (pad[0], 0)
    if any(pad):
        rows = torch.nn.functional.pad(rows, (0, pad[0], 0, pad[1]))
    return rows.reshape(rows.shape[0] // bn, bn, rows.shape[1] // bk, bk)


def _scales(preset: Preset, low: Tensor, high: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scale and signed zero point of each block, from its smallest (<= 0) and largest (>= 0) weight."""
    amax = torch.maximum(high, -low)
    if preset.scale == "e8m0":
        return _mx_scale(amax, preset.weight.max()), None
    if not preset.symmetric:
        qmin = -(1 << (preset.weight.bits - 1))
        scale = exact_div(high - low, (1 << preset.weight.bits) - 1)
        zero = (qmin - low / scale).clamp_(qmin, -qmin - 1).round_().nan_to_num_(0.0)
        return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale), zero
    half_range = preset.weight.max() if preset.weight.kind == "float" else ((1 << preset.weight.bits) - 1) / 2
    scale = exact_div(amax, half_range)
    if global_scale is None:
        return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale), None
    block_scale = (global_scale * scale).clamp_(max=448.0).to(torch.float8_e4m3fn).to(scale.dtype)
    return torch.where(block_scale == 0, _ZERO_BLOCK_SCALE_E4M3, block_scale), None


def _mx_scale(amax: Tensor, max_value: float) -> Tensor:
    """A power of two for each block, in amax's dtype; `max_value` is the element type's largest value."""
    exponent = mx_exponent(amax.float(), max_value)
    min_exponent = math.frexp(torch.finfo(amax.dtype).tiny)[1] - math.frexp(max_value)[1]
    e8m0 = torch.where((amax > 0) & (exponent >= min_exponent), exponent + 127, 0).clamp_(0, 254)
    scale = torch.ldexp(torch.ones_like(amax, dtype=torch.float32), e8m0 - 127).to(amax.dtype)
    return torch.where(scale == 0, 1.0, scale)  # 2**-127, the scale of a block of zeros, is 0 in float16


def _global_scale(amax: Tensor) -> Tensor:
    """NVFP4's global scale, float32 [1]: 448 * 6 / amax, or 1 where that is not finite."""
    scale = 448.0 * 6.0 / amax.clamp(min=torch.finfo(amax.dtype).tiny)
    return scale.nan_to_num(nan=1.0, posinf=1.0).float().reshape(1)


def _codes(preset: Preset, blocks: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """One code per byte, uint8 in the blocks' shape."""
    scaled = (blocks / scale[:, None, :, None]).add_(0.0)  # turns -0 into +0, as compressed-tensors does
    if preset.weight.name == "float8_e4m3fn":
        return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    if preset.weight.name == "float4_e2m1":
        rounded = round_to(scaled.float(), "float4_e2m1")
        index = _E2M1_CODE.to(blocks.device)[(rounded.abs() * 2).to(torch.int32)]
        return index | (torch.signbit(rounded).to(torch.uint8) << 3)
    if zero is not None:
        scaled.add_(zero[:, None, :, None].to(scaled.dtype))
    bias = 1 << (preset.weight.bits - 1)
    signed = scaled.clamp_(-bias, bias - 1).round_().to(torch.int8)
    raw = signed.view(torch.uint8)
    return raw if preset.weight.signed else raw + bias  # modulo 256


_E2M1_CODE = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)  # code of each magnitude, in halves


def _stored_scale(preset: Preset, scale: Tensor) -> Tensor:
    """Scales in the dtype that checkpoints store."""
    if preset.scale == "e4m3":
        return scale.to(torch.float8_e4m3fn)
    if preset.scale == "e8m0":
        return (torch.frexp(scale.float()).exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale


def _input_scale(preset: Preset, given: Tensor | float | None, device: torch.device) -> Tensor | None:
    """The static activation scale, [1]; None where the preset has none."""
    if preset.act is None or (preset.act.dynamic and preset.act.scale != "e4m3"):
        if given is not None:
            raise InputError(f"{preset.name} has no input scale", found=given, fix="leave input_scale out")
        return None
    value = torch.as_tensor(1.0 if given is None else given, dtype=None if isinstance(given, Tensor) else torch.float32)
    if value.numel() != 1 or not bool(torch.isfinite(value) & (value > 0)):
        raise InputError("an input scale is one positive number", found=given)
    return value.to(device).reshape(1)
