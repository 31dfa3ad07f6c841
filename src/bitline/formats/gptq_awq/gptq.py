"""GPTQ: qweight packed along K, as AutoGPTQ, GPTQModel and AutoRound write it, with v1 and v2 zero points.

v1 stores a zero point minus one, v2 stores it as it is. Symmetric checkpoints have the middle zero whatever is stored:
some are labelled v1 and stored as v2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline import bitstream, native, types
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord, TensorInfo, TensorSource, check_act_order_length
from bitline.formats.common import act_order, packed_int32
from bitline.formats.gptq_awq.config import ModuleSettings, packing, quantizes_inputs
from bitline.formats.gptq_awq.packed_module import IntModule, modules
from bitline.formats.io.json_object import read_config
from bitline.formats.quant_config import find_quantization
from bitline.types import LinearSpec

FORMATS = ("gptq", "gptq_v2", "gptq_p")


@dataclass(frozen=True)
class Layout:
    """label: for people. minus_one: zero points are stored minus one. planar: widths whose words are bit planes."""

    label: str
    minus_one: bool
    planar: tuple[int, ...] = ()


class GPTQReader:
    """Layer records of GPTQ checkpoints, and of AutoRound's own in the same layout."""

    name = "gptq"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "gptq", and "auto-round" with a packing_format that is laid out like it."""
        config, _ = find_quantization(source)
        return config.get("quant_method") == "gptq" or (packing(config) or "").startswith("gptq")

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a qweight. Of tensor data only g_idx and one row of symmetric qzeros are read."""
        config, file = find_quantization(source)
        _check_side_file(config, file)
        names = list(modules(source))
        layout, settings = _layout(config, file), ModuleSettings(config, file, frozenset(names))
        for base in names:
            yield _record(IntModule(source, base, settings.of(base), file), layout)


def _layout(config: Mapping[str, Any], file: Path) -> Layout:
    """The layout that the config names; what is not laid out in one of the known ways is refused."""
    known = packing(config)
    if known is not None:
        act_bits = config.get("act_bits")
        if quantizes_inputs(act_bits):
            raise _refused(file, "act_bits", "AutoRound's GPTQ layout with quantized activations", f"act_bits {act_bits!r}")
        return Layout(f"auto-round {known}", known == "gptq v1")  # AutoRound's 5, 6 and 7 bits are a bit stream
    words = config.get("pack_dtype")
    if words is not None and str(words).removeprefix("torch.") != "int32":
        raise _refused(file, "pack_dtype", "words of this size", f"pack_dtype {words!r}", "int32")
    named = [str(config[key]).lower() for key in ("checkpoint_format", "format") if config.get(key) is not None]
    if len(set(named)) > 1:
        raise CheckpointError(
            "checkpoint_format and format contradict each other", file=file, field="checkpoint_format",
            found=" and ".join(named), expected="one of them",
        )  # fmt: skip
    label = named[0] if named else "gptq"
    if config.get("is_marlin_format") is True:
        label = "marlin"
    if label not in FORMATS:
        raise _refused(file, "checkpoint_format", "this checkpoint_format of GPTQ", repr(label), ", ".join(FORMATS))
    if label == "gptq_p":
        return Layout("gptq planar", False, (3, 5, 6, 7))
    return Layout("gptq v1" if label == "gptq" else "gptq v2", label == "gptq", (5, 6, 7))


def _check_side_file(config: Mapping[str, Any], file: Path) -> None:
    """quantize_config.json beside config.json says the same of what no tensor tells: how zero points are stored, or whether."""
    side = file.with_name("quantize_config.json")
    if config.get("quant_method") != "gptq" or file == side or not side.is_file():
        return
    other = read_config(side)
    for key, usual in (("checkpoint_format", "gptq"), ("sym", True)):
        one, two = ((c.get(key), c.get("format") if key == "checkpoint_format" else None) for c in (config, other))
        values = [str(next((v for v in both if v is not None), usual)).lower() for both in (one, two)]
        if values[0] != values[1]:
            raise CheckpointError(
                f"{file.name} and {side.name} contradict each other", file=side, field=key, found=" and ".join(values),
                expected="the same in both", fix="remove the one that belongs to another checkpoint",
            )  # fmt: skip


def _refused(file: Path, field: str, what: str, found: str, expected: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{what} is not supported yet", file=file, field=field, found=found, expected=expected,
        fix="save the model in checkpoint_format gptq",
    )  # fmt: skip


def _record(m: IntModule, layout: Layout) -> LayerRecord:
    k, block = _shape(m)
    g_idx = m.find("g_idx")
    perm = groups = None
    if g_idx is not None:
        perm, groups = _order(m, g_idx, k, block[1])
        if perm is not None and not m.settings.act_order:
            m.oddities.append("g_idx holds an activation order that the config does not mention")
        elif perm is None and m.settings.act_order and m.groups > 1:
            m.oddities.append("the config says desc_act, but g_idx has the columns in order")
    elif m.settings.act_order and m.groups > 1:
        m.oddities.append("the config says desc_act, but there is no g_idx: columns are taken in order")
    symmetric, planar = m.settings.symmetric, m.width in layout.planar
    if symmetric:
        _note_zeros(m, layout, planar)
    elif m.qzeros is None:
        m.need("qzeros", (torch.int32,))
    spec = LinearSpec(
        m.n, k, types.unsigned(m.width, symmetric=symmetric), block, scale_dtype=m.scales.dtype,
        zero="none" if symmetric else "int", act_order=perm is not None, ragged=groups is not None, bias=m.has_bias,
    )  # fmt: skip

    def read() -> dict[str, Tensor | None]:
        words = m.read("qweight")
        if g_idx is not None:
            _check_padding(m, words, k, planar)
        if perm is not None and not planar and k * m.width == 32 * words.shape[0]:
            codes = packed_int32.repack_gptq_permuted(words, m.width, perm)
        else:
            codes = packed_int32.repack_gptq_planar(words, m.width, k) if planar else packed_int32.repack_gptq(words)
            codes = codes if perm is None else bitstream.take(codes, m.width, k, perm.long())
        codes = codes[:, : bitstream.row_bytes(k, m.width)]
        zero = None if symmetric else _zeros(m.read("qzeros"), m.width, m.n, layout, planar)
        return {"codes": codes, "zero": zero, "perm": perm, "group_index": groups}

    return m.done(layout.label, spec, read)


def _shape(m: IntModule) -> tuple[int, tuple[int, int]]:
    """K and the block of one scale, with every tensor's shape held against the others and against the config."""
    rows, n = m.main.shape
    if n != m.n:
        raise m.error(
            m.main, "qweight and scales do not fit: GPTQ packs along K", f"qweight {[rows, n]}, scales {list(m.scales.shape)}",
            f"{m.n} columns in both (AWQ packs along N: quant_method may be wrong)",
        )  # fmt: skip
    m.check_zeros()
    whole = m.width if 32 % m.width else 1  # 32 codes of 3 bits are 3 words
    if rows % whole:
        raise m.error(m.main, f"qweight's rows do not hold whole blocks of {m.width}-bit codes", rows, f"a multiple of {whole}")
    k = rows * 32 // m.width
    index = m.source.tensors.get(f"{m.base}.g_idx")
    if index is not None and len(index.shape) == 1 and -(-index.shape[0] * m.width // (32 * whole)) * whole == rows:
        k = index.shape[0]  # the last word, or block of words, is padded
    if index is not None and (index.shape != (k,) or index.dtype not in (torch.int32, torch.int64)):
        raise m.error(
            index, "g_idx does not fit qweight", f"{index.dtype} {list(index.shape)}",
            f"int32 [{k}]: {rows} words of {m.width}-bit codes, as bits = {m.width} in {m.config_file.name} means",
        )  # fmt: skip
    return k, m.block(k)


def _check_padding(m: IntModule, words: Tensor, k: int, planar: bool) -> None:
    """Codes past the last column, of words that K does not fill, are zeros: others would be columns that g_idx lacks."""
    whole = m.width if 32 % m.width else 1
    before = (words.shape[0] - whole) * 32 // m.width
    count = whole * 32 // m.width
    if k < before + count:
        rows = words[-whole:].t().clone(memory_format=torch.contiguous_format)  # a view of one row counts as contiguous
        last = packed_int32.unpack_int32(rows, m.width, count, planar=planar)
        if bool(last[:, k - before :].any()):
            info = m.need("g_idx")
            raise m.error(info, "g_idx does not fit qweight", f"{k} columns", f"{before + count}, which are not zeros")


def _order(m: IntModule, info: TensorInfo, k: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    check_act_order_length(info, k)
    try:
        return act_order.gptq_order(m.read("g_idx"), size, m.groups)
    except ValueError as error:
        raise m.error(info, "g_idx names a group that does not exist", error, f"0..{m.groups - 1}") from error


def _note_zeros(m: IntModule, layout: Layout, planar: bool) -> None:
    """A symmetric weight's qzeros are not used. Where their first row is not what anyone stores, the user should know."""
    if m.qzeros is None:
        return
    row = packed_int32.unpack_int32(m.source.read(m.qzeros.name, rows=1), m.width, m.n, planar=planar)
    low, high, middle = int(row.min()), int(row.max()), 1 << (m.width - 1)
    if low == high == middle - (not layout.minus_one):
        m.oddities.append(
            f"qzeros, which are not used where sym is true, hold {low}: they are stored as "
            f"{'gptq_v2' if layout.minus_one else 'gptq (v1)'} stores them, and labelled {layout.label}"
        )
    elif low != high or low not in (middle, middle - 1):
        found = low if low == high else f"{low} to {high}"
        m.oddities.append(f"sym is true, so the zero point is {middle}; qzeros, which are not used, hold {found}")


def _zeros(words: Tensor, width: int, n: int, layout: Layout, planar: bool) -> Tensor:
    """qzeros int32 [G, n*width/32] to zero points uint8 [n, G]."""
    if not planar:
        return packed_int32.unpack_zero_points(words, width, n, minus_one=layout.minus_one)
    fields = packed_int32.unpack_int32(words, width, n, planar=True)
    return native.transposed((fields + layout.minus_one) & ((1 << width) - 1))


READER = GPTQReader()
