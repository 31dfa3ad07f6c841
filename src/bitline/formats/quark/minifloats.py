"""Quark's minifloats: FP8, FP4 and FP6 with float, E8M0 (MX), E4M3 (NVFP4) or E5M3 scales, and the "mx" type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bitline import types
from bitline.formats.base import LayerRecord
from bitline.formats.common.scales import E8M0, FLOATS, e5m3_scales, grid_of, stored_shapes
from bitline.formats.common.slices import ROWS, Layout, byte_axis, scale_axes
from bitline.formats.quark import packing
from bitline.formats.quark.module import MX_TYPES, QuarkModule, WeightFields
from bitline.types import ScalarType

FP8_TYPES = {"fp8_e4m3": (types.float8_e4m3fn, torch.float8_e4m3fn), "fp8_e5m2": (types.float8_e5m2, torch.float8_e5m2)}
MX_DTYPES = ("mx", "mx6", "mx9", "bfp16")
_MX_BLOCK = 32  # columns of a scale of the "mx" type


def fp8_record(m: QuarkModule) -> LayerRecord:
    """FP8, one code per byte."""
    weight, stored = FP8_TYPES[m.dtype]
    n, k = m.matrix("weight", (stored,))
    return _float_record(m, n, k, weight, fp8_record)


def packed_record(m: QuarkModule) -> LayerRecord:
    """FP4 or FP6 per group, packed in bytes."""
    weight = MX_TYPES[m.dtype]
    n, columns = m.matrix("weight", (torch.uint8,))
    return _float_record(m, n, m.num_codes(columns, weight.bits), weight, packed_record)


def _float_record(
    m: QuarkModule, n: int, k: int, weight: ScalarType, again: Callable[[QuarkModule], LayerRecord]
) -> LayerRecord:  # fmt: skip
    """Rows are canonical as stored; scales are floats, E8M0, E5M3, or E4M3 under a global scale."""
    block = m.scale_block(n, k)
    shapes = stored_shapes(grid_of(n, k, block), n)
    scale_kind = _scale_kind(m)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {
        " e4m3": (torch.float8_e4m3fn,), " e5m3": (torch.uint8,), " e8m0": E8M0, "": FLOATS,
    }  # fmt: skip
    m.require("weight_scale", dtypes[scale_kind], shapes)
    has_global = scale_kind == " e4m3"
    if has_global:
        m.scalar("weight_scale_2", (torch.float32,))
    scale_dtype = {" e8m0": torch.float8_e8m0fnu, " e5m3": torch.bfloat16}.get(scale_kind, m.scale.dtype)
    spec = m.spec(n, k, weight, block, scale_dtype=scale_dtype, scale2_block=(n, k) if has_global else None)

    def read_fields() -> WeightFields:
        scale = m.read("weight_scale")
        if scale_kind == " e8m0":
            scale = scale.view(torch.float8_e8m0fnu)
        elif scale_kind == " e5m3":
            scale = e5m3_scales(scale)
        scale2 = m.read("weight_scale_2", 1, 1).double() if has_global else None
        return {"codes": m.read("weight").view(torch.uint8), "scale": scale.reshape(grid_of(n, k, block)), "scale2": scale2}

    layout: Layout = {"weight": (ROWS, byte_axis(weight.bits)), "weight_scale": scale_axes(spec, m.scale.shape)}
    return m.quark_record(m.dtype + scale_kind, spec, read_fields, layout, again)


def _scale_kind(m: QuarkModule) -> str:
    """How block scales are stored: " e4m3" under a global scale, " e5m3", " e8m0" or "" for floats."""
    if m.config.weight_scales:
        found = m.config.weight_scales[0].dtype
        if found != "fp8_e4m3":
            raise m.error(m.scale, "scales of this kind are not supported yet", found, "fp8_e4m3")
        return " e4m3"
    declared = m.weight_spec.scale_format
    if declared == "e5m3":
        return " e5m3"
    return " e8m0" if declared == "e8m0" or m.scale.dtype in E8M0 else ""


def mx_record(m: QuarkModule) -> LayerRecord:
    """The "mx" type: a scale per 32 columns, stored as a two's complement exponent without the bias of E8M0."""
    element = m.weight_spec.mx_element
    if m.dtype != "mx" or element not in MX_TYPES or not m.weight_spec.has_groups_of(_MX_BLOCK):
        raise m.error(
            m.codes, "Quark weights of this kind are not supported yet",
            f"{m.dtype} of {element}, {m.weight_spec.groups_text}",
            f"mx of {', '.join(MX_TYPES)} in blocks of {_MX_BLOCK}",
            "quantize the model again with fp4 per group and scale_format e8m0",
        )  # fmt: skip
    weight = MX_TYPES[element]
    n, columns = m.matrix("weight", (torch.uint8,))
    k = m.num_codes(columns, weight.bits)
    m.require("weight_scale", (torch.uint8, torch.int8), (grid_of(n, k, (1, _MX_BLOCK)),))
    spec = m.spec(n, k, weight, (1, _MX_BLOCK), scale_dtype=torch.float8_e8m0fnu)

    def read_fields() -> WeightFields:
        codes, exponent = m.read("weight"), m.read("weight_scale").view(torch.uint8)
        scale = (exponent + 127).view(torch.float8_e8m0fnu)  # modulo 256
        return {"codes": packing.repack_mx_fp6(codes) if weight.bits == 6 else codes, "scale": scale}

    layout: Layout = {"weight": (ROWS, byte_axis(weight.bits)), "weight_scale": scale_axes(spec, m.scale.shape)}
    return m.quark_record(f"mx {element}", spec, read_fields, layout, mx_record)
