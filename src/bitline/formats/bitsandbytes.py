"""bitsandbytes: NF4 and FP4 in blocks of the flattened weight, with scales that may be quantized themselves, and int8.

Every 4-bit layer tells its own shape and block size in a small JSON text beside it, so little of the config is needed.
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
from bitline.formats.common.ignored_modules import is_known, left_alone
from bitline.formats.common.module_tensors import FLOATS, Layer
from bitline.formats.io.json_object import parse_object
from bitline.formats.quant_config import find_quantization
from bitline.types import LinearSpec, ScalarType

_TYPES: dict[str, ScalarType] = {"nf4": types.nf4, "fp4": types.fp4_bnb}
_STATE = ".weight.quant_state.bitsandbytes__"
_KEYS = {"quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"}
_FLAG = (None, True, False)
_VALUES = dict.fromkeys(("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"), _FLAG) | {
    "bnb_4bit_quant_type": (None, *_TYPES)
}
_MAX_STATE_BYTES = 4096
_MAX_BLOCK = 1 << 20
_ROW_MAJOR = 0  # weight_format: the others are tiles of GPU generations that nobody stores any more


class BitsAndBytesReader:
    """Layer records of bitsandbytes checkpoints, 4-bit and int8."""

    name = "bitsandbytes"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "bitsandbytes"."""
        return find_quantization(source)[0].get("quant_method") == "bitsandbytes"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a quant_state or an SCB. Of tensor data only quant_state and weight_format are read."""
        config, file = find_quantization(source)
        for key, values in _VALUES.items():
            if not is_known(config.get(key), values):
                raise CheckpointError(
                    f"{key} is not known", file=file, field=key, found=repr(config.get(key))[:200],
                    expected=" or ".join(map(repr, values)),
                )  # fmt: skip
        left_alone(config, file, "llm_int8_skip_modules")
        known = {name.partition(_STATE)[0] for name in source.tensors if _STATE in name}
        for name in source.tensors:
            module, state, kind = name.partition(_STATE)
            if state:
                yield _four_bits(source, module, kind, config)
            elif name.endswith(".SCB"):
                yield _eight_bits(source, name.removesuffix(".SCB"))
            elif name.endswith(".weight.absmax") and name.removesuffix(".weight.absmax") not in known:
                raise _stateless(source.tensors[name])


def _stateless(absmax: TensorInfo) -> CheckpointError:
    """A layer that was cut short: its codes, where they are stored as floats, would pass for a small dense weight."""
    return CheckpointError(
        "a quantized layer lacks its quant_state", file=absmax.file, tensor=absmax.name, found="absmax without it",
        expected=f"{absmax.name.removesuffix('.weight.absmax')}{_STATE}nf4 or fp4",
        fix="a shard is missing or the checkpoint was cut: download it again",
    )  # fmt: skip


@dataclass(frozen=True)
class _State:
    """What quant_state says: the shape and block size of a weight, and where its scales are quantized, how."""

    n: int
    k: int
    block: int
    nested_block: int | None = None
    offset: float = 0.0

    @property
    def scales(self) -> int:
        """Blocks of the flattened weight, the last of which may be short."""
        return -(-self.n * self.k // self.block)


def _four_bits(source: TensorSource, module: str, kind: str, config: Mapping[str, Any]) -> LayerRecord:
    layer = Layer(source, module, "weight")
    info = layer.need(f"weight.quant_state.bitsandbytes__{kind}", (torch.uint8,))
    if kind not in _TYPES:
        raise layer.error(info, "a 4-bit type of bitsandbytes that is not known", kind, " or ".join(_TYPES))
    state = _parse(layer, info, kind)
    _check_bytes(layer, state)
    layer.need("weight.quant_map", (torch.float32,), ((16,),))
    if state.nested_block is None:
        scale_dtype = layer.need("weight.absmax", FLOATS, ((state.scales,),)).dtype
    else:
        layer.need("weight.absmax", (torch.uint8,), ((state.scales,),))
        layer.need("weight.nested_absmax", (torch.float32,), ((-(-state.scales // state.nested_block),),))
        layer.need("weight.nested_quant_map", (torch.float32,), ((256,),))
        scale_dtype = torch.float32
    configured = config.get("bnb_4bit_quant_type")
    if isinstance(configured, str) and configured in _TYPES and configured != kind:
        layer.oddities.append(f"the config says {configured}, the tensors are {kind}")
    scalar = _TYPES[kind]
    # Blocks run over the ends of rows where K is not made of whole ones: then a scale is repeated for each common part.
    size = math.gcd(state.k, state.block)
    spec = LinearSpec(state.n, state.k, scalar, (1, size), scale_dtype=scale_dtype, bias=layer.bias(state.n))

    def build() -> dict[str, Tensor]:
        table = layer.read("weight.quant_map")
        if not torch.equal(table, torch.tensor(scalar.values())):
            info = source.tensors[f"{module}.weight.quant_map"]
            found, expected = (", ".join(f"{v:.4g}" for v in values) for values in (table.tolist(), scalar.values()))
            raise layer.error(info, f"quant_map is not the table of {kind}", found, expected)
        scale = layer.read("weight.absmax") if state.nested_block is None else _nested(layer, state)
        if size != state.block:
            scale = scale.repeat_interleave(state.block // size)[: state.n * state.k // size]
        return {"codes": _codes(layer.read("weight"), state), "scale": scale.reshape(spec.grid)}

    label = f"bitsandbytes {kind}" + ("" if state.nested_block is None else " nested")
    return layer.record(label, spec, build, {"scale": "weight.absmax"})


def _parse(layer: Layer, info: TensorInfo, kind: str) -> _State:
    """The JSON in quant_state. What it means is fixed by its producer, so an unknown key is an error as well."""
    if len(info.shape) != 1 or info.nbytes > _MAX_STATE_BYTES:
        raise layer.error(info, "quant_state is not a short text", list(info.shape), f"at most {_MAX_STATE_BYTES} bytes")
    try:
        values = parse_object(layer.source.read(info.name).numpy().tobytes(), info.file, "quant_state")
    except CheckpointError as error:
        raise layer.error(info, error.what, error.found, "the JSON object that bitsandbytes writes") from error
    if unknown := values.keys() - _KEYS:
        raise layer.error(info, "quant_state says what is not known", ", ".join(sorted(unknown)), ", ".join(sorted(_KEYS)))
    if values.get("quant_type") != kind:
        raise layer.error(info, "quant_state contradicts its own name", f"quant_type {values.get('quant_type')!r}", kind)
    shape = values.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(_whole(size, 1 << 40) for size in shape):
        raise layer.error(info, "the shape in quant_state is not that of a linear layer", shape, "[out_features, in_features]")
    blocks = [values.get("blocksize"), *([values["nested_blocksize"]] if "nested_blocksize" in values else [])]
    if not all(_whole(block, _MAX_BLOCK) for block in blocks):
        raise layer.error(info, "a block size in quant_state is not valid", blocks, f"1 to {_MAX_BLOCK}")
    if len(blocks) == 1:
        return _State(shape[0], shape[1], blocks[0])
    offset = values.get("nested_offset")
    if not isinstance(offset, (int, float)) or not abs(offset) < 3e38:  # a float32; NaN is not less than anything
        raise layer.error(info, "nested_offset in quant_state is not valid", repr(offset), "a finite number")
    if values.get("nested_dtype") != "float32":
        raise layer.error(info, "nested_dtype in quant_state is not known", repr(values.get("nested_dtype")), "'float32'")
    return _State(shape[0], shape[1], blocks[0], blocks[1], float(offset))


def _whole(value: object, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _check_bytes(layer: Layer, state: _State) -> None:
    """The codes fill the stored tensor, whatever dtype its bytes are viewed as (bnb_4bit_quant_storage)."""
    info, need = layer.need("weight", (torch.uint8, *FLOATS)), -(-state.n * state.k // 2)
    if len(info.shape) > 2:
        raise layer.error(info, "not the codes of a matrix", list(info.shape), "one or two dimensions")
    if info.nbytes != -(-need // info.dtype.itemsize) * info.dtype.itemsize:
        raise layer.error(
            info, "codes do not fit the shape in quant_state", f"{info.nbytes} bytes",
            f"{need} for a [{state.n}, {state.k}] weight",
        )  # fmt: skip


def _nested(layer: Layer, state: _State) -> Tensor:
    """Scales that are 8-bit codes of a table, in blocks, float32 [scales]: rounded where the producer rounds."""
    assert state.nested_block is not None
    values = layer.read("weight.nested_quant_map").index_select(0, layer.read("weight.absmax").int())
    coarse = layer.read("weight.nested_absmax").repeat_interleave(min(state.nested_block, state.scales))
    return values.mul_(coarse[: state.scales]).add_(state.offset)


def _codes(stored: Tensor, state: _State) -> Tensor:
    """Flattened codes, the first of a byte in its high half, to canonical rows, uint8 [N, ceil(K/2)]."""
    flat = stored.reshape(-1).view(torch.uint8)[: -(-state.n * state.k // 2)]
    flat = (flat << 4).bitwise_or_(flat >> 4)
    if state.k % 2 == 0:
        return flat.view(state.n, state.k // 2)
    out = torch.empty(state.n, bitstream.row_bytes(state.k, 4), dtype=torch.uint8)
    step = 2 * bitstream.rows_per_chunk(2 * state.k)  # every second row begins in the middle of a byte
    for r in range(0, state.n, step):
        rows = min(step, state.n - r)
        part = flat[r * state.k // 2 : -(-(r + rows) * state.k // 2)].unsqueeze(0)
        out[r : r + rows] = bitstream.pack(bitstream.unpack(part, 4, rows * state.k).reshape(rows, state.k), 4)
    return out


def _eight_bits(source: TensorSource, module: str) -> LayerRecord:
    """LLM.int8(): W = codes * SCB / 127, a scale per row. Which inputs to quantize is a choice made at run time there."""
    layer = Layer(source, module, "weight")
    n, k = layer.matrix("weight", (torch.int8,))
    layer.need("SCB", (torch.float32,), ((n,), (n, 1)))
    order = layer.find("weight_format")
    if order is not None:
        layer.need("weight_format", (torch.uint8,), ((), (1,)))
        found = int(layer.read("weight_format").reshape(()))
        if found != _ROW_MAJOR:
            fix = "save the model again with a bitsandbytes that stores rows"
            raise layer.error(order, "codes are stored in a GPU's own order", f"weight_format {found}", _ROW_MAJOR, fix)
    spec = LinearSpec(n, k, types.int8, (1, k), scale_dtype=torch.float32, bias=layer.bias(n))

    def build() -> dict[str, Tensor]:
        scale = (layer.read("SCB").double() / 127).float()  # one rounding, of the scale and not of every weight
        return {"codes": layer.read("weight").view(torch.uint8), "scale": scale.reshape(n, 1)}

    return layer.record("bitsandbytes int8", spec, build, {"scale": "SCB"})


READER = BitsAndBytesReader()
