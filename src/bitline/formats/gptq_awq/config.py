"""Per-module quantization settings of GPTQ, AWQ and AutoRound configs: bits, group size, symmetry, and their overrides."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import ByModuleName
from bitline.formats.quant_config import AUTO_ROUND_METHODS

# AutoRound's packing_format, old spellings included: the tensor layout, GPTQ with v1 or v2 zero points, or AWQ.
AUTO_ROUND_LAYOUTS = {
    "auto": "gptq v1", "auto_round:gptq": "gptq v1", "auto_round:auto_gptq": "gptq v1",
    "auto_round": "gptq v2", "auto_round:gptqmodel": "gptq v2", "auto_round:exllamav2": "gptq v2",
    "auto_round:awq": "awq gemm", "auto_round:auto_awq": "awq gemm",
}  # fmt: skip


def auto_round_layout(config: Mapping[str, Any]) -> str | None:
    """The layout of an AutoRound checkpoint of integers: "gptq v1", "gptq v2" or "awq gemm"; None for any other config."""
    if config.get("quant_method") not in AUTO_ROUND_METHODS:
        return None
    if not str(config.get("data_type", "int")).startswith("int"):
        return None
    return AUTO_ROUND_LAYOUTS.get(str(config.get("packing_format", "auto")))


def quantizes_activations(act_bits: object) -> bool:
    """Whether AutoRound's act_bits is below 16, or not a width at all."""
    return act_bits is not None and not (type(act_bits) is int and act_bits >= 16)


@dataclass(frozen=True)
class ModuleSettings:
    """How one module was quantized. group_size: -1 for one group per row. ignored: the config says that it was not.
    symmetry_stated: whether the config says if it is symmetric; else the tensors have to agree that it is.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    ignored: bool = False
    symmetry_stated: bool = True

    def scale_block(self, k: int) -> tuple[int, int]:
        """The scale block of a weight of k columns."""
        return 1, k if self.group_size == -1 else self.group_size

    def expected_groups(self, k: int, config_file: Path) -> str:
        """How many groups the config means for k columns, for an error."""
        return f"{-(-k // self.scale_block(k)[1])}, as group_size = {self.group_size} in {config_file.name} means"


class SettingsByModule:
    """The settings of every module: the config's own, changed by the override whose key matches the module's name.

    GPTQ's `dynamic` maps patterns to overrides: the first that `re.match`es wins, a "-:" prefix means not quantized.
    AutoRound's `extra_config` maps names and patterns: the module's exact name wins, then the first key that `re.search`
    finds in it, then a key that is the module's name under other wrappers ("model.language_model.…").
    An invalid override is a CheckpointError at construction, not when its module is met.
    """

    def __init__(self, config: Mapping[str, Any], file: Path, modules: Container[str] = ()) -> None:
        self._file = file
        self._default = self._parse(config, None)
        self._exact: dict[str, ModuleSettings] = {}
        self._patterns: list[tuple[Pattern, ModuleSettings]] = []
        by_name: dict[str, ModuleSettings] = {}
        self._auto_round = config.get("quant_method") in AUTO_ROUND_METHODS
        key = "extra_config" if self._auto_round else "dynamic"
        self._budget = MatchBudget(file, key)
        overrides = config.get(key) or {}
        if not isinstance(overrides, Mapping):
            raise self._error(key, f"{key} is not an object", type(overrides).__name__, "names or patterns to overrides")
        for name, override in overrides.items():
            self._add_override(config, key, name, override, modules, by_name)
        self._by_alias = ByModuleName(by_name)

    def find(self, module: str) -> ModuleSettings:
        """The settings of a module by its full name."""
        if module in self._exact:
            return self._exact[module]
        for pattern, settings in self._patterns:
            if pattern.search(module) if self._auto_round else pattern.match(module):
                return settings
        return self._by_alias.find(module) or self._default

    def _add_override(
        self, config: Mapping[str, Any], key: str, name: str, override: Any, modules: Container[str],
        by_name: dict[str, ModuleSettings],
    ) -> None:  # fmt: skip
        negative = name.startswith("-:") and not self._auto_round
        if not isinstance(override, Mapping) and not (negative and override is None):
            raise self._error(
                f"{key}.{name}", f"an override in {key} is not an object", f"{name!r}: {override!r}",
                '{"bits": …, "group_size": …}',
            )  # fmt: skip
        if negative:
            settings = replace(self._default, ignored=True)
        elif self._auto_round and not override:
            return
        else:
            settings = self._parse({**config, **(override or {})}, name)
        if self._auto_round and name in modules:
            self._exact[name] = settings
            return
        if self._auto_round:
            by_name[name] = settings
        text = name if self._auto_round else name.removeprefix("-:").removeprefix("+:")
        try:
            self._patterns.append((Pattern(text, self._budget), settings))
        except PatternError as error:
            raise self._error(key, f"a pattern in {key} is no regular expression", f"{name!r} ({error})", None) from error

    def _parse(self, config: Mapping[str, Any], override: str | None) -> ModuleSettings:
        where = "" if override is None else f" of the override {override!r}"
        bits = self._integer(config, ("bits", "w_bit"), where)
        if override is not None and bits >= 16:
            return replace(self._default, ignored=True)
        group_size = self._integer(config, ("group_size", "q_group_size"), where, default=-1)
        if not 2 <= bits <= 8:
            raise self._error("bits", f"bits{where} are out of range", bits, "2 to 8")
        if group_size == 0 or group_size < -1:
            raise self._error("group_size", f"group_size{where} is not valid", group_size, "-1 (one group per row) or more")
        symmetric = self._flag(config, "sym", True, where)
        if config.get("zero_point") is not None:
            symmetric = not self._flag(config, "zero_point", True, where)
        elif config.get("quant_method") == "awq" and config.get("sym") is None:
            symmetric = False
        stated = config.get("sym") is not None or config.get("zero_point") is not None
        act_order = self._flag(config, "desc_act", False, where)
        return ModuleSettings(bits, group_size, symmetric, act_order, symmetry_stated=stated)

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
