"""AutoRound's own config over tensors laid out as compressed-tensors lays them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import ByName
from bitline.formats.compressed_tensors.config import E5M3, QuantArgs, Scheme, Schemes, act_spec
from bitline.formats.io.json_object import invalid_config

METHODS = ("auto-round", "intel/auto-round", "inc")
PACKINGS = ("auto_round:llm_compressor", "auto_round:llm_compressor_nvfp4_e5m3", "auto_round:fp8_static")
_MX_INT = ("mx_int", "mx_int4")
_MX_INT_PACKINGS = (None, "auto_round", "auto_round:mx_int", "auto_round:mx_int4", *PACKINGS)


def takes(config: Mapping[str, Any]) -> bool:
    """True for the config of an AutoRound checkpoint that is laid out as compressed-tensors' are, or in MXINT4."""
    packing = config.get("packing_format")
    return packing in PACKINGS or (config.get("data_type") in _MX_INT and packing in _MX_INT_PACKINGS)


class _Keys(msgspec.Struct):
    """The keys that say how a layer was quantized; extra_config repeats some of them for single layers."""

    bits: int
    group_size: int | list[int]
    sym: bool = True
    data_type: str = "int"
    act_bits: int | None = None
    act_group_size: int | None = None
    act_sym: bool = True
    act_data_type: str | None = None
    act_dynamic: bool = True


class AutoRoundSchemes(Schemes):
    """Every module has the scheme of the whole config, changed by what extra_config says of its name."""

    def __init__(self, raw: Mapping[str, Any], file: Path) -> None:
        super().__init__([], [], None)
        self._raw, self._file = raw, file
        if raw.get("rotation_config"):
            raise CheckpointError(
                "the weights were rotated and the model must undo it as it runs, which is not supported", file=file,
                field="rotation_config", found=str(raw["rotation_config"])[:200], expected="no rotation_config",
                fix="quantize again without a rotation",
            )  # fmt: skip
        extra = raw.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise CheckpointError("extra_config is not an object", file=file, field="extra_config", found=type(extra).__name__)
        self._extra: Mapping[str, Any] = extra
        self._order = {key: i for i, key in enumerate(extra)}
        effort = MatchBudget(file, "extra_config")
        try:  # a key of word characters and dots alone is a name
            self._names = ByName({key: key for key in extra if re.fullmatch(r"[\w.]*", key)})
            self._patterns = [Pattern(key, effort) for key in extra if key not in self._names]
        except PatternError as error:
            raise invalid_config(error, file, "extra_config") from error
        self.find("")  # a config that is wrong for every layer is wrong now

    def find(self, module: str) -> Scheme:
        """The scheme of a module; extra_config's keys are names, or patterns that are searched for."""
        changes: dict[str, Any] = {}
        try:
            keys = {p.text for p in self._patterns if p.search(module)} if module else set()
            if (named := self._names.find(module)) is not None:
                keys.add(named)
            for key in sorted(keys, key=self._order.__getitem__):  # what comes later in the file rules
                changes |= self._extra[key]
            return _scheme(msgspec.convert({**self._raw, **changes}, _Keys))
        except (TypeError, ValueError) as error:  # msgspec.ValidationError is a ValueError
            raise invalid_config(error, self._file, "extra_config" if changes else None) from error


def _scheme(keys: _Keys) -> Scheme:
    weights = _args(keys.bits, keys.data_type, keys.group_size, keys.sym, "channel")
    act = None
    if keys.act_bits is not None and keys.act_bits < 16:
        args = _args(keys.act_bits, keys.act_data_type or keys.data_type, keys.act_group_size or 0, keys.act_sym, "token")
        dynamic: Any = "local" if args.how == "tensor_group" else keys.act_dynamic
        act = act_spec(msgspec.structs.replace(args, dynamic=dynamic))
    return Scheme("auto-round", weights, act, E5M3 if keys.data_type == "nvfp4_v2" else None, loose=True)


def _args(bits: int, kind: str, group_size: int | list[int], symmetric: bool, whole_row: str) -> QuantArgs:
    floating = not kind.startswith(("int", "mx_int"))
    if not kind.startswith(("int", "mx_int", "mx_fp", "nv_fp", "nvfp", "fp")):
        raise ValueError(f"data_type {kind} is not supported yet")
    scale_dtype = "torch.uint8" if kind.startswith("mx") else E5M3 if kind == "nvfp4_v2" else None
    if isinstance(group_size, list):
        return QuantArgs(bits, "float" if floating else "int", symmetric, "block", block_structure=group_size)
    strategy = {-1: whole_row, 0: "tensor"}.get(group_size, "tensor_group" if kind.startswith("nv") else "group")
    return QuantArgs(bits, "float" if floating else "int", symmetric, strategy, group_size, scale_dtype=scale_dtype)
