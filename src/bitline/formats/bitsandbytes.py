"""bitsandbytes: NF4 and FP4 in blocks of the flattened weight, optionally with double quantization, and LLM.int8().

Every 4-bit layer describes its shape and block size in a small JSON tensor, quant_state, so little of the config is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.common.ignored_modules import ignored_names
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.scales import FLOATS
from bitline.formats.common.slices import COLUMNS, ROWS, Layout, vector_axes
from bitline.formats.io.json_object import parse_object
from bitline.formats.quant_config import find_quantization, is_allowed
from bitline.types import LinearSpec, ScalarType

_TYPES: dict[str, ScalarType] = {"nf4": types.nf4, "fp4": types.fp4_bnb}
_STATE = ".weight.quant_state.bitsandbytes__"
_STATE_KEYS = {"quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"}
_MAX_STATE_BYTES = 4096
_MAX_BLOCK = 1 << 20
_FLAG = (None, True, False)
_ALLOWED = dict.fromkeys(("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"), _FLAG) | {
    "bnb_4bit_quant_type": (None, *_TYPES)
}
_ROW_MAJOR = 0  # weight_format; the others are tile orders of old GPU generations


class BitsAndBytesReader:
    """Layer records of bitsandbytes checkpoints, 4-bit and int8."""

    name = "bitsandbytes"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "bitsandbytes"."""
        return find_quantization(source)[0].get("quant_method") == "bitsandbytes"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a quant_state or an SCB. Of tensor data only quant_state and weight_format are read."""
        config, file = find_quantization(source)
        for key, allowed in _ALLOWED.items():
            if not is_allowed(config.get(key), allowed):
                raise CheckpointError(
                    f"{key} is not known", file=file, field=key, found=repr(config.get(key))[:200],
                    expected=" or ".join(map(repr, allowed)),
                )  # fmt: skip
        ignored_names(config, file, "llm_int8_skip_modules")
        modules = {name.partition(_STATE)[0] for name in source.tensors if _STATE in name}
        for name in source.tensors:
            module, state, kind = name.partition(_STATE)
            if state:
                yield _four_bit_record(source, module, kind, config)
            elif name.endswith(".SCB"):
                yield _int8_record(ModuleTensors(source, name.removesuffix(".SCB"), "weight"))
            elif name.endswith(".weight.absmax") and name.removesuffix(".weight.absmax") not in modules:
                raise _missing_state(source.tensors[name])


def _missing_state(absmax: TensorInfo) -> CheckpointError:
    """A truncated layer: its codes, where they are stored as floats, would pass for a small dense weight."""
    return CheckpointError(
        "a quantized layer lacks its quant_state", file=absmax.file, tensor=absmax.name, found="absmax without it",
        expected=f"{absmax.name.removesuffix('.weight.absmax')}{_STATE}nf4 or fp4",
        fix="a shard is missing or the checkpoint is truncated: download it again",
    )  # fmt: skip


# ---- NF4 and FP4 ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _QuantState:
    """The shape and block size of a 4-bit weight and, under double quantization, how its scales are quantized."""

    n: int
    k: int
    block: int
    nested_block: int | None = None
    offset: float = 0.0

    @property
    def num_scales(self) -> int:
        """Blocks of the flattened weight, the last of which may be partial."""
        return -(-self.n * self.k // self.block)


def _four_bit_record(source: TensorSource, name: str, kind: str, config: Mapping[str, Any]) -> LayerRecord:
    m = ModuleTensors(source, name, "weight")
    info = m.require(f"weight.quant_state.bitsandbytes__{kind}", (torch.uint8,))
    if kind not in _TYPES:
        raise m.error(info, "a 4-bit type of bitsandbytes that is not known", kind, " or ".join(_TYPES))
    state = _parse_state(m, info, kind)
    _check_codes(m, state)
    scale_dtype = _check_scales(m, state)
    configured = config.get("bnb_4bit_quant_type")
    if isinstance(configured, str) and configured in _TYPES and configured != kind:
        m.warn(f"the config says {configured}, the tensors are {kind}")
    weight = _TYPES[kind]
    # Where K is not a multiple of the block, blocks run over the ends of rows: the scale is repeated for each common divisor.
    size = math.gcd(state.k, state.block)
    spec = LinearSpec(state.n, state.k, weight, (1, size), scale_dtype=scale_dtype, bias=m.has_bias(state.n))

    def read_fields() -> dict[str, Tensor]:
        _check_table(m, kind, weight)
        scale = m.read("weight.absmax") if state.nested_block is None else _dequantize_scales(m, state)
        if size != state.block:
            scale = scale.repeat_interleave(state.block // size)[: state.n * state.k // size]
        return {"codes": _repack(m.read("weight"), state), "scale": scale.reshape(spec.grid)}

    label = f"bitsandbytes {kind}" + ("" if state.nested_block is None else " nested")
    return m.record(label, spec, read_fields, {"scale": "weight.absmax"})


def _parse_state(m: ModuleTensors, info: TensorInfo, kind: str) -> _QuantState:
    """The JSON in quant_state. Its producer fixes what it means, so an unknown key is an error too."""
    if len(info.shape) != 1 or info.nbytes > _MAX_STATE_BYTES:
        raise m.error(info, "quant_state is not a short text", list(info.shape), f"at most {_MAX_STATE_BYTES} bytes")
    try:
        values = parse_object(m.source.read(info.name).numpy().tobytes(), info.file, "quant_state")
    except CheckpointError as error:
        raise m.error(info, error.what, error.found, "the JSON object that bitsandbytes writes") from error
    if unknown := values.keys() - _STATE_KEYS:
        raise m.error(info, "quant_state has unknown keys", ", ".join(sorted(unknown)), ", ".join(sorted(_STATE_KEYS)))
    if values.get("quant_type") != kind:
        raise m.error(info, "quant_state contradicts its own name", f"quant_type {values.get('quant_type')!r}", kind)
    shape = values.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(_is_size(size, 1 << 40) for size in shape):
        raise m.error(info, "the shape in quant_state is not that of a linear layer", shape, "[out_features, in_features]")
    blocks = [values.get("blocksize"), *([values["nested_blocksize"]] if "nested_blocksize" in values else [])]
    if not all(_is_size(block, _MAX_BLOCK) for block in blocks):
        raise m.error(info, "a block size in quant_state is not valid", blocks, f"1 to {_MAX_BLOCK}")
    if len(blocks) == 1:
        return _QuantState(shape[0], shape[1], blocks[0])
    offset = values.get("nested_offset")
    if not isinstance(offset, (int, float)) or not abs(offset) < 3e38:  # float32; false for NaN
        raise m.error(info, "nested_offset in quant_state is not valid", repr(offset), "a finite number")
    if values.get("nested_dtype") != "float32":
        raise m.error(info, "nested_dtype in quant_state is not known", repr(values.get("nested_dtype")), "'float32'")
    return _QuantState(shape[0], shape[1], blocks[0], blocks[1], float(offset))


def _is_size(value: object, largest: int) -> bool:
    return type(value) is int and 1 <= value <= largest


def _check_codes(m: ModuleTensors, state: _QuantState) -> None:
    """The codes fill the stored tensor, whatever dtype its bytes are viewed as (bnb_4bit_quant_storage)."""
    info, nbytes = m.require("weight", (torch.uint8, *FLOATS)), -(-state.n * state.k // 2)
    if len(info.shape) > 2:
        raise m.error(info, "not the codes of a matrix", list(info.shape), "one or two dimensions")
    if info.nbytes != -(-nbytes // info.dtype.itemsize) * info.dtype.itemsize:
        raise m.error(
            info, "codes do not fit the shape in quant_state", f"{info.nbytes} bytes",
            f"{nbytes} for a [{state.n}, {state.k}] weight",
        )  # fmt: skip


def _check_scales(m: ModuleTensors, state: _QuantState) -> torch.dtype:
    """The headers of absmax and its tables. Returns the dtype of the scales."""
    m.require("weight.quant_map", (torch.float32,), ((16,),))
    if state.nested_block is None:
        return m.require("weight.absmax", FLOATS, ((state.num_scales,),)).dtype
    m.require("weight.absmax", (torch.uint8,), ((state.num_scales,),))
    m.require("weight.nested_absmax", (torch.float32,), ((-(-state.num_scales // state.nested_block),),))
    m.require("weight.nested_quant_map", (torch.float32,), ((256,),))
    return torch.float32


def _check_table(m: ModuleTensors, kind: str, weight: ScalarType) -> None:
    """quant_map must be the table of its type."""
    table = m.read("weight.quant_map")
    if not torch.equal(table, torch.tensor(weight.values(), dtype=torch.float32)):
        info = m.source.tensors[f"{m.name}.weight.quant_map"]
        found, expected = (", ".join(f"{v:.4g}" for v in values) for values in (table.tolist(), weight.values()))
        raise m.error(info, f"quant_map is not the table of {kind}", found, expected)


def _dequantize_scales(m: ModuleTensors, state: _QuantState) -> Tensor:
    """Scales of double quantization, float32 [num_scales]: table[code] * nested_absmax + offset, rounded as the producer does."""
    assert state.nested_block is not None
    values = m.read("weight.nested_quant_map").index_select(0, m.read("weight.absmax").int())
    nested = m.read("weight.nested_absmax").repeat_interleave(min(state.nested_block, state.num_scales))
    return values.mul_(nested[: state.num_scales]).add_(state.offset)


def _repack(stored: Tensor, state: _QuantState) -> Tensor:
    """Flattened codes, the first of a byte in its high nibble, to canonical rows, uint8 [N, ceil(K/2)]."""
    flat = stored.reshape(-1).view(torch.uint8)[: -(-state.n * state.k // 2)]
    flat = (flat << 4).bitwise_or_(flat >> 4)
    if state.k % 2 == 0:
        return flat.view(state.n, state.k // 2)
    out = torch.empty(state.n, bitstream.row_bytes(state.k, 4), dtype=torch.uint8)
    step = 2 * bitstream.rows_per_chunk(2 * state.k)  # even: with an odd K every second row begins within a byte
    for r in range(0, state.n, step):
        rows = min(step, state.n - r)
        part = flat[r * state.k // 2 : -(-(r + rows) * state.k // 2)].unsqueeze(0)
        out[r : r + rows] = bitstream.pack(bitstream.unpack(part, 4, rows * state.k).reshape(rows, state.k), 4)
    return out


# ---- LLM.int8() ----------------------------------------------------------------------------------------------------------


def _int8_record(m: ModuleTensors) -> LayerRecord:
    """LLM.int8(): W = codes * SCB / 127, one scale per row. Its outlier columns are chosen at run time, not stored."""
    n, k = m.matrix("weight", (torch.int8,))
    m.require("SCB", (torch.float32,), ((n,), (n, 1)))
    tiling = m.find("weight_format")
    if tiling is not None:
        m.require("weight_format", (torch.uint8,), ((), (1,)))
        found = int(m.read("weight_format").reshape(()))
        if found != _ROW_MAJOR:
            fix = "save the model again with a bitsandbytes that stores rows"
            raise m.error(tiling, "codes are stored in the tile order of a GPU", f"weight_format {found}", _ROW_MAJOR, fix)
    spec = LinearSpec(n, k, types.int8, (1, k), scale_dtype=torch.float32, bias=m.has_bias(n))

    def read_fields() -> dict[str, Tensor]:
        scale = (m.read("SCB").double() / 127).float()  # one rounding, of the scale instead of every weight
        return {"codes": m.read("weight").view(torch.uint8), "scale": scale.reshape(n, 1)}

    layout: Layout = {"weight": (ROWS, COLUMNS), "SCB": vector_axes(ROWS, m.require("SCB").shape)}
    return m.record("bitsandbytes int8", spec, read_fields, {"scale": "SCB"}, layout, _int8_record)


READER = BitsAndBytesReader()
