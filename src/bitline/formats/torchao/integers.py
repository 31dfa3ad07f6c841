"""torchao's integers: Int8Tensor, IntxUnpackedToInt8Tensor and Int4Tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.formats.base import LayerRecord
from bitline.formats.common.int8_codes import pack_int8
from bitline.formats.common.scales import FLOATS
from bitline.formats.common.slices import COLUMNS, ROWS, Axis, byte_axis, scale_axes
from bitline.formats.torchao.tensor_subclass import SubclassTensors, described_name
from bitline.types import ActSpec, LinearSpec

KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor")


def integer_record(m: SubclassTensors) -> LayerRecord:
    """The record of a weight of one of KINDS."""
    return _int4(m) if m.kind == "Int4Tensor" else _int8_stored(m)


# ---- Int8Tensor and IntxUnpackedToInt8Tensor -----------------------------------------------------------------------------


def _int8_stored(m: SubclassTensors) -> LayerRecord:
    """One integer per int8, scales on the grid of block_size, zero points int8 or floats that are whole numbers."""
    n, k = m.matrix("_weight_qdata", (torch.int8,))
    block = m.scale_block(n, k)
    grid, dtype = m.scale_grid(n, k, block), m.require("_weight_scale").dtype
    bits = _bits(m)
    zero = _read_zero_points(m, grid, bits)
    unsigned = bits < 8 or zero is not None
    pre_scale, act = m.has_pre_scale(k), _act(m)
    spec = LinearSpec(
        n, k, types.unsigned(bits, symmetric=zero is None) if unsigned else types.int8, block, scale_dtype=dtype,
        zero="none" if zero is None else "int", act=act, bias=m.has_bias(n), input_multiplier=pre_scale,
    )  # fmt: skip
    static = act is not None and not act.dynamic
    static_zero = act is not None and static and not act.symmetric

    def read_fields() -> dict[str, Tensor | None]:
        stored = m.read("_weight_qdata")
        codes = pack_int8(stored, bits) if unsigned else stored.view(torch.uint8)
        if codes is None:
            found, half = f"{int(stored.min())}..{int(stored.max())}", 1 << (bits - 1)
            raise m.error(m.codes, f"values do not fit {bits} bits", found, f"{-half}..{half - 1}")
        return {
            "codes": codes, "scale": m.read("_weight_scale", *grid), "zero": zero,
            "input_scale": m.read("_weight_act_quant_scale").reshape(()) if static else None,
            "input_zero": m.read("_weight_act_quant_zero_point").reshape(()) if static_zero else None,
            "input_multiplier": m.read_pre_scale(k),
        }  # fmt: skip

    stored_as = {"scale": "_weight_scale", "zero": "_weight_zero_point", "input_scale": "_weight_act_quant_scale"}
    layout = m.layout((ROWS, COLUMNS), scale_axes(spec, m.require("_weight_scale").shape))
    if (zeros := m.find("_weight_zero_point")) is not None:
        layout["_weight_zero_point"] = scale_axes(spec, zeros.shape)
    return m.record(f"torchao {m.kind}", spec, read_fields, stored_as, layout, _int8_stored)


def _bits(m: SubclassTensors) -> int:
    """Bits of a code."""
    if m.kind == "Int8Tensor":
        return 8
    declared = m.data.get("target_dtype")
    name = described_name(declared)
    if name not in {f"int{bits}" for bits in range(1, 9)}:
        raise m.error(m.codes, "target_dtype of a weight is not supported", name or repr(declared), "int1 to int8")
    return int(name.removeprefix("int"))


def _read_zero_points(m: SubclassTensors, grid: tuple[int, int], bits: int) -> Tensor | None:
    """Zero points as unsigned codes, uint8 [grid]; None where there are none or all are 0, as in symmetric weights."""
    if m.find("_weight_zero_point") is None:
        return None
    dtypes = (torch.int8, torch.int32, torch.int64, *FLOATS)
    info = m.require("_weight_zero_point", dtypes, (grid, m.require("_weight_scale").shape))
    stored, half = m.read("_weight_zero_point", *grid), 1 << (bits - 1)
    if not bool(stored.any()):
        return None
    whole = stored.long()
    if stored.dtype.is_floating_point and not torch.equal(whole.to(stored.dtype), stored):
        raise m.error(info, "fractional zero points are not supported yet", "fractions", "whole numbers")
    low, high = int(whole.min()), int(whole.max())
    if low < -half or high >= half:
        raise m.error(info, f"zero points do not fit {bits} bits", f"{low}..{high}", f"{-half}..{half - 1}")
    return (whole + half).to(torch.uint8)


def _act(m: SubclassTensors) -> ActSpec | None:
    """int8 activations per token or tensor, dynamic or, where a scale for them is stored, static; None for weight-only."""
    declared: Any = m.data.get("activation_quantization")
    if declared in (
        "int8_asym_per_token",
        {"_type": "IntxUnpackedToInt8TensorActivationQuantization", "_data": "INT8_ASYM_PER_TOKEN"},
    ):
        return ActSpec(types.int8, symmetric=False)
    scale, act = m.find("_weight_act_quant_scale"), m.attributes("act_quant_kwargs")
    m.leave_unused("_weight_act_quant_zero_point")
    if declared is None and act is None:
        if scale is not None:
            raise m.error(scale, "an activation scale without act_quant_kwargs", "no act_quant_kwargs", "both or none")
        return None
    act = act or {}
    granularity, mapping_type = m.granularity(act), act.get("mapping_type")
    mapping = "SYMMETRIC" if mapping_type is None else described_name(mapping_type)
    known = declared is None and granularity in ("token", "tensor") and mapping in ("SYMMETRIC", "ASYMMETRIC")
    if not known or act.get("reduce_range"):
        found = f"{declared or 'act_quant_kwargs'}: {granularity} {mapping}".strip()
        raise m.error(m.codes, "inputs quantized this way are not supported yet", found, "int8 per token or tensor")
    symmetric = mapping != "ASYMMETRIC"
    if scale is None:
        return ActSpec(types.int8, True, "token" if granularity == "token" else "tensor", 0, symmetric)
    m.scalar("_weight_act_quant_scale")
    if not symmetric:
        m.scalar("_weight_act_quant_zero_point", (torch.int8, torch.int32))
    return ActSpec(types.int8, False, "tensor", 0, symmetric)


# ---- Int4Tensor ----------------------------------------------------------------------------------------------------------


def _int4(m: SubclassTensors) -> LayerRecord:
    """Int4Tensor: two's complement codes, two of a row per byte, low nibble first; scale and zero point [K/g, N].

    The zero point is in the weight's units, the value of code 0: W = code * scale + zero.
    """
    n, columns = m.matrix("_weight_qdata", (torch.int8, torch.uint8))
    k = 2 * columns
    shape = m.data.get("shape")
    if shape is not None and list(shape) != [n, k]:
        raise m.error(m.codes, "the shape in a weight's description is not the weight's", shape, [n, k])
    block = m.scale_block(n, k)
    if block[0] != 1:
        raise m.error(m.codes, "Int4Tensor has groups of a row's columns", f"block_size {list(block)}", "[1, columns]")
    scale = m.require("_weight_scale", FLOATS, ((-(-k // block[1]), n),))
    m.require("_weight_zero_point", (scale.dtype,), (scale.shape,))
    fp8_act = described_name(m.data.get("activation_dtype")) == "float8_e4m3fn"
    act = ActSpec(types.float8_e4m3fn) if fp8_act else None
    # With FP8 activations the producer quantizes symmetrically, and stores zero points that are all 0.
    spec = LinearSpec(n, k, types.uint4b8, block, scale_dtype=scale.dtype, zero="none" if fp8_act else "float", act=act,
                      bias=m.has_bias(n), input_multiplier=m.has_pre_scale(k))  # fmt: skip

    def read_fields() -> dict[str, Tensor | None]:
        offset = m.read("_weight_zero_point")
        if fp8_act and bool(offset.any()):
            info = m.require("_weight_zero_point")
            raise m.error(info, "zero points of a symmetric weight", "some that are not 0", "zeros")
        return {
            "codes": m.read("_weight_qdata").view(torch.uint8) ^ 0x88, "scale": m.read("_weight_scale").t().contiguous(),
            "offset": None if fp8_act else offset.t().contiguous(), "input_multiplier": m.read_pre_scale(k),
        }  # fmt: skip

    groups = None if spec.grid[1] == 1 else Axis(1, block[1])
    layout = m.layout((ROWS, byte_axis(4)), (groups, ROWS))
    layout["_weight_zero_point"] = (groups, ROWS)
    stored_as = {"scale": "_weight_scale", "offset": "_weight_zero_point"}
    return m.record("torchao Int4Tensor", spec, read_fields, stored_as, layout, _int4)
