"""A Quark config: how a module's weight and activations are quantized, and what is refused."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from bitline.errors import CheckpointError
from bitline.formats.common.ignored_modules import KV_CACHE_WARNING
from bitline.formats.quant_config import is_allowed

_MAX_PATTERNS, _MAX_PATTERN_LENGTH = 10_000, 512
_MAX_MATCHES = 50_000_000  # of a pattern against a name: half a minute; real models take a hundred thousand
# Projections whose outputs go into the KV cache.
_KV_PROJECTIONS = ("k_proj", "v_proj", "kv_proj", "qkv_proj", "kv_b_proj", "query_key_value", "W_pack")

# Options of a tensor spec that decide what its numbers mean, and all values that they may have.
_ALLOWED: dict[str, tuple[object, ...]] = {
    "symmetric": (None, True, False), "is_dynamic": (None, True, False), "is_scale_quant": (None, True, False),
    "scale_format": (None, "float", "float32", "e4m3", "e5m3", "e8m0"), "zero_point_type": (None, "int32", "float32"),
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """How the config quantizes one tensor. options: in Quark's own keys, which only this class reads."""

    options: Mapping[str, Any]

    @property
    def dtype(self) -> str:
        """Quark's name of the dtype ("int4", "fp8_e4m3")."""
        return str(self.options.get("dtype"))

    @property
    def qscheme(self) -> str:
        """ "per_tensor", "per_channel", "per_token", "per_group" or "per_block"."""
        return str(self.options.get("qscheme"))

    @property
    def is_dynamic(self) -> bool:
        """True where scales are computed at run time."""
        return self.options.get("is_dynamic") is True

    @property
    def is_symmetric(self) -> bool:
        """False where the config says that there are zero points."""
        return self.options.get("symmetric") is not False

    @property
    def has_float_zeros(self) -> bool:
        """True where zero points are floats."""
        return self.options.get("zero_point_type") == "float32"

    @property
    def scale_format(self) -> str | None:
        """How scales are stored ("e8m0", "e5m3", …), None where the config does not say."""
        return self.options.get("scale_format")

    @property
    def mx_element(self) -> str:
        """dtype of the elements of the "mx" type."""
        return str(self.options.get("mx_element_dtype"))

    # ---- scale blocks ----------------------------------------------------------------------------------------------------

    def scale_block(self, n: int, k: int) -> tuple[int, int] | None:
        """The scale block of an [n, k] weight; None where the spec names none, or an invalid one."""
        axis, sizes = self.options.get("ch_axis"), self.options.get("block_size")
        if self.qscheme == "per_tensor":
            return n, k
        if self.qscheme == "per_channel" and axis == 0:
            return 1, k
        if self.qscheme == "per_group" and self.along_k and self.block_k is not None:
            return 1, self.block_k
        if self.qscheme == "per_block" and isinstance(sizes, list) and len(sizes) == 2 and all(_is_size(s) for s in sizes):
            return sizes[0], sizes[1]
        return None

    @property
    def block_k(self) -> int | None:
        """Columns of a group, None where the config gives no valid number."""
        size = self.options.get("group_size")
        return size if _is_size(size) else None

    @property
    def along_k(self) -> bool:
        """True where groups are columns of a row."""
        return self.options.get("ch_axis") in (1, -1)

    @property
    def has_axis(self) -> bool:
        """True where the config names an axis."""
        return self.options.get("ch_axis") is not None

    def has_groups_of(self, columns: int) -> bool:
        """Whether groups are this many columns of a row, the axis being the last where the config has none."""
        return self.options.get("group_size") == columns and self.options.get("ch_axis", -1) in (1, -1)

    @property
    def block_text(self) -> str:
        """qscheme, axis and block as the config has them, for errors."""
        return f"qscheme {self.qscheme}, ch_axis {self.options.get('ch_axis')}, block_size {self.options.get('block_size')}"

    @property
    def size_text(self) -> str:
        """The size of groups as the config has it, for errors."""
        return f"group_size {self.options.get('group_size')!r}"

    @property
    def groups_text(self) -> str:
        """Size and axis of groups as the config has them, for errors."""
        return f"groups of {self.options.get('group_size')} along axis {self.options.get('ch_axis', -1)}"


def _is_size(value: object) -> TypeGuard[int]:
    """Whether a value of the config is a positive size."""
    return type(value) is int and 1 <= value < 1 << 31


@dataclass(frozen=True)
class LayerConfig:
    """One module's specs: of its weight, of the weight's scales if they are quantized too, and of its activations.

    weight_scales, inputs: [] where there are none; the second of `inputs` is of the activations' scales.
    """

    weight: TensorSpec
    weight_scales: list[TensorSpec]
    inputs: list[TensorSpec]
    warnings: list[str]


class QuarkConfig:
    """The config of each module: layer_quant_config by name, then layer_type_quant_config, then global_quant_config.

    pack_order: "reorder" (AWQ's order of columns) or "order". ignored: the names of unquantized modules.
    """

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        self.file, self._matches = file, 0
        export = self._object(config, "export")
        self.pack_order = export.get("pack_method") or "reorder"
        if self.pack_order not in ("reorder", "order"):
            raise self.error("export.pack_method", "pack_method is not known", repr(self.pack_order), "'reorder' or 'order'")
        weight_format = export.get("weight_format")
        if weight_format not in (None, "real_quantized"):
            raise self.error("export.weight_format", "weights are not stored quantized", repr(weight_format), "'real_quantized'")
        self._global = self._object(config, "global_quant_config")
        self._by_name = self._object(config, "layer_quant_config")
        self._linear = self._object(self._object(config, "layer_type_quant_config"), "Linear")
        groups = export.get("kv_cache_group") or []
        self._kv_patterns = [p for p in groups if isinstance(p, str)] if isinstance(groups, list) else []
        self._kv_patterns += list(self._object(config, "kv_cache_quant_config"))
        exclude = config.get("exclude") or []
        if not isinstance(exclude, list) or not all(isinstance(name, str) for name in exclude):
            raise self.error("exclude", "exclude is not a list of names", type(exclude).__name__, "names and patterns")
        self.ignored: list[str] = exclude
        patterns = [*self._by_name, *self._kv_patterns]
        if len(patterns) > _MAX_PATTERNS or any(len(p) > _MAX_PATTERN_LENGTH for p in patterns):
            found, expected = f"{len(patterns)} patterns", f"{_MAX_PATTERNS} short ones"
            raise self.error("layer_quant_config", "layer_quant_config is too large", found, expected)

    def find(self, module: str) -> LayerConfig:
        """The config of a module; an error where it quantizes something that a linear layer here cannot."""
        layer, warnings = self._layer(module), []
        if layer.get("bias") is not None:
            raise self.error("bias", "bias of a layer is quantized, which is not supported yet", module, "bias: null")
        if layer.get("output_tensors") is not None:
            if not self._feeds_kv_cache(module):
                what = "output_tensors of a layer is quantized, which is not supported yet"
                raise self.error("output_tensors", what, module, "output_tensors: null")
            warnings.append(KV_CACHE_WARNING)
        specs = self._specs(layer, "weight")
        if not specs:
            raise self.error("weight", "the config does not say how a layer's weight is quantized", module, "a weight spec")
        return LayerConfig(specs[0], specs[1:], self._specs(layer, "input_tensors"), warnings)

    def _feeds_kv_cache(self, module: str) -> bool:
        """Whether a module's output goes into the KV cache, by its name or the config's patterns."""
        by_name = module.rpartition(".")[2] in _KV_PROJECTIONS
        return by_name or any(fnmatch.fnmatchcase(module, pattern) for pattern in self._kv_patterns)

    def _specs(self, layer: Mapping[str, Any], part: str) -> list[TensorSpec]:
        """The specs of weight or input_tensors: none, one, or one with another for its scales."""
        found = layer.get(part)
        specs = found if isinstance(found, list) else [] if found is None else [found]
        if len(specs) > 2 or not all(isinstance(spec, Mapping) for spec in specs):
            expected = "an object with dtype and qscheme"
            raise self.error(part, f"{part} is neither a spec nor two of them", type(found).__name__, expected)
        for spec in specs:
            for key, allowed in _ALLOWED.items():
                if not is_allowed(spec.get(key), allowed):
                    expected = " or ".join(map(repr, allowed))
                    raise self.error(f"{part}.{key}", f"{key} is not known", repr(spec.get(key)), expected)
        return [TensorSpec(spec) for spec in specs]

    def _layer(self, module: str) -> Mapping[str, Any]:
        self._matches += len(self._by_name) + len(self._kv_patterns)
        if self._matches > _MAX_MATCHES:
            what = "the config's patterns take too long to match"
            raise self.error("layer_quant_config", what, f"{self._matches} times", _MAX_MATCHES)
        found = next((key for key in self._by_name if fnmatch.fnmatchcase(module, key)), None)
        return self._object(self._by_name, found) if found is not None else self._linear or self._global

    def _object(self, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = config.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise self.error(key, f"{key} is not an object", type(found).__name__, None)
        return found or {}

    def error(self, field: str, what: str, found: object, expected: object) -> CheckpointError:
        """An error about the config."""
        return CheckpointError(what, file=self.file, field=field, found=found, expected=expected)
