"""compressed-tensors' float formats: FP8 and MXFP8 in bytes, NVFP4, MXFP4 and MXFP6 packed in uint8."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import types
from bitline.formats.common.module_tensors import MIN_DIVISOR
from bitline.formats.common.scales import E8M0, FLOATS, e5m3_scales
from bitline.formats.compressed_tensors.args import E5M3
from bitline.formats.compressed_tensors.module import QuantizedModule, Reading, WeightFields

FP8_TYPES = {torch.float8_e4m3fn: types.float8_e4m3fn, torch.float8_e5m2: types.float8_e5m2}


def float_quantized(m: QuantizedModule) -> Reading:
    """float-quantized, naive-quantized and mxfp8-quantized: one FP8 code per byte."""
    n, k = m.matrix("weight", tuple(FP8_TYPES))
    _check_float_args(m, 8)
    scale, weight = m.source.tensors[f"{m.name}.weight_scale"], FP8_TYPES[m.codes.dtype]
    if scale.dtype in E8M0:
        spec = m.spec(n, k, weight, m.scale_block(n, k), scale_dtype=torch.float8_e8m0fnu)
        return "mxfp8-quantized", spec, lambda: m.fields(spec, m.read("weight").view(torch.uint8), _e8m0_scales(m))
    m.require("weight_scale", FLOATS)
    spec = m.spec(n, k, weight, m.scale_block(n, k))
    label = m.scheme.format if m.scheme.format == "naive-quantized" else "float-quantized"
    return label, spec, lambda: m.fields(spec, m.read("weight").view(torch.uint8))


def packed_minifloats(m: QuantizedModule) -> Reading:
    """NVFP4, MXFP4 and MXFP6: a little-endian bit stream along K, which is the canonical layout already."""
    n, columns = m.matrix("weight_packed", (torch.uint8,))
    bits = 6 if m.scheme.weights.num_bits == 6 else 4
    _check_float_args(m, bits)
    k = columns * 8 // bits
    if m.find("weight_global_scale") is not None:
        return _nvfp4(m, n, k)
    if m.scheme.format == E5M3 or m.scheme.weights.has_nvfp4_groups:
        return _e5m3(m, n, k)
    m.require("weight_scale", E8M0)
    weight = types.float4_e2m1 if bits == 4 else types.float6_e2m3
    spec = m.spec(n, k, weight, m.scale_block(n, k), scale_dtype=torch.float8_e8m0fnu)
    return f"mxfp{bits}-pack-quantized", spec, lambda: m.fields(spec, m.read("weight_packed"), _e8m0_scales(m))


def _nvfp4(m: QuantizedModule, n: int, k: int) -> Reading:
    """E4M3 block scales under a global scale that divides."""
    m.require("weight_scale", (torch.float8_e4m3fn,))
    m.scalar("weight_global_scale", (torch.float32,))
    spec = m.spec(n, k, types.float4_e2m1, m.scale_block(n, k), scale2_block=(n, k))

    def read_fields() -> WeightFields:
        divisor = m.read("weight_global_scale").reshape(1, 1).double()
        if not MIN_DIVISOR < float(divisor) < float("inf"):
            info = m.source.tensors[f"{m.name}.weight_global_scale"]
            raise m.error(info, "a global scale without a float32 reciprocal", float(divisor), f"above {MIN_DIVISOR}")
        return m.fields(spec, m.read("weight_packed"), scale2=divisor.reciprocal())

    return "nvfp4-pack-quantized", spec, read_fields


def _e5m3(m: QuantizedModule, n: int, k: int) -> Reading:
    """AutoRound's FP4 with unsigned E5M3 block scales and no global scale."""
    m.require("weight_scale", (torch.uint8,))
    spec = m.spec(n, k, types.float4_e2m1, m.scale_block(n, k), scale_dtype=torch.bfloat16)
    return E5M3, spec, lambda: m.fields(spec, m.read("weight_packed"), e5m3_scales(m.read("weight_scale")))


def _check_float_args(m: QuantizedModule, bits: int) -> None:
    """The scheme must be of minifloats of these bits, without zero points."""
    args = m.scheme.weights
    if not args.is_float or args.num_bits != bits:
        raise m.error(m.codes, "codes do not fit their config group", f"{args.type} {args.num_bits} bits", f"float {bits} bits")
    if not args.is_symmetric and (zeros := m.find("weight_zero_point")) is not None:
        raise m.error(zeros, "minifloats with zero points are not supported yet", "symmetric: false", "symmetric: true")


def _e8m0_scales(m: QuantizedModule) -> Tensor:
    return m.read("weight_scale").view(torch.float8_e8m0fnu)
