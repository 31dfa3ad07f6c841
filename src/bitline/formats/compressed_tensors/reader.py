"""compressed-tensors: integer, FP8, NVFP4 and MX weights as llm-compressor and AutoRound write them.

The tensors say how a module is stored, the config says what they mean. Where both can be true but disagree, the record has
a warning; where they contradict each other, the checkpoint is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorSource, missing_codes
from bitline.formats.common.expert_stacks import unstack_experts
from bitline.formats.common.ignored_modules import KV_CACHE_WARNING
from bitline.formats.common.scales import E8M0, FLOATS
from bitline.formats.compressed_tensors import auto_round, integers, minifloats
from bitline.formats.compressed_tensors import config as ct_config
from bitline.formats.compressed_tensors.config import SchemeByModule
from bitline.formats.compressed_tensors.layout import layout_of
from bitline.formats.compressed_tensors.minifloats import FP8_TYPES
from bitline.formats.compressed_tensors.module import QuantizedModule, Reading
from bitline.formats.quant_config import AUTO_ROUND_METHODS, find_quantization, quantization_config
from bitline.types import LinearSpec

_STORED_AS = {
    "scale": "weight_scale", "scale2": "weight_global_scale", "zero": "weight_zero_point", "perm": "weight_g_idx",
    "group_index": "weight_g_idx", "input_scale": "input_scale", "input_zero": "input_zero_point",
}  # fmt: skip


class CompressedTensorsReader:
    """Layer records of compressed-tensors checkpoints, and of AutoRound's in the same layout."""

    name = "compressed-tensors"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "compressed-tensors", and for AutoRound with a packing_format laid out like it."""
        config = quantization_config(source)
        method = config.get("quant_method")
        if method in AUTO_ROUND_METHODS:
            return auto_round.has_compressed_tensors_layout(config)
        return method == "compressed-tensors"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module whose tensors are quantized. Of tensor data only shapes and act-order indices are read."""
        config, file = find_quantization(source)
        schemes: SchemeByModule
        if config.get("quant_method") in AUTO_ROUND_METHODS:
            schemes = auto_round.AutoRoundSchemes(config, file)
        else:
            schemes = ct_config.parse(config, file)
        source = unstack_experts(source, (torch.int32, torch.uint8, torch.int8, *FP8_TYPES))
        for module in _quantized_modules(source):
            yield _record(source, schemes, module)


def _quantized_modules(source: TensorSource) -> Iterator[str]:
    """Modules with quantized codes, in file order. A float `weight` is a dense layer, whatever the config targets."""
    for tensor, info in source.tensors.items():
        module, dot, suffix = tensor.rpartition(".")
        if not dot:
            continue
        if suffix == "weight_packed":
            yield module
        elif suffix == "weight" and f"{module}.weight_packed" not in source.tensors:
            if info.dtype == torch.int8 or info.dtype in FP8_TYPES:
                yield module
        elif suffix == "weight_scale" and not {f"{module}.weight", f"{module}.weight_packed"} & source.tensors.keys():
            raise missing_codes(info, f"{module}.weight or {module}.weight_packed")


def _record(source: TensorSource, schemes: SchemeByModule, name: str) -> LayerRecord:
    packed = source.tensors.get(f"{name}.weight_packed")
    codes = packed or source.tensors[f"{name}.weight"]
    scheme = schemes.find(name)
    if scheme is None:
        raise CheckpointError(
            "a layer is quantized, but no config group targets it", file=codes.file, tensor=codes.name,
            found=f"{codes.dtype} codes", expected="a group of config_groups that matches its name or class",
        )  # fmt: skip
    module = QuantizedModule(source, name, "weight" if packed is None else "weight_packed", scheme, schemes)
    if schemes.ignored(name):
        module.warn("the config's ignore list names this layer, but its tensors are quantized")
    if scheme.quantizes_output:
        module.warn(KV_CACHE_WARNING)
    return _record_of(module)


def _record_of(module: QuantizedModule) -> LayerRecord:
    """The record of a module whose scheme is known."""
    scheme = module.scheme
    module.require("weight_scale", (*FLOATS, *E8M0, torch.float8_e4m3fn))
    label, spec, read_fields = _by_stored_format(module)
    _warn_about_format(module, label)
    module.leave_unused_scales()
    if label != "pack-quantized":
        module.leave_unused("weight_shape")
        _refuse_act_order(module, spec)
    stored_as = _STORED_AS
    if scheme.act is not None and scheme.act.dynamic:  # NVFP4: the global scale is the static part of the activation scales
        stored_as = {**_STORED_AS, "input_scale": "input_global_scale"}
    layout, in_order = layout_of(module, spec), functools.partial(integers.read_in_order, spec)
    return module.record(f"compressed-tensors {label}", spec, read_fields, stored_as, layout, _record_of, in_order)


def _by_stored_format(m: QuantizedModule) -> Reading:
    """The format by the tensors: their names and dtypes, and int or float from the scheme."""
    if f"{m.name}.weight_packed" in m.source.tensors:
        if m.codes.dtype != torch.uint8:
            return integers.pack_quantized(m)
        return minifloats.packed_minifloats(m) if m.scheme.weights.is_float else integers.mx_int4(m)
    return integers.int_quantized(m) if m.codes.dtype == torch.int8 else minifloats.float_quantized(m)


def _refuse_act_order(m: QuantizedModule, spec: LinearSpec) -> None:
    """An error for a weight_g_idx that is an act-order, which only pack-quantized weights have."""
    if integers.read_act_order(m, spec.k, spec.block) != (None, None):
        info = m.require("weight_g_idx")
        raise m.error(info, "act-order of such weights is not supported yet", "columns in another order", "all -1, or in order")


def _warn_about_format(m: QuantizedModule, label: str) -> None:
    declared = m.scheme.format
    same_storage = {label, declared} == {"float-quantized", "naive-quantized"}
    if declared in ct_config.FORMATS and label != declared and not same_storage:
        m.warn(f"the config says {declared}, the tensors are {label}")


READER = CompressedTensorsReader()
