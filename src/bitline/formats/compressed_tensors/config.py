"""The config side of compressed-tensors: which scheme a module was quantized with. No tensors here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats.common.bounded_regex import MatchBudget, Pattern, PatternError
from bitline.formats.common.module_names import ByName
from bitline.formats.io.json_object import invalid_config
from bitline.types import ActSpec, ScalarType

_EMBEDDINGS = {"embed_tokens", "tok_embeddings", "word_embeddings", "wte"}
_REFUSED = {
    "marlin-24": "2:4 sparse Marlin tiles",
    "sparse-24-bitmask": "2:4 sparse weights",
    "sparse-bitmask": "sparse weights",
}
E5M3 = "nvfp4-e5m3-pack-quantized"  # AutoRound's own: unsigned E5M3 scales and no global one
FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", E5M3,
)  # fmt: skip
# "dense" and "fakequant" store plain weights: there is nothing for this reader to find.
_DECLARED = {*FORMATS, "mixed-precision", "dense", "fakequant"}


_ORDERS = ("group", "weight", "static", "dynamic")


class QuantArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How weights or activations are quantized, in compressed-tensors' words. A strategy that is null follows from group_size.

    Its own schema has no other keys either; the last three say how the numbers were found and change nothing.
    """

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | Literal["local"] = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: Any = None

    def __post_init__(self) -> None:
        if self.type.lower() not in ("int", "float"):
            raise ValueError(f"type is {self.type!r}, expected 'int' or 'float'")
        if isinstance(self.actorder, str) and self.actorder.lower() not in _ORDERS:
            raise ValueError(f"actorder is {self.actorder!r}, expected one of {', '.join(_ORDERS)}")
        if not 1 <= self.num_bits <= 16:
            raise ValueError(f"num_bits is {self.num_bits}, expected 1..16")
        if self.group_size is not None and self.group_size < -1:
            raise ValueError(f"group_size is {self.group_size}, expected -1 or more")
        if self.how in ("group", "tensor_group") and (self.group_size or 0) < 1:
            raise ValueError(f"strategy {self.how!r} needs a group_size, found {self.group_size}")
        if self.how == "block":
            _ = self.block

    @property
    def how(self) -> str:
        """The strategy: "tensor", "channel", "group", "block", "token", "tensor_group" or "attn_head"."""
        if self.strategy is not None:
            return self.strategy.lower()
        if not self.group_size:
            return "tensor"
        return "channel" if self.group_size == -1 else "group"

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a scale block. Older files write "128x128" for [128, 128]."""
        sizes = self.block_structure
        try:
            rows, columns = (int(s) for s in (sizes.lower().split("x") if isinstance(sizes, str) else sizes or ()))
        except ValueError:
            rows = columns = 0
        if rows < 1 or columns < 1:
            raise ValueError(f"block_structure is {sizes!r}, expected two positive sizes")
        return rows, columns

    @property
    def floating(self) -> bool:
        """True for minifloat codes."""
        return self.type.lower() == "float"

    @property
    def by_group_order(self) -> bool:
        """True where the config says that columns were grouped in activation order and a g_idx was kept."""
        return self.actorder is True or str(self.actorder).lower() in ("group", "dynamic")


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of config_groups. `weights` null means that it is no rule for linear layers."""

    targets: list[str]
    weights: QuantArgs | None = None
    input_activations: QuantArgs | None = None
    output_activations: QuantArgs | None = None
    format: str | None = None


class Config(msgspec.Struct):
    """quantization_config of compressed-tensors; unknown keys are the producer's own and are left alone."""

    config_groups: dict[str, Group | list[str]] = {}
    format: str | None = None
    ignore: list[str] | None = None
    version: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Scheme:
    """What the config says about one module's quantization.

    loose: the config names a preset and not the sizes, so group sizes are read off the scale tensors.
    """

    name: str
    weights: QuantArgs
    act: ActSpec | None
    format: str | None = None
    loose: bool = False
    quantizes_output: bool = False


@dataclass(frozen=True)
class Rule:
    """One target of a config group: "re:" patterns match the module's name from its start, others name it or its class."""

    target: str
    scheme: Scheme | None = None
    pattern: Pattern | None = None


class Rules:
    """Targets, looked up by a module's name: equal names at once, patterns and classes in file order."""

    def __init__(self, rules: list[Rule]) -> None:
        self._patterns = [rule for rule in rules if rule.pattern is not None]
        names: dict[str, Rule] = {}
        # Class names are not in a checkpoint: a subclass (ColumnParallelLinear, …) is known by how its name ends.
        self._classes: dict[str, Rule] = {}
        for rule in rules:
            if rule.pattern is None:
                names.setdefault(rule.target, rule)
                for kind in ("Linear", "Embedding"):
                    if rule.target.endswith(kind):
                        self._classes.setdefault(kind, rule)
        self._names = ByName(names)

    def find(self, module: str) -> Rule | None:
        """The rule whose target fits best: a name before a pattern, a pattern before a class, then file order."""
        if (named := self._names.find(module)) is not None:
            return named
        for rule in self._patterns:
            if rule.pattern is not None and rule.pattern.match(module):
                return rule
        return self._classes.get("Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear")


class Schemes:
    """Finds the scheme of a module by its name."""

    def __init__(self, rules: list[Rule], ignore: list[Rule], version: str | None = None) -> None:
        self._rules, self._ignore, self.version = Rules(rules), Rules(ignore), version

    def find(self, module: str) -> Scheme | None:
        """The scheme of a module, None where no target fits."""
        rule = self._rules.find(module)
        return None if rule is None else rule.scheme

    def ignored(self, module: str) -> bool:
        """True where the config says that the module was left alone."""
        return self._ignore.find(module) is not None

    @property
    def packed_densely(self) -> bool:
        """Whether this producer packed odd bit widths as one dense stream, which began with compressed-tensors 0.18."""
        numbers = re.findall(r"\d+", (self.version or "")[:40])[:2]
        return len(numbers) < 2 or (int(numbers[0]), int(numbers[1])) >= (0, 18)


def parse(raw: Mapping[str, Any], file: Path) -> Schemes:
    """The rules of a compressed-tensors config. What is wrong or would be lost is a CheckpointError with its place."""
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise invalid_config(error, file) from error
    if transforms := (config.transform_config or {}).get("config_groups", config.transform_config):
        raise CheckpointError(
            "the weights were rotated and the model must undo it as it runs, which is not supported; the rotation would be lost",
            file=file, field="transform_config", found=f"transform_config {str(transforms)[:200]}",
            expected="no transform_config",
            fix="quantize again without transforms (SpinQuant, QuIP, R1..R4)",
        )  # fmt: skip
    sparse = str((config.sparsity_config or {}).get("format") or "dense")
    formats = [config.format, *(g.format for g in config.config_groups.values() if isinstance(g, Group))]
    for name in [f for f in formats if f is not None] + ([sparse] if sparse != "dense" else []):
        if name not in _DECLARED:
            reason = f" ({_REFUSED[name]})" if name in _REFUSED else ""
            raise CheckpointError(
                f"format {name}{reason} is not supported yet", file=file, field="format", found=name,
                expected=f"one of {', '.join(FORMATS)}",
            )  # fmt: skip
    rules: list[Rule] = []
    effort = MatchBudget(file, "config_groups")
    for name, group in config.config_groups.items():
        try:
            scheme = _scheme(name, group, config.format)
        except ValueError as error:
            raise invalid_config(error, file, f"config_groups.{name}") from error
        targets = group.targets if isinstance(group, Group) else group
        rules += [_rule(t, scheme, file, effort, f"config_groups.{name}.targets") for t in targets if scheme is not None]
    return Schemes(rules, [_rule(t, None, file, effort, "ignore") for t in config.ignore or ()], config.version)


def _rule(target: str, scheme: Scheme | None, file: Path, effort: MatchBudget, field: str) -> Rule:
    try:
        return Rule(target, scheme, Pattern(target[3:], effort) if target.startswith("re:") else None)
    except PatternError as error:
        raise CheckpointError(
            "a target is not a regular expression", file=file, field=field, found=f"{target!r}: {error}"
        ) from error


def _scheme(name: str, group: Group | list[str], overall: str | None) -> Scheme | None:
    if not isinstance(group, Group):
        return _preset(name)
    if group.weights is None:
        return None
    inputs, form = group.input_activations, group.format or overall
    if inputs is not None and form == E5M3 and inputs.how == "tensor_group":
        inputs = msgspec.structs.replace(inputs, scale_dtype=E5M3)
    act = None if inputs is None else act_spec(inputs)
    return Scheme(name, group.weights, act, form, quantizes_output=group.output_activations is not None)


def act_spec(args: QuantArgs) -> ActSpec | None:
    """An input scheme in compressed-tensors' words as an ActSpec, None for 16 bits; ValueError where there is no word for it."""
    if args.num_bits >= 16:
        return None
    known: dict[tuple[bool, int], ScalarType] = {
        (False, 8): types.int8, (False, 4): types.int4, (True, 8): types.float8_e4m3fn, (True, 4): types.float4_e2m1,
    }  # fmt: skip
    dtype = known.get((args.floating, args.num_bits))
    granularity: Any = {"token": "token", "tensor": "tensor", "group": "group", "tensor_group": "group"}.get(args.how)
    if dtype is None or granularity is None or (not args.dynamic and granularity != "tensor"):
        when = "dynamic" if args.dynamic else "static"
        raise ValueError(f"input_activations are {args.type} {args.num_bits} bits {when} per {args.how}, which is not supported")
    scale: Literal["float", "e8m0", "e4m3", "e5m3"] = "float"
    if granularity == "group" and (args.floating or args.scale_dtype == "torch.uint8"):
        if args.how == "tensor_group":
            scale = "e5m3" if args.scale_dtype == E5M3 else "e4m3"
        elif args.scale_dtype == "torch.uint8" or args.num_bits == 4:
            scale = "e8m0"
    size = args.group_size or 0 if granularity == "group" else 0
    return ActSpec(dtype, bool(args.dynamic), granularity, size, args.symmetric, scale)


_FLOAT_PRESETS: dict[str, tuple[QuantArgs, QuantArgs | None]] = {
    "FP8": (QuantArgs(8, "float", strategy="tensor"), QuantArgs(8, "float", strategy="tensor")),
    "FP8_DYNAMIC": (QuantArgs(8, "float", strategy="channel"), QuantArgs(8, "float", strategy="token", dynamic=True)),
    "FP8_BLOCK": (
        QuantArgs(8, "float", strategy="block", block_structure=[128, 128]),
        QuantArgs(8, "float", strategy="group", group_size=128, dynamic=True),
    ),
    "NVFP4": (
        QuantArgs(4, "float", strategy="tensor_group", group_size=16),
        QuantArgs(4, "float", strategy="tensor_group", group_size=16, dynamic="local"),
    ),
    "MXFP4XFP8": (QuantArgs(4, "float", group_size=32), QuantArgs(8, "float", group_size=128, dynamic=True)),
    "MXFP4": (QuantArgs(4, "float", group_size=32), QuantArgs(4, "float", group_size=32, dynamic=True)),
    "MXFP6A8": (
        QuantArgs(6, "float", group_size=32), QuantArgs(8, "float", group_size=32, dynamic=True, scale_dtype="torch.uint8"),
    ),
    "MXFP8": (
        QuantArgs(8, "float", group_size=32), QuantArgs(8, "float", group_size=32, dynamic=True, scale_dtype="torch.uint8"),
    ),
    "NVFP4A16": (QuantArgs(4, "float", strategy="tensor_group", group_size=16), None),
    "MXFP4A16": (QuantArgs(4, "float", group_size=32), None),
    "MXFP6A16": (QuantArgs(6, "float", group_size=32), None),
    "MXFP8A16": (QuantArgs(8, "float", group_size=32), None),
}  # fmt: skip


def _preset(name: str) -> Scheme | None:
    """A scheme by its preset name: "W4A16", "FP8_DYNAMIC", …; None for UNQUANTIZED."""
    upper = name.upper()
    if upper == "UNQUANTIZED":
        return None
    if upper in _FLOAT_PRESETS:
        weights, inputs = _FLOAT_PRESETS[upper]
    elif found := re.fullmatch(r"(?:INT8|W([2-8])A(4|8|16|FP8)(_ASYM)?)", upper):
        weight_bits, act, asymmetric = int(found[1] or 8), found[2] or "8", bool(found[3])
        # What a preset's group size was has changed between releases: the scales' shape tells.
        weights = QuantArgs(weight_bits, "int", symmetric=not asymmetric, strategy="group", group_size=128)
        floating = act == "FP8"
        inputs = (
            None
            if act == "16"
            else QuantArgs(8 if floating else int(act), "float" if floating else "int", strategy="token", dynamic=True)
        )
    else:
        raise ValueError(f"{name!r} is not a preset scheme")
    return Scheme(upper, weights, None if inputs is None else act_spec(inputs), loose=True)
