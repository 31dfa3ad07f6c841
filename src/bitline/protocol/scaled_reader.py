"""From the parameters of int8, FP8, NVFP4 and MX layers to the canonical weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.protocol.config import FP8ScaledMMLinearLayerConfig, Int8ScaledMMLinearLayerConfig, NvFp4LinearLayerConfig
from bitline.protocol.layer_parameters import LayerParameters
from bitline.protocol.mixed_precision_reader import group_scales
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


def read_int8(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    """The weight of a W8A8 int8 layer."""
    config: Any = p.config
    assert isinstance(config, Int8ScaledMMLinearLayerConfig)
    spec, codes = _byte_codes(p, spec, torch.int8)
    scale, spec = _channel_scales(p, spec)
    static: dict[str, Tensor | None] = {"input_scale": None, "input_zero": None}
    if config.is_static_input_scheme:
        zero = None if config.input_symmetric else p.need("i_zp").data
        static["input_scale"], static["input_zero"] = merge_static_ranges(p.need("i_s").data, zero)
    return QuantizedWeight(spec, codes, scale, **static)  # type: ignore[arg-type]


def merge_static_ranges(scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One static int8 activation scale and zero point for fused layers that have their own, [layers] each.

    Symmetric: the largest scale. With zero points: those of the union of the ranges, the zero point rounded to nearest.
    """
    scale = scale.float().reshape(-1)
    if zero is None or scale.numel() == 1:
        return scale.max(), None if zero is None else zero.reshape(-1)[0].to(torch.int32)
    zeros = zero.float().reshape(-1)
    low, high = ((-128 - zeros) * scale).min(), ((127 - zeros) * scale).max()
    merged = (high - low) / 255
    return merged, (-128 - low / merged).round().clamp(-128, 127).to(torch.int32)


def read_fp8(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    """The weight of an FP8 layer with scales per tensor, channel, group or block."""
    config: Any = p.config
    assert isinstance(config, FP8ScaledMMLinearLayerConfig)
    dtype = config.weight_quant_key.dtype
    assert isinstance(dtype, torch.dtype)
    spec, codes = _byte_codes(p, spec, dtype)
    if p.family == "fp8_block":
        scale, spec = _block_scales(p, spec)
    elif spec.block[0] == 1 and 1 < spec.block[1] < spec.k:
        scale, offset = group_scales(p, spec)
        spec = spec.replace(block_offset=(0, offset), scale_dtype=scale.dtype)
    else:
        scale, spec = _channel_scales(p, spec)
    static = None
    if spec.act is not None and not spec.act.dynamic:
        static = p.need("i_s").data.float().max()  # fused layers have one input: the scale of its largest range
    elif spec.act is not None and (limit := p.find("i_s_ub")) is not None:
        spec = spec.replace(act=replace(spec.act, limit=float(limit)))
    return QuantizedWeight(spec, codes, scale, input_scale=static)


def _block_scales(p: LayerParameters, spec: LinearSpec) -> tuple[Tensor, LinearSpec]:
    """Block scales, and the spec with the parameter's block, which has fewer rows where fused layers meet inside a block."""
    param = p.need("w_s")
    data: Tensor = param.data.t() if getattr(param, "output_dim", 0) == 1 else param.data
    offset: Any = tuple(getattr(param, "block_offset", (0, 0)))
    rows = getattr(param, "block", spec.block)[0]
    if spec.block[0] % rows == 0 and rows < spec.block[0]:
        spec = spec.replace(block=(rows, spec.block[1]))
        data = data[: spec.replace(block_offset=offset).grid[0]]  # drops repeats of a last block that is not full
    spec = spec.replace(block_offset=offset, scale_dtype=data.dtype)
    if tuple(data.shape) != spec.grid:
        raise InputError("scales do not fit the layer's blocks", tensor=p.name("w_s"), found=list(data.shape),
                         expected=list(spec.grid))  # fmt: skip
    return data.contiguous(), spec


def _byte_codes(p: LayerParameters, spec: LinearSpec, dtype: torch.dtype) -> tuple[LinearSpec, Tensor]:
    """The spec with the layer's shape, and one-byte codes [N, K], from [N, K] or a transposed view of it."""
    param = p.need("w_q")
    data: Tensor = param.data
    if data.dtype != dtype or data.dim() != 2:
        found = f"{list(data.shape)} {data.dtype}"
        raise InputError("the weight has another dtype than its config", tensor=p.name("w_q"), found=found,
                         expected=f"a matrix of {dtype}")  # fmt: skip
    shape: Any = getattr(p.config, "weight_shape", None)
    output_dim = getattr(param, "output_dim", None)
    if output_dim is None:  # vLLM's FP8 layers hold [K, N] as a transposed view without saying so
        transposed_view = not data.is_contiguous() and data.t().is_contiguous()
        output_dim = int(transposed_view if shape is None or shape[0] == shape[1] else tuple(data.shape) == (shape[1], shape[0]))
    if output_dim == 1:
        data = data.t()
    if shape is not None and tuple(data.shape) != tuple(shape):
        raise InputError("the weight has another shape than its config", tensor=p.name("w_q"), found=list(data.shape),
                         expected=list(shape))  # fmt: skip
    n, k = data.shape
    return _with_shape(spec, n, k), data.contiguous().view(torch.uint8)


def _with_shape(spec: LinearSpec, n: int, k: int) -> LinearSpec:
    """The spec with the layer's shape in place of a config's placeholder."""
    rows = n if spec.block[0] == spec.n else min(spec.block[0], n)
    columns = k if spec.block[1] == spec.k else min(spec.block[1], k)
    return spec.replace(n=n, k=k, block=(rows, columns), scale2_block=None if spec.scale2_block is None else (n, k))


def _channel_scales(p: LayerParameters, spec: LinearSpec) -> tuple[Tensor, LinearSpec]:
    """Scales per tensor [1, 1] or per channel [N, 1]. Per-tensor scales of fused layers [layers] are expanded to channels."""
    data: Tensor = p.need("w_s").data.reshape(-1)
    widths = getattr(p.layer, "logical_widths", None) or []
    if data.numel() not in (1, spec.n) and data.numel() == len(widths) and sum(widths) == spec.n:
        data = data.repeat_interleave(torch.tensor(widths, device=data.device))
    if data.numel() == 1:
        return data.view(1, 1), spec.replace(block=(spec.n, spec.k), scale_dtype=data.dtype)
    if data.numel() != spec.n:
        raise InputError("scales do not fit the layer", tensor=p.name("w_s"), found=data.numel(),
                         expected=f"1 or {spec.n}, or one for each of logical_widths")  # fmt: skip
    return data.view(-1, 1), spec.replace(block=(1, spec.k), scale_dtype=data.dtype)


def read_block_scaled(p: LayerParameters, spec: LinearSpec) -> QuantizedWeight:
    """The weight of an NVFP4, MXFP4 or MXFP8 layer."""
    data: Tensor = p.need("w_q").data
    codes = data.view(torch.uint8)
    if codes.dim() != 2:
        raise InputError("the weight is not a matrix", tensor=p.name("w_q"), found=list(data.shape))
    spec = _with_shape(spec, codes.shape[0], codes.shape[1] * 8 // spec.weight.bits)
    scale: Tensor = p.need("w_s").data
    if scale.dtype == torch.uint8 or scale.dtype == spec.scale_dtype:
        scale = scale.view(spec.scale_dtype)
    if scale.dtype != spec.scale_dtype or tuple(scale.shape) != spec.grid:
        raise InputError("scales do not fit the layer", tensor=p.name("w_s"), found=f"{list(scale.shape)} {scale.dtype}",
                         expected=f"{list(spec.grid)} {spec.scale_dtype}")  # fmt: skip
    global_scale = input_scale = None
    if isinstance(p.config, NvFp4LinearLayerConfig):
        global_scale, spec = _global_scale(p, spec)
        param = p.find("i_s")
        # The input's global scale is a divisor: the smallest of fused layers covers the ranges of all.
        input_scale = None if param is None or spec.act is None else param.data.float().min()
    return QuantizedWeight(spec, codes, scale, scale2=global_scale, input_scale=input_scale)


def _global_scale(p: LayerParameters, spec: LinearSpec) -> tuple[Tensor, LinearSpec]:
    """NVFP4's global scale, [1, 1], or [N, 1] where fused layers have their own (vLLM takes their maximum)."""
    data: Tensor = p.need("w_s2").data.reshape(-1)
    widths = getattr(p.layer, "logical_widths", None) or []
    if data.numel() > 1 and not bool((data == data[0]).all()):
        if data.numel() != len(widths) or sum(widths) != spec.n:
            raise InputError("global scales do not fit the layer", tensor=p.name("w_s2"), found=data.numel(),
                             expected="1, or one for each of logical_widths")  # fmt: skip
        rows = data.repeat_interleave(torch.tensor(widths, device=data.device)).view(-1, 1)
        return rows, spec.replace(scale2_block=(1, spec.k))
    return data[:1].view(1, 1), spec
