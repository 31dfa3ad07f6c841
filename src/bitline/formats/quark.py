"""AMD Quark: 4-bit integers in transposed words, int8, FP8, and FP4 or FP6 under E8M0 (MX) or E4M3 (NVFP4) scales.

A module is quantized if it has a `weight_scale`; the config says which of its rules made the module.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline import bits, types
from bitline.errors import CheckpointError
from bitline.formats import _words
from bitline.formats._layer import FLOATS, Layer
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource
from bitline.formats.config import find_quantization
from bitline.types import ActSpec, LinearSpec

_FP8 = {"fp8_e4m3": (types.float8_e4m3fn, torch.float8_e4m3fn), "fp8_e5m2": (types.float8_e5m2, torch.float8_e5m2)}
_SMALL = {"fp4": types.float4_e2m1, "fp6_e2m3": types.float6_e2m3, "fp6_e3m2": types.float6_e3m2}
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_NUMBER = ((), (1,))
_MOST_PATTERNS, _LONGEST_PATTERN = 10_000, 512


class QuarkReader:
    """Layer records of Quark checkpoints."""

    name = "quark"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "quark"."""
        return find_quantization(source)[0].get("quant_method") == "quark"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a weight_scale. No tensor data is read."""
        config, file = find_quantization(source)
        rules = _Rules(config, file)
        for name in source.tensors:
            if name.endswith(".weight_scale"):
                yield _Module(source, name.removesuffix(".weight_scale"), rules).layer()


class _Rules:
    """What the config says of each module: layer_quant_config by name, then layer_type_quant_config, then the global one."""

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        self.file = file
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
        if len(self._by_name) > _MOST_PATTERNS or any(len(p) > _LONGEST_PATTERN for p in self._by_name):
            raise self.error(
                "layer_quant_config",
                "layer_quant_config is too large",
                f"{len(self._by_name)} patterns",
                f"{_MOST_PATTERNS} short ones",
            )

    def of(self, module: str) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
        """A module's layer config, and its weight's specs: one, or one and another for its scales."""
        found = next((key for key in self._by_name if fnmatch.fnmatchcase(module, key)), None)
        layer = self._global if found is None else self._object(self._by_name, found)
        if found is None and self._linear:
            layer = self._linear
        for part in ("bias", "output_tensors"):
            if layer.get(part) is not None:
                raise self.error(part, f"{part} of a layer is quantized, which is not supported yet", module, f"{part}: null")
        specs = self.specs(layer, "weight")
        if not specs:
            raise self.error("weight", "the config does not say how a layer's weight is quantized", module, "a weight spec")
        return layer, specs

    def specs(self, layer: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
        """The specs of weight or input_tensors; none where it is not quantized."""
        found = layer.get(part)
        specs = found if isinstance(found, list) else [] if found is None else [found]
        if len(specs) > 2 or not all(isinstance(spec, Mapping) for spec in specs):
            raise self.error(
                part, f"{part} is not a spec, nor two of them", type(found).__name__, "an object with dtype and qscheme"
            )
        return specs

    def _object(self, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = config.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise self.error(key, f"{key} is not an object", type(found).__name__, None)
        return found or {}

    def error(self, field: str, what: str, found: object, expected: object) -> CheckpointError:
        """An error about the config."""
        return CheckpointError(what, file=self.file, field=field, found=found, expected=expected)


class _Module(Layer):
    """A module under inspection, with what the config says of it."""

    def __init__(self, source: TensorSource, base: str, rules: _Rules) -> None:
        super().__init__(source, base, "weight")
        self.rules = rules
        config, (self.spec, *self.scale_spec) = rules.of(base)
        self.inputs = rules.specs(config, "input_tensors")
        for suffix in ("input_rotation", "input_prescale"):
            if (info := self.find(suffix)) is not None:
                raise self.error(info, "the input of a layer is transformed, which is not supported yet", suffix, "none")
        self.scale = self.need("weight_scale")
        self.dtype, self.how = str(self.spec.get("dtype")), str(self.spec.get("qscheme"))

    def layer(self) -> LayerRecord:
        """The record, by the dtype that the config names; its tensors have to be of that dtype."""
        if self.dtype in ("int4", "uint4") and self.how == "per_group":
            return self._words()
        if self.dtype in ("int8", "uint8") and self.how in ("per_tensor", "per_channel"):
            return self._bytes()
        if self.dtype in _FP8:
            scalar, stored = _FP8[self.dtype]
            n, k = self.matrix("weight", (stored,))
            return self._floats(n, k, scalar)
        if self.dtype in _SMALL and self.how == "per_group":
            scalar = _SMALL[self.dtype]
            n, columns = self.matrix("weight", (torch.uint8,))
            if columns * 8 % scalar.bits:
                raise self.error(self.main, "bytes do not hold whole codes", columns, f"a multiple of {scalar.bits // 2}")
            return self._floats(n, columns * 8 // scalar.bits, scalar)
        raise self.error(
            self.main, "Quark weights of this kind are not supported yet", f"{self.dtype} {self.how}",
            "int4 or uint4 per group, int8, FP8, fp4 or fp6 per group",
        )  # fmt: skip

    def _words(self) -> LayerRecord:
        """int32 [K, N/8], scales [G, N], zero points int32 [G, N/8]; N padded to a multiple of 8."""
        k, words = self.matrix("weight", (torch.int32,))
        groups, n = self.matrix("weight_scale", FLOATS)
        if words != -(-n // 8):
            raise self.error(self.main, "weight and weight_scale do not fit", f"{words} words", f"{-(-n // 8)} for {n} rows")
        size = self._group(k, groups)
        zeros = self.find("weight_zero_point")
        if zeros is not None:
            self.need("weight_zero_point", (torch.int32,), ((groups, words),))
        symmetric = self.dtype == "int4" and self.spec.get("symmetric") is not False
        if not symmetric:
            self.need("weight_zero_point")
        signed, reorder = self.dtype == "int4", self.rules.order == "reorder"

        def build() -> dict[str, Tensor | None]:
            codes, zero = _rows(self.read("weight"), n, reorder), None
            if zeros is not None:
                fields = _words.unpack_words(self.read("weight_zero_point"), 4, 8 * words)
                fields = (_words.awq_columns(fields) if reorder else fields)[:, :n]
                zero = ((fields + 8) & 15 if signed else fields).t().contiguous()
            if symmetric and zero is not None:
                self._no_zeros(zeros, bool((zero != 8).any()))
                zero = None
            return {"codes": codes ^ 0x88 if signed else codes, "scale": self.read("weight_scale").t().contiguous(), "zero": zero}

        scalar = types.unsigned(4, symmetric=symmetric)
        spec = self._linear(n, k, scalar, (1, size), zero="none" if symmetric else "int")
        return self._done(f"{self.dtype} {self.rules.order}", spec, build)

    def _bytes(self) -> LayerRecord:
        """int8 or uint8 [N, K] with a scale per row or one for all, and zero points that symmetric files have as well."""
        n, k = self.matrix("weight", (torch.int8 if self.dtype == "int8" else torch.uint8,))
        block = self._block(n, k)
        grid = (n // block[0], 1)
        shapes = (grid, (n,)) if grid != (1, 1) else (grid, *_NUMBER)
        self.need("weight_scale", FLOATS, shapes)
        zeros = self.find("weight_zero_point")
        symmetric = self.dtype == "int8" and self.spec.get("symmetric") is not False
        if zeros is not None or not symmetric:
            self.need("weight_zero_point", (torch.int8, torch.uint8, torch.int32), shapes)
        scalar = types.int8 if symmetric else types.uint8
        spec = self._linear(n, k, scalar, block, zero="none" if symmetric else "int")

        def build() -> dict[str, Tensor | None]:
            codes, zero = self.read("weight").view(torch.uint8), None
            if zeros is not None:
                stored = self.read("weight_zero_point").int().reshape(grid)
                if symmetric:
                    self._no_zeros(zeros, bool(stored.any()))
                else:
                    half = 128 if self.dtype == "int8" else 0
                    if int(stored.min()) + half < 0 or int(stored.max()) + half > 255:
                        raise self.error(
                            zeros, "zero points do not fit 8 bits", f"{int(stored.min())}..{int(stored.max())}", None
                        )
                    codes, zero = codes ^ half, (stored + half).to(torch.uint8)
            return {"codes": codes, "scale": self.read("weight_scale").reshape(grid), "zero": zero}

        return self._done(self.dtype, spec, build)

    def _floats(self, n: int, k: int, scalar: types.ScalarType) -> LayerRecord:
        """FP8, FP6 or FP4 rows, already the canonical stream; scales are floats, E8M0, or E4M3 under a global one."""
        block = self._block(n, k)
        grid = (-(-n // block[0]), -(-k // block[1]))
        flat: tuple[tuple[int, ...], ...] = _NUMBER if grid == (1, 1) else ((n,),) if grid == (n, 1) else ()
        two = bool(self.scale_spec)
        if two and self.scale_spec[0].get("dtype") != "fp8_e4m3":
            found = self.scale_spec[0].get("dtype")
            raise self.error(self.scale, "scales of this kind are not supported yet", found, "fp8_e4m3")
        mx = not two and (self.spec.get("scale_format") == "e8m0" or self.scale.dtype in _E8M0)
        dtypes = (torch.float8_e4m3fn,) if two else _E8M0 if mx else FLOATS
        self.need("weight_scale", dtypes, (grid, *flat))
        if two:
            self.need("weight_scale_2", (torch.float32,), _NUMBER)
        spec = self._linear(n, k, scalar, block, scale_dtype=torch.float8_e8m0fnu if mx else self.scale.dtype,
                            scale2_block=(n, k) if two else None)  # fmt: skip

        def build() -> dict[str, Tensor | None]:
            scale = self.read("weight_scale")
            scale = (scale.view(torch.float8_e8m0fnu) if mx else scale).reshape(grid)
            scale2 = self.read("weight_scale_2").double().reshape(1, 1) if two else None
            return {"codes": self.read("weight").view(torch.uint8), "scale": scale, "scale2": scale2}

        label = f"{self.dtype} e4m3" if two else f"{self.dtype} e8m0" if mx else self.dtype
        return self._done(label, spec, build)

    def _block(self, n: int, k: int) -> tuple[int, int]:
        if self.how == "per_tensor":
            return n, k
        if self.how == "per_channel" and self.spec.get("ch_axis") == 0:
            return 1, k
        if self.how == "per_group" and self.spec.get("ch_axis") in (1, -1):
            return 1, self._group(k, self.scale.shape[-1] if self.scale.shape else 0)
        sizes = self.spec.get("block_size")
        if self.how == "per_block" and isinstance(sizes, list) and len(sizes) == 2 and all(_size(s) for s in sizes):
            return sizes[0], sizes[1]
        found = f"qscheme {self.how}, ch_axis {self.spec.get('ch_axis')}, block_size {sizes}"
        raise self.error(self.scale, "weights are not quantized this way", found, "per tensor, row, group or block")

    def _group(self, k: int, groups: int) -> int:
        size: Any = self.spec.get("group_size")
        if not _size(size) or -(-k // size) != groups or self.spec.get("ch_axis") not in (1, -1):
            found = f"{groups} groups of {k} columns"
            raise self.error(self.scale, "the tensors and the config disagree about groups", found, f"group_size {size!r}")
        return int(size)

    def _linear(self, n: int, k: int, scalar: types.ScalarType, block: tuple[int, int], **more: Any) -> LinearSpec:
        base = LinearSpec(n, k, scalar, block, scale_dtype=self.scale.dtype, act=self._act(), bias=self.bias(n))
        return base.replace(**more)

    def _act(self) -> ActSpec | None:
        """How inputs are to be quantized; static scales are looked for."""
        if not self.inputs:
            return None
        spec, *scales = self.inputs
        dtype, how, dynamic = str(spec.get("dtype")), str(spec.get("qscheme")), spec.get("is_dynamic") is True
        if dtype == "fp4" and how == "per_group" and dynamic and _size(spec.get("group_size")):
            if scales and scales[0].get("dtype") == "fp8_e4m3":
                self.need("input_scale_2", (torch.float32,), _NUMBER)
                return ActSpec(types.float4_e2m1, True, "group", spec["group_size"], scale="e4m3")
            if not scales and spec.get("scale_format") == "e8m0":
                return ActSpec(types.float4_e2m1, True, "group", spec["group_size"], scale="e8m0")
        known = {"fp8_e4m3": types.float8_e4m3fn, "int8": types.int8}
        token = how == "per_channel" and dynamic
        if dtype not in known or not (how == "per_tensor" or token) or spec.get("symmetric") is False or scales:
            found = f"{dtype} {how}, {'dynamic' if dynamic else 'static'}"
            raise self.error(self.main, "inputs quantized this way are not supported yet", found, "FP8, int8, fp4, symmetric")
        if not dynamic:
            self.need("input_scale", FLOATS, _NUMBER)
            self.find("input_zero_point")
        return ActSpec(known[dtype], dynamic, "token" if token else "tensor")

    def _no_zeros(self, zeros: TensorInfo | None, found: bool) -> None:
        if found and zeros is not None:
            raise self.error(zeros, "the config says symmetric, but there are zero points", "some that are not 0", "zeros")

    def _done(self, label: str, spec: LinearSpec, build: Any) -> LayerRecord:
        act = spec.act

        def whole() -> dict[str, Tensor | None]:
            parts: dict[str, Tensor | None] = build()
            if act is not None and not act.dynamic:
                parts["input_scale"] = self.read("input_scale").reshape(())
            elif act is not None and act.scale == "e4m3":  # stored as a factor, and used as a divisor
                value = self.read("input_scale_2").reshape(()).double()
                if not 1e-35 < float(value) < 1e35:
                    info = self.source.tensors[f"{self.base}.input_scale_2"]
                    raise self.error(info, "a global scale of inputs that is no scale", float(value), "1e-35 to 1e35")
                parts["input_scale"] = value.reciprocal().float()
            return parts

        fields = {"scale": "weight_scale", "scale2": "weight_scale_2", "zero": "weight_zero_point", "input_scale": "input_scale"}
        return self.record(f"quark {label}", spec, whole, fields)


def _size(value: object) -> bool:
    return type(value) is int and 1 <= value < 1 << 31


def _rows(words: Tensor, n: int, reorder: bool) -> Tensor:
    """Words along N, int32 [K, ceil(N/8)], to canonical rows, uint8 [N, ceil(K/2)]; "reorder" is AWQ's order of columns."""
    rows = _words.awq_codes(words, 8 * words.shape[1])
    if not reorder:  # field i holds column i, and not AWQ's
        rows = rows.view(-1, 8, rows.shape[1]).index_select(1, torch.tensor(_words.AWQ_FIELD_TO_COLUMN)).flatten(0, 1)
    assert rows.shape[1] == bits.row_bytes(words.shape[0], 4)
    return rows[:n]


READER = QuarkReader()
