"""ModelOpt's export to Hugging Face: FP8, MXFP8, MXFP4, NVFP4 and INT4 with its input factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.conversion import base, global_scale, packing
from bitline.conversion.base import NotExact
from bitline.conversion.original import Original
from bitline.formats.modelopt.config import Algorithm
from bitline.types import LinearSpec
from bitline.version import __version__
from bitline.weight import QuantizedWeight

_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_PRODUCER = {"name": "bitline", "version": __version__}


class ModelOptTarget:
    """One algorithm for all layers, or MIXED_PRECISION with one for each."""

    name = "modelopt"
    embeddings = False

    def forms(self, spec: LinearSpec) -> list[LinearSpec]:
        """The layouts of FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, MXFP4, NVFP4, W4A16_NVFP4 and W4A16_AWQ."""
        form = self._form(spec)
        _algorithm(form)
        return [form]

    def _form(self, spec: LinearSpec) -> LinearSpec:
        base.no_order(spec, "ModelOpt does not have")
        if base.is_integer(spec):
            if spec.weight.bits > 4 or base.has_zero(spec) or spec.n % 2:
                raise NotExact(f"ModelOpt's integers are symmetric, of 4 bits and in pairs of rows, and these are {spec.scheme}")
            form = base.integer_form(spec, types.uint4b8, base.columns_per_scale(spec, whole=True), keep_act=True)
            return form.replace(input_multiplier=spec.input_multiplier)
        base.no_input_factors(spec, "this layout of ModelOpt")
        size = {_E8M0: 32, _E4M3: 16}.get(spec.scale_dtype, 0)
        if size and spec.block[1] == size and spec.k % size == 0:
            if size == 32 and spec.weight.name in ("float8_e4m3fn", "float4_e2m1"):
                return spec.replace(block=(1, 32))
            if size == 16 and spec.weight.name == "float4_e2m1" and spec.scale2_block == (spec.n, spec.k):
                return spec
        if spec.weight.name == "float8_e4m3fn" and spec.block[1] != 32:
            return spec.replace(scale_dtype=torch.float32, scale2_block=None)
        raise NotExact(f"no algorithm of ModelOpt stores {spec.scheme}")

    def fallback(self, spec: LinearSpec) -> LinearSpec:
        """None: rounding is calibrated there."""
        raise NotExact("no layer is rounded for ModelOpt")

    def settle(self, forms: Mapping[str, LinearSpec]) -> tuple[dict[str, LinearSpec], dict[str, NotExact]]:
        """Every layer as it is."""
        return dict(forms), {}

    def scales(self, spec: LinearSpec) -> tuple[torch.dtype, ...]:
        """float32, which holds every scale."""
        return (torch.float32,)

    def pack(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """Global scales are factors, for weights and inputs alike."""
        s, scale = weight.spec, weight.scale.contiguous()
        if base.is_integer(s):
            tensors = {"weight": packing.row_pairs(weight.codes, s.k), "weight_scale": scale}
        elif s.weight.bits == 8:
            codes = weight.codes[:, : s.k].contiguous().view(torch.float8_e4m3fn)
            flat = () if s.block == (s.n, s.k) else (s.n,) if s.block == (1, s.k) and s.scale_dtype != _E8M0 else scale.shape
            tensors = {
                "weight": codes,
                "weight_scale": (scale.view(torch.uint8) if s.scale_dtype == _E8M0 else scale).reshape(flat),
            }
        else:
            codes = packing.clean_rows(weight.codes, 4, s.k)
            if s.scale_dtype == _E8M0:
                tensors = {"weight": codes, "weight_scale": scale.view(torch.uint8)}
            else:
                tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": global_scale.factor(weight)}
        if weight.input_scale is not None and s.act is not None:
            inverse = s.act.scale == "e4m3"
            value = global_scale.reciprocal(weight.input_scale) if inverse else weight.input_scale.float().reshape(())
            tensors["input_scale"] = value
        if weight.input_multiplier is not None:
            tensors["pre_quant_scale"] = weight.input_multiplier
        return tensors | ({} if weight.bias is None else {"bias": weight.bias})

    def config(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, Any]:
        """quantization_config of config.json."""
        return {"quant_method": "modelopt", **_quantization(layers), "ignore": original.plain_linears(), "producer": _PRODUCER}

    def files(self, layers: Mapping[str, LinearSpec], original: Original) -> dict[str, dict[str, Any]]:
        """hf_quant_config.json, which tools read beside config.json."""
        quantization = {**_quantization(layers), "kv_cache_quant_algo": None, "exclude_modules": original.plain_linears()}
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


def _quantization(layers: Mapping[str, LinearSpec]) -> dict[str, Any]:
    found = {name: _named(form) for name, form in layers.items()}
    kinds = list({tuple(value.items()): value for value in found.values()}.values())
    if len(kinds) == 1:
        return kinds[0]
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": found}


def _named(form: LinearSpec) -> dict[str, Any]:
    name, size = _algorithm(form)
    return {"quant_algo": name, **({"group_size": size} if size else {})}


def _algorithm(form: LinearSpec) -> tuple[str, int]:
    """The algorithm that stores such a weight for such an input, and its group size, 0 where it has none."""
    rows, columns = form.block
    square = max(rows, columns)
    fits = {
        "W4A16_AWQ": columns, "MXFP4": 32, "NVFP4": columns, "W4A16_NVFP4": columns, "MXFP8": 32,
        "FP8": 0 if form.block == (form.n, form.k) else None,
        "FP8_PER_CHANNEL_PER_TOKEN": 0 if (rows, columns) == (1, form.k) else None,
        "FP8_PB_WO": square if rows in (square, form.n) and columns in (square, form.k) else None,
    }  # fmt: skip
    for name, size in fits.items():
        algorithm = Algorithm(name, size or 0)
        if size is not None and algorithm.kind == _kind(form) and algorithm.act(columns, calibrated=True) == form.act:
            return name, size
    raise NotExact(f"no algorithm of ModelOpt stores {form.scheme}")


def _kind(form: LinearSpec) -> str:
    """How ModelOpt's reader calls the way that a weight is stored."""
    if base.is_integer(form):
        return "int4"
    return f"{'mxfp' if form.scale_dtype == _E8M0 else 'nvfp' if form.weight.bits == 4 else 'fp'}{form.weight.bits}"
