"""torchao in safetensors: tensor subclasses taken apart, described in the files' own metadata.

Integers are here; FP8, MX and NVFP4 are in torchao_float. Only names and numbers are taken from a description.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorSource, missing_codes
from bitline.formats.common.module_tensors import FLOATS
from bitline.formats.compressed_tensors.packing import narrow_integers
from bitline.formats.quant_config import find_quantization
from bitline.formats.torchao import minifloat
from bitline.formats.torchao.tensor_subclass import DescribedLayer, dtype_of
from bitline.types import ActSpec, LinearSpec

_QDATA = "._weight_qdata"
_KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", *minifloat.KINDS)
_INT8 = (torch.int8,)


class TorchAOReader:
    """Layer records of torchao checkpoints in safetensors."""

    name = "torchao"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "torchao"."""
        return find_quantization(source)[0].get("quant_method") == "torchao"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every weight that is stored as a tensor subclass. Of tensor data only zero points of int8 are read."""
        for name, info in source.tensors.items():
            if name.endswith(_QDATA):
                yield _record(DescribedLayer(source, name.removesuffix(_QDATA)))
            elif name.endswith("._weight_scale") and name.removesuffix("._weight_scale") + _QDATA not in source.tensors:
                raise missing_codes(info, name.removesuffix("._weight_scale") + _QDATA)
            elif name.endswith("_qdata") and "._" in name:
                raise CheckpointError(
                    "torchao parameters that are not a layer's weight are not supported yet", file=info.file, tensor=name,
                    found=f"{info.dtype} {list(info.shape)}", expected="the weight of a linear layer, not experts in one tensor",
                )  # fmt: skip


def _record(m: DescribedLayer) -> LayerRecord:
    """The record, by the class of the weight."""
    if m.kind not in _KINDS:
        raise m.error(
            m.main, "torchao weights of this kind are not supported yet", repr(m.kind), " or ".join(_KINDS),
            "its bytes are in the order of one kernel: quantize the model again with one of these",
        )  # fmt: skip
    if m.kind in minifloat.KINDS:
        return minifloat.record(m)
    return _int4(m) if m.kind == "Int4Tensor" else _bytes(m)


def _bytes(m: DescribedLayer) -> LayerRecord:
    """One integer a byte, scales on the grid of block_size, zero points int8 or floats that are whole numbers."""
    n, k = m.matrix("_weight_qdata", _INT8)
    block = m.block(n, k)
    grid, dtype = m.scales(n, k, block), m.need("_weight_scale").dtype
    width, zero = _width(m), None
    if m.find("_weight_zero_point") is not None:
        kinds = (torch.int8, torch.int32, torch.int64, *FLOATS)
        m.need("_weight_zero_point", kinds, (grid, m.need("_weight_scale").shape))
        zero = _zeros(m, grid, width)
    moved = width < 8 or zero is not None  # codes become unsigned
    factors, act = m.factors(k), _inputs(m)
    spec = LinearSpec(
        n, k, types.unsigned(width, symmetric=zero is None) if moved else types.int8, block, scale_dtype=dtype,
        zero="none" if zero is None else "int", act=act, bias=m.bias(n), input_multiplier=factors,
    )  # fmt: skip
    static = act is not None and not act.dynamic
    shifted = act is not None and static and not act.symmetric

    def build() -> dict[str, Tensor | None]:
        raw = m.read("_weight_qdata")
        codes = narrow_integers(raw, width) if moved else raw.view(torch.uint8)
        if codes is None:
            found, half = f"{int(raw.min())}..{int(raw.max())}", 1 << (width - 1)
            raise m.error(m.main, f"values do not fit {width} bits", found, f"{-half}..{half - 1}")
        return {
            "codes": codes, "scale": m.read("_weight_scale", *grid), "zero": zero,
            "input_scale": m.read("_weight_act_quant_scale").reshape(()) if static else None,
            "input_zero": m.read("_weight_act_quant_zero_point").reshape(()) if shifted else None,
            "input_multiplier": m.read_factors(k),
        }  # fmt: skip

    fields = {"scale": "_weight_scale", "zero": "_weight_zero_point", "input_scale": "_weight_act_quant_scale"}
    return m.record(f"torchao {m.kind}", spec, build, fields)


def _int4(m: DescribedLayer) -> LayerRecord:
    """Int4Tensor: two codes of a row in a byte, the lower first, two's complement; scale and zero [K/g, N].

    The zero point is a number in the weight's units, the value of code 0: W = code * scale + zero.
    """
    n, half = m.matrix("_weight_qdata", (torch.int8, torch.uint8))
    k = 2 * half
    shape = m.data.get("shape")
    if shape is not None and list(shape) != [n, k]:
        raise m.error(m.main, "the shape in a weight's description is not the weight's", shape, [n, k])
    block = m.block(n, k)
    if block[0] != 1:
        raise m.error(m.main, "Int4Tensor has groups of a row's columns", f"block_size {list(block)}", "[1, columns]")
    groups = -(-k // block[1])
    scale = m.need("_weight_scale", FLOATS, ((groups, n),))
    m.need("_weight_zero_point", (scale.dtype,), (scale.shape,))
    eight = dtype_of(m.data.get("activation_dtype")) == "float8_e4m3fn"
    act = ActSpec(types.float8_e4m3fn) if eight else None
    # With FP8 inputs the producer quantizes symmetrically, and stores zeros that are all 0.
    spec = LinearSpec(n, k, types.uint4b8, block, scale_dtype=scale.dtype, zero="none" if eight else "float", act=act,
                      bias=m.bias(n), input_multiplier=m.factors(k))  # fmt: skip

    def build() -> dict[str, Tensor | None]:
        offset = m.read("_weight_zero_point")
        if eight and bool(offset.any()):
            raise m.error(m.need("_weight_zero_point"), "zero points of a symmetric weight", "some that are not 0", "zeros")
        return {
            "codes": m.read("_weight_qdata").view(torch.uint8) ^ 0x88, "scale": m.read("_weight_scale").t().contiguous(),
            "offset": None if eight else offset.t().contiguous(), "input_multiplier": m.read_factors(k),
        }  # fmt: skip

    return m.record("torchao Int4Tensor", spec, build, {"scale": "_weight_scale", "offset": "_weight_zero_point"})


def _width(m: DescribedLayer) -> int:
    """Bits of a code."""
    if m.kind == "Int8Tensor":
        return 8
    name = dtype_of(m.data.get("target_dtype"))
    if name not in {f"int{width}" for width in range(1, 9)}:
        raise m.error(
            m.main, "target_dtype of a weight is not supported", name or repr(m.data.get("target_dtype")), "int1 to int8"
        )
    return int(name.removeprefix("int"))


def _zeros(m: DescribedLayer, grid: tuple[int, int], width: int) -> Tensor | None:
    """Zero points as unsigned codes, uint8 [grid]; None where all are 0, as in symmetric weights."""
    stored, half, info = m.read("_weight_zero_point", *grid), 1 << (width - 1), m.need("_weight_zero_point")
    if not bool(stored.any()):
        return None
    whole = stored.long()
    if stored.dtype.is_floating_point and not torch.equal(whole.to(stored.dtype), stored):
        raise m.error(info, "zero points between two integers are not supported yet", "fractions", "whole numbers")
    low, high = int(whole.min()), int(whole.max())
    if low < -half or high >= half:
        raise m.error(info, f"zero points do not fit {width} bits", f"{low}..{high}", f"{-half}..{half - 1}")
    return (whole + half).to(torch.uint8)


def _inputs(m: DescribedLayer) -> ActSpec | None:
    """How inputs are quantized: int8 per token or tensor, dynamic or, where a scale for them is stored, static."""
    asked: Any = m.data.get("activation_quantization")
    if asked in (
        "int8_asym_per_token",
        {"_type": "IntxUnpackedToInt8TensorActivationQuantization", "_data": "INT8_ASYM_PER_TOKEN"},
    ):
        return ActSpec(types.int8, symmetric=False)
    scale, values = m.find("_weight_act_quant_scale"), m.values("act_quant_kwargs")
    m.find("_weight_act_quant_zero_point")
    if asked is None and values is None:
        if scale is not None:
            raise m.error(scale, "a scale for inputs that nothing asks for", "no act_quant_kwargs", "both or none")
        return None
    mapping = (values or {}).get("mapping_type")
    how, symmetric = m.granularity(values or {}), "SYMMETRIC" if mapping is None else dtype_of(mapping)
    known = asked is None and how in ("token", "tensor") and symmetric in ("SYMMETRIC", "ASYMMETRIC")
    if not known or (values or {}).get("reduce_range"):
        found = f"{asked or 'act_quant_kwargs'}: {how} {symmetric}".strip()
        raise m.error(m.main, "inputs quantized this way are not supported yet", found, "int8 per token or tensor")
    if scale is None:
        return ActSpec(types.int8, True, "token" if how == "token" else "tensor", 0, symmetric != "ASYMMETRIC")
    m.number("_weight_act_quant_scale")
    if symmetric == "ASYMMETRIC":
        m.number("_weight_act_quant_zero_point", (torch.int8, torch.int32))
    return ActSpec(types.int8, False, "tensor", 0, symmetric != "ASYMMETRIC")


READER = TorchAOReader()
