"""AMD Quark: integers of 2, 3, 4 and 8 bits, FP8, and FP4 or FP6 under E8M0 (MX), E4M3 (NVFP4) or E5M3 scales.

A module is quantized if it has a `weight_scale`; the config says how.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitline.formats.base import LayerRecord, TensorSource
from bitline.formats.common.ignored_modules import IgnoredModules
from bitline.formats.quant_config import find_quantization
from bitline.formats.quark import minifloats
from bitline.formats.quark.config import QuarkConfig
from bitline.formats.quark.integers import integer_record
from bitline.formats.quark.module import MX_TYPES, QuarkModule
from bitline.formats.quark.packing import INTEGERS


class QuarkReader:
    """Layer records of Quark checkpoints."""

    name = "quark"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "quark"."""
        return find_quantization(source)[0].get("quant_method") == "quark"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a weight_scale. No tensor data is read."""
        raw, file = find_quantization(source)
        config = QuarkConfig(raw, file)
        ignored = IgnoredModules(config.ignored, file)
        for tensor in source.tensors:
            if tensor.endswith(".weight_scale"):
                module = QuarkModule(source, tensor.removesuffix(".weight_scale"), config)
                ignored.warn_if_listed(module)
                module.check()
                yield _record(module)


def _record(m: QuarkModule) -> LayerRecord:
    """The record, by the dtype that the config names; the tensors must be of that dtype."""
    if m.dtype in minifloats.MX_DTYPES:
        return minifloats.mx_record(m)
    if m.dtype in INTEGERS:
        return integer_record(m)
    if m.dtype in minifloats.FP8_TYPES:
        return minifloats.fp8_record(m)
    if m.dtype in MX_TYPES and m.qscheme == "per_group":
        return minifloats.packed_record(m)
    raise m.error(
        m.codes, "Quark weights of this kind are not supported yet", f"{m.dtype} {m.qscheme}",
        "integers of 2, 3, 4 or 8 bits, FP8, fp4 or fp6 per group",
    )  # fmt: skip


READER = QuarkReader()
