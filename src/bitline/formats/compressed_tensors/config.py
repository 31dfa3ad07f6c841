"""A compressed-tensors config: which quantization scheme each module has. No tensors here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import ByModuleName
from bitline.formats.compressed_tensors.args import E5M3, QuantizationArgs, act_spec
from bitline.formats.compressed_tensors.presets import preset
from bitline.formats.io.json_object import invalid_config
from bitline.types import ActSpec

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", E5M3,
)  # fmt: skip
# "dense" and "fakequant" store unquantized weights: this reader finds nothing to read.
_ACCEPTED = {*FORMATS, "mixed-precision", "dense", "fakequant"}
_REFUSED = {
    "marlin-24": "2:4 sparse Marlin tiles",
    "sparse-24-bitmask": "2:4 sparse weights",
    "sparse-bitmask": "sparse weights",
}
_EMBEDDINGS = {"embed_tokens", "tok_embeddings", "word_embeddings", "wte"}


class ConfigGroup(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of config_groups. Null `weights` means that it does not quantize linear layers."""

    targets: list[str]
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: QuantizationArgs | None = None
    format: str | None = None


class QuantizationConfig(msgspec.Struct):
    """quantization_config of compressed-tensors; unknown keys are the producer's own and are ignored."""

    config_groups: dict[str, ConfigGroup | list[str]] = {}
    format: str | None = None
    ignore: list[str] | None = None
    version: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class QuantizationScheme:
    """How the config says that a module was quantized.

    infer_sizes: the config names a preset and no reliable sizes, so group sizes follow from the shape of the scales.
    act_symmetry_stated: whether the config says if static activation scales are symmetric.
    """

    name: str
    weights: QuantizationArgs
    act: ActSpec | None
    format: str | None = None
    infer_sizes: bool = False
    quantizes_output: bool = False
    act_symmetry_stated: bool = True


# ---- targets -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """One target of a config group: "re:" and a pattern matched from the start of a module's name, or a name or class."""

    text: str
    scheme: QuantizationScheme | None = None
    pattern: Pattern | None = None


class Targets:
    """Targets, looked up by a module's name: exact names first, then patterns, then classes, each in file order."""

    def __init__(self, targets: list[Target]) -> None:
        self._patterns = [target for target in targets if target.pattern is not None]
        names: dict[str, Target] = {}
        # A checkpoint holds no class names: a subclass (ColumnParallelLinear, …) is recognized by how its name ends.
        self._classes: dict[str, Target] = {}
        for target in targets:
            if target.pattern is None:
                names.setdefault(target.text, target)
                for kind in ("Linear", "Embedding"):
                    if target.text.endswith(kind):
                        self._classes.setdefault(kind, target)
        self._names = ByModuleName(names)

    def find(self, module: str) -> Target | None:
        """The most specific target that matches a module."""
        if (named := self._names.find(module)) is not None:
            return named
        for target in self._patterns:
            if target.pattern is not None and target.pattern.match(module):
                return target
        return self._classes.get("Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear")


class SchemeByModule:
    """The scheme of every module, by its name."""

    def __init__(self, targets: list[Target], ignore: list[Target], version: str | None = None) -> None:
        self._targets, self._ignore, self.version = Targets(targets), Targets(ignore), version

    def find(self, module: str) -> QuantizationScheme | None:
        """The scheme of a module, None where no target matches."""
        target = self._targets.find(module)
        return None if target is None else target.scheme

    def ignored(self, module: str) -> bool:
        """True where the config's ignore list names the module."""
        return self._ignore.find(module) is not None

    @property
    def packs_densely(self) -> bool:
        """Whether this release packs 3, 5, 6 and 7 bits as one dense stream, which began with compressed-tensors 0.18."""
        numbers = re.findall(r"\d+", (self.version or "")[:40])[:2]
        return len(numbers) < 2 or (int(numbers[0]), int(numbers[1])) >= (0, 18)


# ---- parsing -------------------------------------------------------------------------------------------------------------


def parse(raw: Mapping[str, Any], file: Path) -> SchemeByModule:
    """The schemes of a compressed-tensors config. What is invalid or cannot be honoured is a CheckpointError."""
    try:
        config = msgspec.convert(raw, QuantizationConfig)
    except msgspec.ValidationError as error:
        raise invalid_config(error, file) from error
    _refuse_transforms(config, file)
    _check_formats(config, file)
    targets: list[Target] = []
    budget = MatchBudget(file, "config_groups")
    for name, group in config.config_groups.items():
        try:
            scheme = _scheme(name, group, config.format)
        except ValueError as error:
            raise invalid_config(error, file, f"config_groups.{name}") from error
        texts = group.targets if isinstance(group, ConfigGroup) else group
        targets += [_target(t, scheme, file, budget, f"config_groups.{name}.targets") for t in texts if scheme is not None]
    return SchemeByModule(targets, [_target(t, None, file, budget, "ignore") for t in config.ignore or ()], config.version)


def _refuse_transforms(config: QuantizationConfig, file: Path) -> None:
    if transforms := (config.transform_config or {}).get("config_groups", config.transform_config):
        raise CheckpointError(
            "the weights are rotated and the model must apply the inverse at run time, which is not supported", file=file,
            field="transform_config", found=f"transform_config {str(transforms)[:200]}", expected="no transform_config",
            fix="quantize again without transforms (SpinQuant, QuIP, R1..R4)",
        )  # fmt: skip


def _check_formats(config: QuantizationConfig, file: Path) -> None:
    sparse = str((config.sparsity_config or {}).get("format") or "dense")
    formats = [config.format, *(g.format for g in config.config_groups.values() if isinstance(g, ConfigGroup))]
    for name in [f for f in formats if f is not None] + ([sparse] if sparse != "dense" else []):
        if name not in _ACCEPTED:
            reason = f" ({_REFUSED[name]})" if name in _REFUSED else ""
            raise CheckpointError(
                f"format {name}{reason} is not supported yet", file=file, field="format", found=name,
                expected=f"one of {', '.join(FORMATS)}",
            )  # fmt: skip


def _target(text: str, scheme: QuantizationScheme | None, file: Path, budget: MatchBudget, field: str) -> Target:
    try:
        return Target(text, scheme, Pattern(text[3:], budget) if text.startswith("re:") else None)
    except PatternError as error:
        found = f"{text!r}: {error}"
        raise CheckpointError("a target is not a regular expression", file=file, field=field, found=found) from error


def _scheme(name: str, group: ConfigGroup | list[str], default_format: str | None) -> QuantizationScheme | None:
    if not isinstance(group, ConfigGroup):
        return _preset_scheme(name)
    if group.weights is None:
        return None
    inputs, form = group.input_activations, group.format or default_format
    if inputs is not None and form == E5M3 and inputs.effective_strategy == "tensor_group":
        inputs = msgspec.structs.replace(inputs, scale_dtype=E5M3)
    act = None if inputs is None else act_spec(inputs)
    stated = inputs is None or inputs.symmetric is not msgspec.UNSET
    return QuantizationScheme(name, group.weights, act, form, False, group.output_activations is not None, stated)


def _preset_scheme(name: str) -> QuantizationScheme | None:
    found = preset(name)
    if found is None:
        return None
    weights, inputs = found
    return QuantizationScheme(name.upper(), weights, None if inputs is None else act_spec(inputs), infer_sizes=True)
