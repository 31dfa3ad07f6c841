"""AWQ, version gemm: qweight packed along N, mostly with columns interleaved by 8, as AutoAWQ, GPTQModel and AutoRound write it.

Zero points are stored as they are. `zero_point: false` does not mean that there are none: where qzeros exist they count.
Versions gemv and gemv_fast are in awq_gemv.
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
from bitline.formats.common.ignored_modules import Hints, left_alone
from bitline.formats.gptq_awq import awq_gemv
from bitline.formats.gptq_awq.config import ModuleSettings, packing, quantizes_inputs
from bitline.formats.gptq_awq.packed_module import IntModule, modules
from bitline.formats.quant_config import find_quantization
from bitline.types import LinearSpec

_INTERLEAVED = (4, 5, 6, 7)  # as AutoAWQ and AutoRound write them; GPTQModel interleaves 4 bits alone
VERSIONS = ("gemm", "gemv", "gemv_fast", "llm-awq")


class AWQReader:
    """Layer records of AWQ checkpoints, and of AutoRound's own in the layout of version gemm."""

    name = "awq"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "awq", and "auto-round" with a packing_format that is laid out like it."""
        config, _ = find_quantization(source)
        return config.get("quant_method") == "awq" or packing(config) == "awq gemm"

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a qweight. Of data only the first qzeros are read, where the config denies them."""
        config, file = find_quantization(source)
        version = _version(config, file)
        names = list(modules(source))
        settings = ModuleSettings(config, file, frozenset(names))
        if version != "gemm":
            yield from awq_gemv.records(source, version, settings, file)
            return
        hints, widths = Hints(left_alone(config, file), file), _interleaved(config)
        label = "awq gemm" if packing(config) is None else "auto-round awq gemm"
        for base in names:
            module = IntModule(source, base, settings.of(base), file)
            hints.note(module)
            yield _record(module, label, module.width in widths)


def _version(config: Mapping[str, Any], file: Path) -> str:
    """The layout that the config names; what is not laid out in one of the known ways is refused."""
    named: set[str] = set()
    for key in ("version", "checkpoint_format", "format"):
        value = config.get(key)
        if value is not None and str(value).lower() not in VERSIONS:
            raise CheckpointError(
                f"AWQ {key} {value!r} is not supported yet", file=file, field=key, found=repr(value),
                expected=" or ".join(VERSIONS),
                fix="save or get the model in AWQ's gemm version",
            )  # fmt: skip
        named |= {str(value).lower()} - {"none"}
    if len(named) > 1:
        raise CheckpointError(
            "the config names two versions of AWQ", file=file, field="version", found=" and ".join(sorted(named))
        )
    act_bits = config.get("act_bits")
    if quantizes_inputs(act_bits):
        raise CheckpointError(
            "AWQ with quantized activations is not supported yet", file=file, field="act_bits", found=f"act_bits {act_bits!r}"
        )
    return named.pop() if named else "gemm"


def _interleaved(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The widths whose columns are interleaved by 8. GPTQModel's meta names it; Quark's export says pack_method "order"."""
    if config.get("pack_method") == "order":
        return ()
    meta = config.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return (4,) if "gptqmodel" in str(quantizer).lower() else _INTERLEAVED


def _record(m: IntModule, label: str, interleaved: bool) -> LayerRecord:
    k, words = m.main.shape
    if words == m.n:
        raise m.error(
            m.main, "qweight and scales do not fit: AWQ packs along N",
            f"qweight {[k, words]}, scales {list(m.scales.shape)}",
            f"{-(-m.n * m.width // 32)} columns (GPTQ packs along K: quant_method may be wrong)",
        )  # fmt: skip
    m.check_bits(m.main, words)
    m.check_zeros()
    if interleaved and m.n % 8:
        raise m.error(m.main, "AWQ interleaves columns by 8", f"{m.n} columns", "a multiple of 8")
    block = m.block(k)
    symmetric = _symmetric(m, interleaved)
    spec = LinearSpec(
        m.n, k, types.unsigned(m.width, symmetric=symmetric), block, scale_dtype=m.scales.dtype,
        zero="none" if symmetric else "int", bias=m.has_bias,
    )  # fmt: skip

    def read() -> dict[str, Tensor | None]:
        packed = m.read("qweight")
        if m.width == 4 and interleaved:
            codes = packed_int32.repack_awq(packed, m.n)
        else:
            codes = packed_int32.repack_along_n(packed, m.width, m.n, interleaved=interleaved)
        zero = None
        if m.qzeros is not None:
            zero = packed_int32.unpack_zero_points(m.read("qzeros"), m.width, m.n, interleaved=interleaved)
            if symmetric and not _all_middle(zero, m.width):
                found = f"{int(zero.min())} to {int(zero.max())}"
                raise m.error(m.qzeros, "zero points that the config denies, after a group without", found, 1 << (m.width - 1))
            zero = None if symmetric else zero
        return {"codes": codes, "zero": zero}

    return m.done(label, spec, read)


def _symmetric(m: IntModule, interleaved: bool) -> bool:
    """True where every zero point is the middle one: there are no qzeros, or the config says so and the first group agrees."""
    if m.qzeros is None:
        if not m.settings.symmetric:
            m.need("qzeros", (torch.int32,))
        return True
    if not m.settings.symmetric:
        return False
    first = packed_int32.unpack_zero_points(m.source.read(m.qzeros.name, rows=1), m.width, m.n, interleaved=interleaved)
    if _all_middle(first, m.width):
        return True
    m.oddities.append("the config says that there are no zero points, but qzeros hold some: they are used")
    return False


def _all_middle(zero: Tensor, width: int) -> bool:
    return bool((zero == 1 << (width - 1)).all())


READER = AWQReader()
