"""A ModelOpt config: the quantization algorithm of each module, and what it means for activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats.base import TensorSource
from bitline.formats.common.module_names import ByModuleName
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.io.json_object import invalid_config, read_config
from bitline.formats.quant_config import find_quantization
from bitline.types import ActSpec

_SIDE_FILE = "hf_quant_config.json"
_MIXED = "MIXED_PRECISION"

# quant_algo: (how the weight is stored, how activations are quantized).
_ALGORITHMS: dict[str, tuple[str, str]] = {
    "FP8": ("fp8", "fp8"), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "fp8 token"), "FP8_PB_WO": ("fp8", ""),
    "FP8_PB_REAL": ("fp8", ""), "FP8_BLOCK_SCALES": ("fp8", ""),
    "NVFP4": ("nvfp4", "nvfp4"), "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", ""), "W4A8_NVFP4_FP8": ("nvfp4", "fp8"), "MXFP4": ("mxfp4", ""),
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8 if calibrated"), "MXFP8": ("mxfp8", "mxfp8"), "W4A16_AWQ": ("int4", ""),
    "W4A8_AWQ": ("int4", "fp8"), "W8A16": ("int8", ""), "W8A8_SQ_PER_CHANNEL": ("int8", "int8"),
}  # fmt: skip
_ALGORITHM_OF_METHOD = {"modelopt_fp4": "NVFP4", "modelopt_mxfp8": "MXFP8", "modelopt_mixed": _MIXED}
_MX_STORAGE = {"mxfp4", "mxfp8"}  # a scale per 32 columns by definition


@dataclass(frozen=True)
class QuantAlgorithm:
    """A quant_algo in upper case. block: the scale block that the config names, None where it names none."""

    name: str
    block: tuple[int, int] | None = None

    @property
    def storage(self) -> str:
        """How the weight is stored: "fp8", "mxfp8", "nvfp4", "mxfp4", "int4" or "int8"."""
        return _ALGORITHMS[self.name][0]

    def act(self, block_k: int, *, calibrated: bool) -> ActSpec | None:
        """Activation quantization. block_k: columns of a weight scale. calibrated: there is an input_scale."""
        how = _ALGORITHMS[self.name][1]
        if how == "fp8 if calibrated":  # otherwise scaled by the activations' own maximum
            how = "fp8" if calibrated else "fp8 tensor"
        return {
            "": None,
            "fp8": ActSpec(types.float8_e4m3fn, False, "tensor"),
            "fp8 tensor": ActSpec(types.float8_e4m3fn, True, "tensor"),
            "fp8 token": ActSpec(types.float8_e4m3fn),
            "int8": ActSpec(types.int8, False, "tensor"),
            "nvfp4": ActSpec(types.float4_e2m1, True, "group", block_k, scale="e4m3"),
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


class AlgorithmByModule:
    """The algorithm of every module. An invalid config is a CheckpointError at construction.

    config.json and hf_quant_config.json hold the same facts in two forms, and each leaves something out: they are read
    together. file: the one that takes precedence. ignored: the names of unquantized modules in both.
    """

    def __init__(self, source: TensorSource) -> None:
        raw, self.file = find_quantization(source)
        side_raw = self._read_side_file()
        if isinstance(raw.get("quantization"), Mapping):
            raw = {**raw["quantization"], **raw}
        config, side = self._parse(raw, self.file), self._parse(side_raw, self.file.with_name(_SIDE_FILE))
        names = [c.quant_algo.upper() for c in (config, side) if c.quant_algo is not None]
        if len(set(names)) > 1:
            what = f"{self.file.name} and {_SIDE_FILE} name different algorithms"
            raise self._error("quant_algo", what, " and ".join(names), "the same")
        name = names[0] if names else _ALGORITHM_OF_METHOD.get(raw["quant_method"])
        self.ignored = [*(config.ignore or config.exclude_modules or ()), *(side.exclude_modules or ())]
        size = config.group_size if config.group_size is not None else side.group_size
        self._default = None if name in (None, _MIXED) else self._algorithm(str(name), size)
        layers = config.quantized_layers or side.quantized_layers or {}
        if name == _MIXED and not layers:
            what = "mixed precision without the algorithms of its layers"
            raise self._error("quantized_layers", what, "no quantized_layers", "an object")
        self._by_name = ByModuleName({m: self._algorithm(layer.quant_algo, layer.group_size) for m, layer in layers.items()})

    def find(self, module: ModuleTensors, storage: str) -> QuantAlgorithm:
        """The algorithm of a module whose weight is stored as `storage`; an error where the config says something else.

        A module that quantized_layers does not name has the only algorithm in it with this storage.
        """
        found = self._find_named(module.name) or self._default
        if found is None:
            fitting = {a for a in self._by_name.values() if a.storage == storage}
            found = fitting.pop() if len(fitting) == 1 else None
            if found is not None:
                module.warn(f"quantized_layers does not name this layer, which is stored as {found.name} is")
        if found is None or found.storage != storage:
            raise module.error(
                module.codes, "the tensors and the config disagree about the algorithm", f"a weight stored as {storage}",
                f"{'another algorithm' if found is None else found.name}, as {self.file.name} says",
            )  # fmt: skip
        return found

    def _find_named(self, module: str) -> QuantAlgorithm | None:
        """The entry of quantized_layers for a module or a parent of it: experts are often named together."""
        while module:
            if (found := self._by_name.find(module)) is not None:
                return found
            module = module.rpartition(".")[0]
        return None

    def _read_side_file(self) -> Mapping[str, Any]:
        file = self.file.with_name(_SIDE_FILE)
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

    def _algorithm(self, name: str, group_size: int | None) -> QuantAlgorithm:
        """The algorithm. group_size: columns of a scale, rows and columns of a block of FP8; None or 0 where not given."""
        upper = name.upper()
        if upper not in _ALGORITHMS:
            what = f"ModelOpt's algorithm {name!r} is not supported yet"
            raise self._error("quant_algo", what, repr(name), ", ".join(_ALGORITHMS))
        size, storage = group_size or 0, _ALGORITHMS[upper][0]
        if size < 0 or (size != 32 and size and storage in _MX_STORAGE):
            raise self._error("group_size", f"group_size of {upper} is not valid", group_size, "32" if size > 0 else "1 or more")
        block = (size if storage == "fp8" else 1, size)
        return QuantAlgorithm(upper, block if size else None)

    def _error(self, field: str, what: str, found: object, expected: object) -> CheckpointError:
        return CheckpointError(what, file=self.file, field=field, found=found, expected=expected)
