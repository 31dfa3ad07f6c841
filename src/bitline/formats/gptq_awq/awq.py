"""AWQ gemm: qweight packed along N, as AutoAWQ, GPTQModel and AutoRound write it, mostly with columns interleaved by 8.

Zero points are stored unchanged. `zero_point: false` does not mean that there are none: where qzeros exist they count.
The gemv and gemv_fast versions are in awq_gemv.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline import types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorSource
from bitline.formats.common import packed_int32
from bitline.formats.common.ignored_modules import IgnoredModules, ignored_names
from bitline.formats.common.slices import COLUMNS, int32_axis
from bitline.formats.gptq_awq import awq_gemv
from bitline.formats.gptq_awq.config import SettingsByModule, auto_round_layout, quantizes_activations
from bitline.formats.gptq_awq.packed_module import PackedModule, modules_with_qweight
from bitline.formats.quant_config import find_quantization
from bitline.types import LinearSpec

_INTERLEAVED_BITS = (4, 5, 6, 7)  # as AutoAWQ and AutoRound write them; GPTQModel interleaves 4 bits only
VERSIONS = ("gemm", "gemv", "gemv_fast", "llm-awq")


class AWQReader:
    """Layer records of AWQ checkpoints, and of AutoRound's in the layout of version gemm."""

    name = "awq"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "awq", and for AutoRound with a packing_format laid out like it."""
        config, _ = find_quantization(source)
        return config.get("quant_method") == "awq" or auto_round_layout(config) == "awq gemm"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a qweight. Of data only the first row of qzeros is read, where the config says there are none."""
        config, file = find_quantization(source)
        version = _version(config, file)
        modules = list(modules_with_qweight(source))
        settings = SettingsByModule(config, file, frozenset(modules))
        if version != "gemm":
            yield from awq_gemv.records(source, version, settings, file)
            return
        ignored, interleaved_bits = IgnoredModules(ignored_names(config, file), file), _interleaved_bits(config)
        label = "awq gemm" if auto_round_layout(config) is None else "auto-round awq gemm"
        for name in modules:
            module = PackedModule(source, name, settings.find(name), file)
            ignored.warn_if_listed(module)
            yield _record(module, label, module.bits in interleaved_bits)


# ---- config --------------------------------------------------------------------------------------------------------------


def _version(config: Mapping[str, Any], file: Path) -> str:
    """The version that the config names; an unknown one is refused."""
    named: set[str] = set()
    for key in ("version", "checkpoint_format", "format"):
        value = config.get(key)
        if value is not None and str(value).lower() not in VERSIONS:
            raise CheckpointError(
                f"AWQ {key} {value!r} is not supported yet", file=file, field=key, found=repr(value),
                expected=" or ".join(VERSIONS), fix="save the model in AWQ's gemm version",
            )  # fmt: skip
        named |= {str(value).lower()} - {"none"}
    if len(named) > 1:
        raise CheckpointError(
            "the config names two versions of AWQ", file=file, field="version", found=" and ".join(sorted(named))
        )
    act_bits = config.get("act_bits")
    if quantizes_activations(act_bits):
        raise CheckpointError(
            "AWQ with quantized activations is not supported yet", file=file, field="act_bits", found=f"act_bits {act_bits!r}"
        )
    return named.pop() if named else "gemm"


def _interleaved_bits(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The bit widths whose columns are interleaved by 8. meta.quantizer names GPTQModel; Quark exports pack_method "order"."""
    if config.get("pack_method") == "order":
        return ()
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return (4,) if "gptqmodel" in str(quantizer).lower() else _INTERLEAVED_BITS


# ---- one module ----------------------------------------------------------------------------------------------------------


def _record(m: PackedModule, label: str, interleaved: bool) -> LayerRecord:
    k, block = _check_shapes(m, interleaved)
    symmetric = _is_symmetric(m, interleaved)
    spec = LinearSpec(
        m.n, k, types.unsigned(m.bits, symmetric=symmetric), block, scale_dtype=m.scales.dtype,
        zero="none" if symmetric else "int", bias=m.bias,
    )  # fmt: skip

    def read_codes() -> dict[str, Tensor | None]:
        packed = m.read("qweight")
        if m.bits == 4 and interleaved:
            codes = packed_int32.repack_awq(packed, m.n)
        else:
            codes = packed_int32.repack_along_n(packed, m.bits, m.n, interleaved=interleaved)
        return {"codes": codes, "zero": _read_zeros(m, symmetric, interleaved)}

    layout = m.layout(spec, (COLUMNS, int32_axis(0, m.bits)))
    return m.packed_record(label, spec, read_codes, layout, lambda part: _record(part, label, interleaved))


def _check_shapes(m: PackedModule, interleaved: bool) -> tuple[int, tuple[int, int]]:
    """K and the scale block, with every tensor's shape checked against the others and the config."""
    k, packed_columns = m.codes.shape
    if packed_columns == m.n:
        raise m.error(
            m.codes, "qweight and scales do not fit: AWQ packs along N",
            f"qweight {[k, packed_columns]}, scales {list(m.scales.shape)}",
            f"{-(-m.n * m.bits // 32)} columns (GPTQ packs along K: quant_method may be wrong)",
        )  # fmt: skip
    m.check_packed_columns(m.codes, packed_columns)
    m.check_qzeros()
    if interleaved and m.n % 8:
        raise m.error(m.codes, "AWQ interleaves columns by 8", f"{m.n} columns", "a multiple of 8")
    return k, m.scale_block(k)


def _is_symmetric(m: PackedModule, interleaved: bool) -> bool:
    """True where zero points are implicit: there are no qzeros, or the config says so and the first group agrees."""
    if m.qzeros is None:
        if not m.settings.symmetric:
            m.require("qzeros", (torch.int32,))
        return True
    if not m.settings.symmetric:
        return False
    first = packed_int32.unpack_zero_points(m.source.read(m.qzeros.name, rows=1), m.bits, m.n, interleaved=interleaved)
    if _are_implicit(first, m.bits):
        return True
    m.warn("the config says that there are no zero points, but qzeros hold some: they are used")
    return False


def _read_zeros(m: PackedModule, symmetric: bool, interleaved: bool) -> Tensor | None:
    """Zero points uint8 [N, G], None for a symmetric weight, whose qzeros are checked in every group."""
    if m.qzeros is None:
        return None
    zero = packed_int32.unpack_zero_points(m.read("qzeros"), m.bits, m.n, interleaved=interleaved)
    if symmetric and not _are_implicit(zero, m.bits):
        found = f"{int(zero.min())} to {int(zero.max())}"
        what = "zero points in a later group, where the config and the first group have none"
        raise m.error(m.qzeros, what, found, 1 << (m.bits - 1))
    return None if symmetric else zero


def _are_implicit(zero: Tensor, bits: int) -> bool:
    """Whether all zero points are the implicit one, 2**(bits - 1)."""
    return bool((zero == 1 << (bits - 1)).all())


READER = AWQReader()
