"""What the configs of GPTQ, AWQ and AutoRound say of each module: bits, group size, symmetry, and their overrides."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import ByName

AUTO_ROUND = ("auto-round", "intel/auto-round", "inc")

# AutoRound's packing_format, with the older spellings, to the layout: GPTQ with v1 or v2 zeros, or AWQ.
PACKINGS = {
    "auto": "gptq v1", "auto_round:gptq": "gptq v1", "auto_round:auto_gptq": "gptq v1",
    "auto_round": "gptq v2", "auto_round:gptqmodel": "gptq v2", "auto_round:exllamav2": "gptq v2",
    "auto_round:awq": "awq gemm", "auto_round:auto_awq": "awq gemm",
}  # fmt: skip


def packing(config: Mapping[str, Any]) -> str | None:
    """The layout of an AutoRound checkpoint of integers: "gptq v1", "gptq v2" or "awq gemm"; None for any other."""
    if config.get("quant_method") not in AUTO_ROUND:
        return None
    if not str(config.get("data_type", "int")).startswith("int"):
        return None
    return PACKINGS.get(str(config.get("packing_format", "auto")))


def quantizes_inputs(act_bits: object) -> bool:
    """AutoRound's act_bits: whether inputs have fewer bits than 16, or a width that is none."""
    return act_bits is not None and not (type(act_bits) is int and act_bits >= 16)


@dataclass(frozen=True)
class Ints:
    """How one module's integers were made. skip: the config says that this module was left alone."""

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    skip: bool = False


class ModuleSettings:
    """The settings of every module: the config's own, changed by the override that its name matches.

    GPTQ's `dynamic` maps patterns to overrides: the first that `re.match`es rules, "-:" before it means not quantized.
    AutoRound's `extra_config` maps names and patterns: the module's own name rules, else the first that `re.search`es,
    else a name that is the module's under another wrapping ("model.language_model.…").
    A config that is not valid for some module is a CheckpointError when it is made, not when that module is met.
    """

    def __init__(self, config: Mapping[str, Any], file: Path, modules: Container[str] = ()) -> None:
        self._file = file
        self._base = self._parse(config, None)
        self._exact: dict[str, Ints] = {}
        self._rules: list[tuple[Pattern, Ints]] = []
        names: dict[str, Ints] = {}
        self._anywhere = config.get("quant_method") in AUTO_ROUND
        key = "extra_config" if self._anywhere else "dynamic"
        self._effort = MatchBudget(file, key)
        overrides = config.get(key) or {}
        if not isinstance(overrides, Mapping):
            raise self._error(key, f"{key} is not an object", type(overrides).__name__, "names or patterns to overrides")
        for name, change in overrides.items():
            self._add(config, key, name, change, modules, names)
        self._elsewhere = ByName(names)

    def of(self, module: str) -> Ints:
        """The settings of a module by its full name."""
        if module in self._exact:
            return self._exact[module]
        for pattern, settings in self._rules:
            if pattern.search(module) if self._anywhere else pattern.match(module):
                return settings
        return self._elsewhere.find(module) or self._base

    def _add(
        self, config: Mapping[str, Any], key: str, name: str, change: Any, modules: Container[str], names: dict[str, Ints]
    ) -> None:
        negative = name.startswith("-:") and not self._anywhere
        if not isinstance(change, Mapping) and not (negative and change is None):
            raise self._error(
                f"{key}.{name}", f"an override in {key} is not an object", f"{name!r}: {change!r}", '{"bits": …, "group_size": …}'
            )
        if negative:
            settings = Ints(**{**vars(self._base), "skip": True})
        elif self._anywhere and not change:
            return
        else:
            settings = self._parse({**config, **(change or {})}, name)
        if self._anywhere and name in modules:
            self._exact[name] = settings
            return
        if self._anywhere:
            names[name] = settings
        text = name if self._anywhere else name.removeprefix("-:").removeprefix("+:")
        try:
            self._rules.append((Pattern(text, self._effort), settings))
        except PatternError as error:
            raise self._error(key, f"a pattern in {key} is no regular expression", f"{name!r} ({error})", None) from error

    def _parse(self, config: Mapping[str, Any], name: str | None) -> Ints:
        where = "" if name is None else f" of the override {name!r}"
        width = self._integer(config, ("bits", "w_bit"), where)
        if name is not None and width >= 16:
            return Ints(**{**vars(self._base), "skip": True})
        group_size = self._integer(config, ("group_size", "q_group_size"), where, default=-1)
        if not 2 <= width <= 8:
            raise self._error("bits", f"bits{where} are out of range", width, "2 to 8")
        if group_size == 0 or group_size < -1:
            raise self._error("group_size", f"group_size{where} is not valid", group_size, "-1 (one group per row) or more")
        symmetric = self._flag(config, "sym", True, where)
        if config.get("zero_point") is not None:
            symmetric = not self._flag(config, "zero_point", True, where)
        elif config.get("quant_method") == "awq" and config.get("sym") is None:
            symmetric = False
        return Ints(width, group_size, symmetric, self._flag(config, "desc_act", False, where))

    def _integer(self, config: Mapping[str, Any], keys: tuple[str, ...], where: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if type(value) is not int:
            found = "nothing" if value is None else repr(value)
            raise self._error(keys[0], f"{keys[0]}{where} of the quantization config is not a whole number", found, None)
        return value

    def _flag(self, config: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, bool):
            raise self._error(key, f"{key}{where} of the quantization config is not true or false", repr(value), None)
        return value

    def _error(self, field: str, what: str, found: object, expected: object) -> CheckpointError:
        return CheckpointError(what, file=self._file, field=field, found=found, expected=expected)
