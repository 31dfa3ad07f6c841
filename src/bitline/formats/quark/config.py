"""The config side of Quark: which rule made a module, how its weight and input are quantized, and what is refused."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitline.errors import CheckpointError
from bitline.formats.common.ignored_modules import KV_ODDITY, is_known

_MOST_PATTERNS, _LONGEST_PATTERN = 10_000, 512
_MOST_TRIES = 50_000_000  # of a pattern on a name: half a minute; real models take a hundred thousand
# Projections whose outputs are what a cache of keys and values holds.
_CACHED = ("k_proj", "v_proj", "kv_proj", "qkv_proj", "kv_b_proj", "query_key_value", "W_pack")

Spec = Mapping[str, Any]
# Options of a spec that decide what its numbers mean, and all that they may be.
_VALUES: dict[str, tuple[object, ...]] = {
    "symmetric": (None, True, False), "is_dynamic": (None, True, False), "is_scale_quant": (None, True, False),
    "scale_format": (None, "float", "float32", "e4m3", "e5m3", "e8m0"), "zero_point_type": (None, "int32", "float32"),
}  # fmt: skip


class Rules:
    """What the config says of each module: layer_quant_config by name, then layer_type_quant_config, then the global one."""

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        self.file, self._tries = file, 0
        export = self._object(config, "export")
        self.order = export.get("pack_method") or "reorder"
        if self.order not in ("reorder", "order"):
            raise self.error("export.pack_method", "pack_method is not known", repr(self.order), "'reorder' or 'order'")
        if export.get("weight_format") not in (None, "real_quantized"):
            raise self.error(
                "export.weight_format", "weights are not stored quantized", repr(export.get("weight_format")), "'real_quantized'"
            )
        self._global = self._object(config, "global_quant_config")
        self._by_name = self._object(config, "layer_quant_config")
        self._linear = self._object(self._object(config, "layer_type_quant_config"), "Linear")
        groups = export.get("kv_cache_group") or []
        self._cached = [p for p in groups if isinstance(p, str)] if isinstance(groups, list) else []
        self._cached += list(self._object(config, "kv_cache_quant_config"))
        exclude = config.get("exclude") or []
        if not isinstance(exclude, list) or not all(isinstance(name, str) for name in exclude):
            raise self.error("exclude", "exclude is not a list of names", type(exclude).__name__, "names and patterns")
        self.left_alone: list[str] = exclude
        patterns = [*self._by_name, *self._cached]
        if len(patterns) > _MOST_PATTERNS or any(len(p) > _LONGEST_PATTERN for p in patterns):
            raise self.error(
                "layer_quant_config",
                "layer_quant_config is too large",
                f"{len(patterns)} patterns",
                f"{_MOST_PATTERNS} short ones",
            )

    def of(self, module: str) -> tuple[Mapping[str, Any], list[Spec], list[str]]:
        """A module's layer config, its weight's specs (one, or one and another for its scales), and what is odd about it."""
        layer, odd = self._layer(module), []
        if layer.get("bias") is not None:
            raise self.error("bias", "bias of a layer is quantized, which is not supported yet", module, "bias: null")
        if layer.get("output_tensors") is not None:
            if module.rpartition(".")[2] not in _CACHED and not any(fnmatch.fnmatchcase(module, p) for p in self._cached):
                what = "output_tensors of a layer is quantized, which is not supported yet"
                raise self.error("output_tensors", what, module, "output_tensors: null")
            odd.append(KV_ODDITY)
        specs = self.specs(layer, "weight")
        if not specs:
            raise self.error("weight", "the config does not say how a layer's weight is quantized", module, "a weight spec")
        return layer, specs, odd

    def specs(self, layer: Mapping[str, Any], part: str) -> list[Spec]:
        """The specs of weight or input_tensors; none where it is not quantized."""
        found = layer.get(part)
        specs = found if isinstance(found, list) else [] if found is None else [found]
        if len(specs) > 2 or not all(isinstance(spec, Mapping) for spec in specs):
            expected = "an object with dtype and qscheme"
            raise self.error(part, f"{part} is not a spec, nor two of them", type(found).__name__, expected)
        for spec in specs:
            for key, known in _VALUES.items():
                if not is_known(spec.get(key), known):
                    raise self.error(f"{part}.{key}", f"{key} is not known", repr(spec.get(key)), " or ".join(map(repr, known)))
        return specs

    def _layer(self, module: str) -> Mapping[str, Any]:
        self._tries += len(self._by_name) + len(self._cached)
        if self._tries > _MOST_TRIES:
            raise self.error(
                "layer_quant_config", "the config's patterns take too long to match", f"{self._tries} times", _MOST_TRIES
            )
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
