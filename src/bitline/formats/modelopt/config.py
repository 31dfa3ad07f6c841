"""The config side of ModelOpt: which algorithm a module was quantized with, and what that means for its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats.base import TensorSource
from bitline.formats.common.module_names import ByName
from bitline.formats.common.module_tensors import Layer
from bitline.formats.io.json_object import invalid_config, read_config
from bitline.formats.quant_config import find_quantization
from bitline.types import ActSpec

_SIDE = "hf_quant_config.json"
_MIXED = "MIXED_PRECISION"

# Algorithm to (how the weight is stored, how the input is quantized).
_KNOWN: dict[str, tuple[str, str]] = {
    "FP8": ("fp8", "fp8"), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "fp8 token"), "FP8_PB_WO": ("fp8", ""),
    "FP8_PB_REAL": ("fp8", ""), "FP8_BLOCK_SCALES": ("fp8", ""),
    "NVFP4": ("nvfp4", "nvfp4"), "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", ""), "W4A8_NVFP4_FP8": ("nvfp4", "fp8"), "MXFP4": ("mxfp4", ""),
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8 maybe"), "MXFP8": ("mxfp8", "mxfp8"), "W4A16_AWQ": ("int4", ""),
    "W4A8_AWQ": ("int4", "fp8"), "W8A16": ("int8", ""), "W8A8_SQ_PER_CHANNEL": ("int8", "int8"),
}  # fmt: skip
_BY_METHOD = {"modelopt_fp4": "NVFP4", "modelopt_mxfp8": "MXFP8", "modelopt_mixed": _MIXED}
_ONE_SIZE = {"mxfp4", "mxfp8"}  # their groups are 32 columns by definition


@dataclass(frozen=True)
class Algorithm:
    """name: in upper case. group_size: columns of a scale, or rows and columns of a block; 0 where the config is silent."""

    name: str
    group_size: int = 0

    @property
    def kind(self) -> str:
        """How the weight is stored."""
        return _KNOWN[self.name][0]

    def act(self, group: int, *, calibrated: bool) -> ActSpec | None:
        """How the input is quantized. group: columns of a weight's scale. calibrated: an input_scale is there."""
        how = _KNOWN[self.name][1]
        if how == "fp8 maybe":  # an input that was not calibrated is quantized by its own largest value
            how = "fp8" if calibrated else "fp8 tensor"
        return {
            "": None,
            "fp8": ActSpec(types.float8_e4m3fn, False, "tensor"),
            "fp8 tensor": ActSpec(types.float8_e4m3fn, True, "tensor"),
            "fp8 token": ActSpec(types.float8_e4m3fn),
            "int8": ActSpec(types.int8, False, "tensor"),
            "nvfp4": ActSpec(types.float4_e2m1, True, "group", group, scale="e4m3"),
            "mxfp8": ActSpec(types.float8_e4m3fn, True, "group", 32, scale="e8m0"),
        }[how]


class _Override(msgspec.Struct):
    quant_algo: str
    group_size: int | None = None


class _Config(msgspec.Struct):
    quant_algo: str | None = None
    group_size: int | None = None
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None
    quantized_layers: dict[str, _Override] | None = None


class Algorithms:
    """The algorithm of every module. A config that is not valid is a CheckpointError when this is made.

    config.json and hf_quant_config.json say the same in two forms, and each leaves something out: they are read together.
    file: the one that rules. left_alone: the modules that they say are not quantized.
    """

    def __init__(self, source: TensorSource) -> None:
        raw, self.file = find_quantization(source)
        side = self._side(source)
        if isinstance(raw.get("quantization"), Mapping):
            raw = {**raw["quantization"], **raw}
        config, more = self._parse(raw, self.file), self._parse(side, self.file.with_name(_SIDE))
        names = [c.quant_algo.upper() for c in (config, more) if c.quant_algo is not None]
        if len(set(names)) > 1:
            raise self._error(
                "quant_algo", f"{self.file.name} and {_SIDE} name different algorithms", " and ".join(names), "the same"
            )
        name = names[0] if names else _BY_METHOD.get(raw["quant_method"])
        self.left_alone = [*(config.ignore or config.exclude_modules or ()), *(more.exclude_modules or ())]
        size = config.group_size if config.group_size is not None else more.group_size
        self._overall = None if name in (None, _MIXED) else self._algorithm(str(name), size)
        layers = config.quantized_layers or more.quantized_layers or {}
        if name == _MIXED and not layers:
            raise self._error(
                "quantized_layers", "mixed precision without the algorithms of its layers", "no quantized_layers", "an object"
            )
        self._layers = ByName({m: self._algorithm(layer.quant_algo, layer.group_size) for m, layer in layers.items()})

    def of(self, module: Layer, kind: str) -> Algorithm:
        """The algorithm of a module whose weight is stored as `kind`; an error where the config says something else.

        A module that quantized_layers does not name has the only algorithm in it that stores weights so.
        """
        found = self._find(module.base) or self._overall
        if found is None:
            fitting = {a for a in self._layers.values() if a.kind == kind}
            found = fitting.pop() if len(fitting) == 1 else None
            if found is not None:
                module.oddities.append(f"quantized_layers does not name this layer, which is stored as {found.name} is")
        if found is None or found.kind != kind:
            raise module.error(
                module.main, "the tensors and the config disagree about the algorithm", f"a weight stored as {kind}",
                f"{'another algorithm' if found is None else found.name}, as {self.file.name} says",
            )  # fmt: skip
        return found

    def _find(self, name: str) -> Algorithm | None:
        """What quantized_layers says of a module, or of one that holds it: experts are often named together."""
        while name:
            if (found := self._layers.find(name)) is not None:
                return found
            name = name.rpartition(".")[0]
        return None

    def _side(self, source: TensorSource) -> Mapping[str, Any]:
        file = self.file.with_name(_SIDE)
        if self.file == file or not file.is_file():
            return {}
        quantization = read_config(file).get("quantization") or {}
        if not isinstance(quantization, Mapping):
            raise CheckpointError(
                "quantization is not an object", file=file, field="quantization", found=type(quantization).__name__
            )
        return quantization

    def _parse(self, raw: Mapping[str, Any], file: Path) -> _Config:
        try:
            return msgspec.convert(raw, _Config)
        except msgspec.ValidationError as error:
            raise invalid_config(error, file) from error

    def _algorithm(self, name: str, group_size: int | None) -> Algorithm:
        upper = name.upper()
        if upper not in _KNOWN:
            raise self._error("quant_algo", f"ModelOpt's algorithm {name!r} is not supported yet", repr(name), ", ".join(_KNOWN))
        size = group_size or 0
        if size < 0 or (size != 32 and size and _KNOWN[upper][0] in _ONE_SIZE):
            raise self._error("group_size", f"group_size of {upper} is not valid", group_size, "32" if size > 0 else "1 or more")
        return Algorithm(upper, size)

    def _error(self, field: str, what: str, found: object, expected: object) -> CheckpointError:
        return CheckpointError(what, file=self.file, field=field, found=found, expected=expected)
