"""AutoRound's own config over tensors laid out as compressed-tensors lays them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import ByModuleName
from bitline.formats.compressed_tensors.args import E5M3, QuantizationArgs, act_spec
from bitline.formats.compressed_tensors.config import QuantizationScheme, SchemeByModule
from bitline.formats.io.json_object import invalid_config

PACKING_FORMATS = ("auto_round:llm_compressor", "auto_round:llm_compressor_nvfp4_e5m3", "auto_round:fp8_static")
_MX_INT = ("mx_int", "mx_int4")
_MX_INT_PACKING_FORMATS = (None, "auto_round", "auto_round:mx_int", "auto_round:mx_int4", *PACKING_FORMATS)


def has_compressed_tensors_layout(config: Mapping[str, Any]) -> bool:
    """True for the config of an AutoRound checkpoint laid out as compressed-tensors, or in MXINT4."""
    packing = config.get("packing_format")
    return packing in PACKING_FORMATS or (config.get("data_type") in _MX_INT and packing in _MX_INT_PACKING_FORMATS)


class _LayerKeys(msgspec.Struct):
    """The keys that say how a layer was quantized; extra_config overrides some of them for single layers."""

    bits: int
    group_size: int | list[int]
    sym: bool | msgspec.UnsetType = msgspec.UNSET
    data_type: str = "int"
    act_bits: int | None = None
    act_group_size: int | None = None
    act_sym: bool = True
    act_data_type: str | None = None
    act_dynamic: bool = True


class AutoRoundSchemes(SchemeByModule):
    """Every module has the scheme of the whole config, changed by the entries of extra_config that match its name."""

    def __init__(self, raw: Mapping[str, Any], file: Path) -> None:
        super().__init__([], [], None)
        self._raw, self._file = raw, file
        if raw.get("rotation_config"):
            raise CheckpointError(
                "the weights are rotated and the model must apply the inverse at run time, which is not supported", file=file,
                field="rotation_config", found=str(raw["rotation_config"])[:200], expected="no rotation_config",
                fix="quantize again without a rotation",
            )  # fmt: skip
        extra = raw.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise CheckpointError("extra_config is not an object", file=file, field="extra_config", found=type(extra).__name__)
        self._extra: Mapping[str, Any] = extra
        self._position = {key: i for i, key in enumerate(extra)}
        budget = MatchBudget(file, "extra_config")
        try:  # a key of word characters and dots is a name, others are patterns
            self._names = ByModuleName({key: key for key in extra if re.fullmatch(r"[\w.]*", key)})
            self._patterns = [Pattern(key, budget) for key in extra if key not in self._names]
        except PatternError as error:
            raise invalid_config(error, file, "extra_config") from error
        self.find("")  # a config that is invalid for every layer is refused now

    def find(self, module: str) -> QuantizationScheme:
        """The scheme of a module. Keys of extra_config are names, or patterns that are searched for in the name."""
        overrides: dict[str, Any] = {}
        try:
            keys = {p.text for p in self._patterns if p.search(module)} if module else set()
            if (named := self._names.find(module)) is not None:
                keys.add(named)
            for key in sorted(keys, key=self._position.__getitem__):  # later entries win
                overrides |= self._extra[key]
            return _scheme(msgspec.convert({**self._raw, **overrides}, _LayerKeys))
        except (TypeError, ValueError) as error:  # msgspec.ValidationError is a ValueError
            raise invalid_config(error, self._file, "extra_config" if overrides else None) from error


def _scheme(keys: _LayerKeys) -> QuantizationScheme:
    weights = _args(keys.bits, keys.data_type, keys.group_size, keys.sym, "channel")
    act = None
    if keys.act_bits is not None and keys.act_bits < 16:
        args = _args(keys.act_bits, keys.act_data_type or keys.data_type, keys.act_group_size or 0, keys.act_sym, "token")
        dynamic: Any = "local" if args.effective_strategy == "tensor_group" else keys.act_dynamic
        act = act_spec(msgspec.structs.replace(args, dynamic=dynamic))
    e5m3 = E5M3 if keys.data_type == "nvfp4_v2" else None
    return QuantizationScheme("auto-round", weights, act, e5m3, infer_sizes=True)


def _args(
    bits: int, data_type: str, group_size: int | list[int], symmetric: bool | msgspec.UnsetType, row_strategy: str
) -> QuantizationArgs:  # fmt: skip
    """AutoRound's keys as QuantizationArgs. row_strategy: what its group_size -1 means."""
    if not data_type.startswith(("int", "mx_int", "mx_fp", "nv_fp", "nvfp", "fp")):
        raise ValueError(f"data_type {data_type} is not supported yet")
    kind = "int" if data_type.startswith(("int", "mx_int")) else "float"
    scale_dtype = "torch.uint8" if data_type.startswith("mx") else E5M3 if data_type == "nvfp4_v2" else None
    if isinstance(group_size, list):
        return QuantizationArgs(bits, kind, symmetric, "block", block_structure=group_size)
    strategy = {-1: row_strategy, 0: "tensor"}.get(group_size, "tensor_group" if data_type.startswith("nv") else "group")
    return QuantizationArgs(bits, kind, symmetric, strategy, group_size, scale_dtype=scale_dtype)
