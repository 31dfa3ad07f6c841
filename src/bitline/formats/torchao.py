"""torchao in safetensors: int8, FP8 and integers of few bits, one byte each, described in the files' own metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats._json import parse_object
from bitline.formats._layer import FLOATS, Layer
from bitline.formats.base import LayerRecord, TensorSource
from bitline.formats.config import find_quantization
from bitline.formats.ct_codes import narrow_integers
from bitline.types import ActSpec, LinearSpec

_QDATA = "._weight_qdata"
_FP8 = {torch.float8_e4m3fn: types.float8_e4m3fn, torch.float8_e5m2: types.float8_e5m2}
_KINDS = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")
_MOST = 1 << 16  # bytes of one layer's description


class TorchAOReader:
    """Layer records of torchao checkpoints in safetensors."""

    name = "torchao"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "torchao"."""
        return find_quantization(source)[0].get("quant_method") == "torchao"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every weight that is stored as a tensor subclass. Of tensor data only zero points are read."""
        for name in source.tensors:
            if name.endswith(_QDATA):
                yield _Module(source, name.removesuffix(_QDATA)).layer()


class _Module(Layer):
    """A module under inspection. kind, data: the class of its weight and that class's attributes."""

    def __init__(self, source: TensorSource, base: str) -> None:
        super().__init__(source, base, "_weight_qdata")
        text = getattr(source, "metadata", {}).get(f"{base}.weight")
        if text is None or len(text) > _MOST:
            found = "nothing" if text is None else f"{len(text)} characters"
            raise self.error(self.main, "the file's metadata does not describe a weight", found, f"__metadata__[{base}.weight]")
        try:
            described = parse_object(text.encode(errors="replace"), self.main.file, "description of a weight", repeats=True)
        except CheckpointError as error:
            raise self.error(self.main, error.what, error.found, "the JSON that torchao writes") from error
        self.kind, data = described.get("_type"), described.get("_data")
        if not isinstance(data, Mapping):
            raise self.error(self.main, "the description of a weight has no _data", type(data).__name__, "an object")
        self.data: Mapping[str, Any] = data

    def layer(self) -> LayerRecord:
        """The record, by the class of the weight."""
        if self.kind not in _KINDS:
            raise self.error(
                self.main, "torchao weights of this kind are not supported yet", repr(self.kind), " or ".join(_KINDS),
                "quantize the model again with one of these",
            )  # fmt: skip
        for suffix in ("act_quant_scale", "act_quant_zero_point", "act_pre_scale"):
            if (info := self.find(f"_weight_{suffix}")) is not None:
                raise self.error(info, "inputs with static scales are not supported yet for torchao", suffix, "none")
        stored = tuple(_FP8) if self.kind == "Float8Tensor" else (torch.int8,)
        n, k = self.matrix("_weight_qdata", stored)
        block = self._block(n, k)
        grid = (-(-n // block[0]), -(-k // block[1]))
        flat: tuple[tuple[int, ...], ...] = ((),) if grid == (1, 1) else ((n,),) if grid == (n, 1) else ()
        scale = self.need("_weight_scale", FLOATS, (grid, *flat))
        width, floating, zero = self._width(), self.kind == "Float8Tensor", None
        if not floating and self.find("_weight_zero_point") is not None:
            self.need("_weight_zero_point", (torch.int8, torch.int32, torch.int64), (grid, scale.shape))
            zero = self._zeros(grid, width)
        moved = not floating and (width < 8 or zero is not None)  # codes become unsigned
        integer = types.unsigned(width, symmetric=zero is None) if moved else types.int8
        scalar = _FP8[self.main.dtype] if floating else integer
        spec = LinearSpec(n, k, scalar, block, scale_dtype=scale.dtype, zero="none" if zero is None else "int",
                          act=self._act(), bias=self.bias(n))  # fmt: skip

        def build() -> dict[str, Tensor | None]:
            raw = self.read("_weight_qdata")
            codes = narrow_integers(raw, width) if moved else raw.view(torch.uint8)
            if codes is None:
                found, half = f"{int(raw.min())}..{int(raw.max())}", 1 << (width - 1)
                raise self.error(self.main, f"values do not fit {width} bits", found, f"{-half}..{half - 1}")
            return {"codes": codes, "scale": self.read("_weight_scale").reshape(grid), "zero": zero}

        return self.record(f"torchao {self.kind}", spec, build, {"scale": "_weight_scale", "zero": "_weight_zero_point"})

    def _block(self, n: int, k: int) -> tuple[int, int]:
        block = self.data.get("block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and 1 <= b < 1 << 40 for b in block):
            raise self.error(self.main, "block_size of a weight is not valid", block, "[rows, columns]")
        return min(block[0], n), min(block[1], k)

    def _width(self) -> int:
        """Bits of a code."""
        if self.kind != "IntxUnpackedToInt8Tensor":
            return 8
        target = self.data.get("target_dtype")
        name = str(target.get("_data")) if isinstance(target, Mapping) else repr(target)
        if name not in {f"int{width}" for width in range(2, 9)}:
            raise self.error(self.main, "target_dtype of a weight is not supported", name, "int2 to int8")
        return int(name.removeprefix("int"))

    def _zeros(self, grid: tuple[int, int], width: int) -> Tensor | None:
        """Zero points as unsigned codes, uint8 [grid]; None where all are 0, as in symmetric weights."""
        stored, half = self.read("_weight_zero_point").long().reshape(grid), 1 << (width - 1)
        if not bool(stored.any()):
            return None
        if int(stored.min()) < -half or int(stored.max()) >= half:
            info = self.source.tensors[f"{self.base}._weight_zero_point"]
            found = f"{int(stored.min())}..{int(stored.max())}"
            raise self.error(info, f"zero points do not fit {width} bits", found, f"{-half}..{half - 1}")
        return (stored + half).to(torch.uint8)

    def _act(self) -> ActSpec | None:
        """How inputs are to be quantized, always with dynamic scales."""
        asked = self.data.get("activation_quantization")
        if asked == "int8_asym_per_token":
            return ActSpec(types.int8, symmetric=False)
        kwargs = self.data.get("act_quant_kwargs")
        if asked is None and kwargs is None:
            return None
        values = kwargs.get("_data") if isinstance(kwargs, Mapping) else None
        values = values if asked is None and isinstance(values, Mapping) else {}
        rows = _named(values.get("granularity"), "_type")
        mapping = _named(values.get("mapping_type"), "_data")
        dtype = _named(values.get("float8_dtype"), "_data")
        scalar = types.int8 if self.kind == "Int8Tensor" else {"float8_e4m3fn": types.float8_e4m3fn}.get(dtype)
        bounds = [values.get(bound) for bound in ("hp_value_lb", "hp_value_ub")]
        if scalar is None or rows not in ("PerRow", "PerTensor") or mapping not in ("", "SYMMETRIC") or any(bounds):
            found = f"{asked or 'act_quant_kwargs'}: {dtype} {rows} {mapping}".strip()
            raise self.error(self.main, "inputs quantized this way are not supported yet", found, "int8 or FP8, symmetric")
        return ActSpec(scalar, True, "token" if rows == "PerRow" else "tensor")


def _named(value: object, key: str) -> str:
    """A name in torchao's description of an enum, a class or a dtype."""
    return str(value.get(key)) if isinstance(value, Mapping) else ""


READER = TorchAOReader()
