"""GPTQ: qweight packed along K, as AutoGPTQ, GPTQModel and AutoRound write it, with v1 and v2 zero points.

v1 stores a zero point minus one, v2 stores it unchanged. Symmetric checkpoints have the implicit zero point 2**(bits - 1)
whatever their qzeros hold: some are labelled v1 and stored as v2.
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
from bitline.formats.base import LayerRecord, Range, TensorInfo, TensorSource, check_act_order_length
from bitline.formats.common import act_order, packed_int32
from bitline.formats.common.slices import COLUMNS, ROWS, Stored, int32_axis, uncut_columns
from bitline.formats.gptq_awq.config import SettingsByModule, auto_round_layout, quantizes_activations
from bitline.formats.gptq_awq.packed_module import PackedModule, modules_with_qweight
from bitline.formats.io.json_object import read_config
from bitline.formats.quant_config import find_quantization
from bitline.types import LinearSpec

CHECKPOINT_FORMATS = ("gptq", "gptq_v2", "gptq_p")


@dataclass(frozen=True)
class GPTQLayout:
    """label: of the layer records. zeros_minus_one: v1 zero points. planar_bits: bit widths stored as bit planes."""

    label: str
    zeros_minus_one: bool
    planar_bits: tuple[int, ...] = ()


class GPTQReader:
    """Layer records of GPTQ checkpoints, and of AutoRound's in the same layout."""

    name = "gptq"

    def matches(self, source: TensorSource) -> bool:
        """True for quant_method "gptq", and for AutoRound with a packing_format laid out like it."""
        config, _ = find_quantization(source)
        return config.get("quant_method") == "gptq" or (auto_round_layout(config) or "").startswith("gptq")

    def layers(self, source: TensorSource) -> Iterator[LayerRecord]:
        """Every module with a qweight. Of tensor data only g_idx and one row of symmetric qzeros are read."""
        config, file = find_quantization(source)
        _check_side_file(config, file)
        modules = list(modules_with_qweight(source))
        layout, settings = _layout(config, file), SettingsByModule(config, file, frozenset(modules))
        for module in modules:
            yield _record(PackedModule(source, module, settings.find(module), file), layout)


# ---- config --------------------------------------------------------------------------------------------------------------


def _layout(config: Mapping[str, Any], file: Path) -> GPTQLayout:
    """The layout that the config names; an unknown one is refused."""
    known = auto_round_layout(config)
    if known is not None:
        act_bits = config.get("act_bits")
        if quantizes_activations(act_bits):
            raise _unsupported(file, "act_bits", "AutoRound's GPTQ layout with quantized activations", f"act_bits {act_bits!r}")
        return GPTQLayout(f"auto-round {known}", known == "gptq v1")  # AutoRound's 5, 6 and 7 bits are a bit stream
    pack_dtype = config.get("pack_dtype")
    if pack_dtype is not None and str(pack_dtype).removeprefix("torch.") != "int32":
        raise _unsupported(file, "pack_dtype", "codes packed in another dtype", f"pack_dtype {pack_dtype!r}", "int32")
    label = _checkpoint_format(config, file)
    if label == "gptq_p":
        return GPTQLayout("gptq planar", False, (3, 5, 6, 7))
    return GPTQLayout("gptq v1" if label == "gptq" else "gptq v2", label == "gptq", (5, 6, 7))


def _checkpoint_format(config: Mapping[str, Any], file: Path) -> str:
    named = [str(config[key]).lower() for key in ("checkpoint_format", "format") if config.get(key) is not None]
    if len(set(named)) > 1:
        raise CheckpointError(
            "checkpoint_format and format contradict each other", file=file, field="checkpoint_format",
            found=" and ".join(named), expected="one of them",
        )  # fmt: skip
    label = named[0] if named else "gptq"
    if config.get("is_marlin_format") is True:
        label = "marlin"
    if label not in CHECKPOINT_FORMATS:
        expected = ", ".join(CHECKPOINT_FORMATS)
        raise _unsupported(file, "checkpoint_format", "this checkpoint_format of GPTQ", repr(label), expected)
    return label


def _check_side_file(config: Mapping[str, Any], file: Path) -> None:
    """quantize_config.json beside config.json must agree on what no tensor shows: v1 or v2 zero points, and symmetry."""
    side = file.with_name("quantize_config.json")
    if config.get("quant_method") != "gptq" or file == side or not side.is_file():
        return
    other = read_config(side)
    for key, alias, default in (("checkpoint_format", "format", "gptq"), ("sym", None, True)):
        values = []
        for source in (config, other):
            candidates = (source.get(key), source.get(alias) if alias else None)
            values.append(str(next((v for v in candidates if v is not None), default)).lower())
        if values[0] != values[1]:
            raise CheckpointError(
                f"{file.name} and {side.name} contradict each other", file=side, field=key, found=" and ".join(values),
                expected="the same in both", fix="remove the one that belongs to another checkpoint",
            )  # fmt: skip


def _unsupported(file: Path, field: str, what: str, found: str, expected: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{what} is not supported yet", file=file, field=field, found=found, expected=expected,
        fix="save the model in checkpoint_format gptq",
    )  # fmt: skip


# ---- one module ----------------------------------------------------------------------------------------------------------


def _record(m: PackedModule, layout: GPTQLayout) -> LayerRecord:
    k, block = _check_shapes(m)
    g_idx = m.find("g_idx")
    perm, group_index = (None, None) if g_idx is None else _read_order(m, g_idx, k, block)
    _warn_about_order(m, g_idx, perm)
    symmetric, planar = m.settings.symmetric, m.bits in layout.planar_bits
    if symmetric and m.qzeros is not None:
        _check_implicit_zeros(m, layout, planar)
    elif not symmetric:
        m.require("qzeros", (torch.int32,))
    spec = LinearSpec(
        m.n, k, types.unsigned(m.bits, symmetric=symmetric), block, scale_dtype=m.scales.dtype,
        zero="none" if symmetric else "int", act_order=perm is not None, ragged=group_index is not None, bias=m.bias,
    )  # fmt: skip

    def read_codes() -> dict[str, Tensor | None]:
        packed = m.read("qweight")
        if g_idx is not None:
            _check_padding(m, packed, k, planar)
        codes = _repack(packed, m.bits, k, perm, planar)
        zero = None if symmetric else _zero_points(m.read("qzeros"), m.bits, m.n, layout, planar)
        if symmetric and m.qzeros is not None and not m.settings.symmetry_stated:
            _refuse_unstated_zeros(m, m.qzeros, packed_int32.unpack_int32(m.read("qzeros"), m.bits, m.n, planar=planar))
        return {"codes": codes, "zero": zero, "perm": perm, "group_index": group_index}

    stored = m.layout(spec, (int32_axis(1, m.bits, planar=planar), ROWS), planar=planar)
    in_order = perm is None and group_index is None
    stored["g_idx"] = _group_numbers(m, block[1]) if in_order else [uncut_columns(spec)]

    def read_in_order(part: PackedModule, columns: int) -> dict[str, Tensor | None]:
        codes = _repack(part.read("qweight"), m.bits, columns, None, planar)
        zero = None if symmetric else _zero_points(part.read("qzeros"), m.bits, part.n, layout, planar)
        return {"codes": codes, "scale": part.read_scales(), "zero": zero, "perm": perm, "group_index": group_index}

    return m.packed_record(layout.label, spec, read_codes, stored, lambda part: _record(part, layout), read_in_order)


def _group_numbers(m: PackedModule, block_k: int) -> Stored:
    """g_idx of columns in order, whose numbers start from 0 in every part; negative ones count from the last group."""

    def change(g_idx: Tensor, _rows: Range, columns: Range) -> Tensor:
        return torch.where(g_idx < 0, g_idx + m.groups, g_idx) - columns[0] // block_k

    return Stored([COLUMNS], change)


def _check_shapes(m: PackedModule) -> tuple[int, tuple[int, int]]:
    """K and the scale block, with every tensor's shape checked against the others and the config."""
    packed_rows, n = m.codes.shape
    if n != m.n:
        raise m.error(
            m.codes, "qweight and scales do not fit: GPTQ packs along K",
            f"qweight {[packed_rows, n]}, scales {list(m.scales.shape)}",
            f"{m.n} columns in both (AWQ packs along N: quant_method may be wrong)",
        )  # fmt: skip
    m.check_qzeros()
    multiple = _rows_per_block(m.bits)
    if packed_rows % multiple:
        what = f"qweight's rows do not hold whole blocks of {m.bits}-bit codes"
        raise m.error(m.codes, what, packed_rows, f"a multiple of {multiple}")
    k = packed_rows * 32 // m.bits
    g_idx = m.source.tensors.get(f"{m.name}.g_idx")
    if g_idx is not None and len(g_idx.shape) == 1 and -(-g_idx.shape[0] * m.bits // (32 * multiple)) * multiple == packed_rows:
        k = g_idx.shape[0]  # the last int32, or block of them, is padded
    if g_idx is not None and (g_idx.shape != (k,) or g_idx.dtype not in (torch.int32, torch.int64)):
        raise m.error(
            g_idx, "g_idx does not fit qweight", f"{g_idx.dtype} {list(g_idx.shape)}",
            f"int32 [{k}]: {packed_rows} int32 of {m.bits}-bit codes, as bits = {m.bits} in {m.config_file.name} means",
        )  # fmt: skip
    return k, m.scale_block(k)


def _rows_per_block(bits: int) -> int:
    """int32 rows that hold whole codes: one where bits divides 32, else `bits` rows of 32 codes."""
    return bits if 32 % bits else 1


def _check_padding(m: PackedModule, packed: Tensor, k: int, planar: bool) -> None:
    """Codes past column K in the last block of int32 must be zero: others would be columns that g_idx does not cover."""
    block_rows = _rows_per_block(m.bits)
    before = (packed.shape[0] - block_rows) * 32 // m.bits
    count = block_rows * 32 // m.bits
    if k < before + count:
        last_block = packed[-block_rows:].t().clone(memory_format=torch.contiguous_format)  # one row is "contiguous" as a view
        codes = packed_int32.unpack_int32(last_block, m.bits, count, planar=planar)
        if bool(codes[:, k - before :].any()):
            g_idx = m.require("g_idx")
            raise m.error(g_idx, "g_idx does not fit qweight", f"{k} columns", f"{before + count}, which are not zeros")


def _repack(packed: Tensor, bits: int, k: int, perm: Tensor | None, planar: bool) -> Tensor:
    """qweight, int32 [packed K, N], to canonical rows, uint8 [N, ceil(K * bits / 8)], columns in act-order."""
    if perm is not None and not planar and k * bits == 32 * packed.shape[0]:
        codes = packed_int32.repack_gptq_permuted(packed, bits, perm)
    else:
        codes = packed_int32.repack_gptq_planar(packed, bits, k) if planar else packed_int32.repack_gptq(packed)
        codes = codes if perm is None else bitstream.take(codes, bits, k, perm.long())
    return codes[:, : bitstream.row_bytes(k, bits)]


def _zero_points(packed: Tensor, bits: int, n: int, layout: GPTQLayout, planar: bool) -> Tensor:
    """qzeros, int32 [G, n * bits / 32], to zero points uint8 [n, G]."""
    if not planar:
        return packed_int32.unpack_zero_points(packed, bits, n, minus_one=layout.zeros_minus_one)
    codes = packed_int32.unpack_int32(packed, bits, n, planar=True)
    return native.transposed((codes + layout.zeros_minus_one) & ((1 << bits) - 1))


def _read_order(m: PackedModule, g_idx: TensorInfo, k: int, block: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """(perm, group_index) of the canonical weight."""
    check_act_order_length(g_idx, k)
    try:
        return act_order.gptq_order(m.read("g_idx"), block[1], m.groups)
    except ValueError as error:
        raise m.error(g_idx, "g_idx names a group that does not exist", error, f"0..{m.groups - 1}") from error


# ---- zero points that are not used -----------------------------------------------------------------------------------------


def _check_implicit_zeros(m: PackedModule, layout: GPTQLayout, planar: bool) -> None:
    """A symmetric weight's qzeros are not used. Where the config does not say that it is symmetric they must hold the implicit
    zero point; else a first row that no producer would store is worth a warning.
    """
    assert m.qzeros is not None
    first = packed_int32.unpack_int32(m.source.read(m.qzeros.name, rows=1), m.bits, m.n, planar=planar)
    if not m.settings.symmetry_stated:
        _refuse_unstated_zeros(m, m.qzeros, first)
    m.leave_unused("qzeros")
    low, high, implicit = int(first.min()), int(first.max()), 1 << (m.bits - 1)
    if low == high == implicit - (not layout.zeros_minus_one):
        m.warn(
            f"qzeros, which are not used where sym is true, hold {low}: they are stored as "
            f"{'gptq_v2' if layout.zeros_minus_one else 'gptq (v1)'} stores them, but the checkpoint is labelled {layout.label}"
        )
    elif low != high or low not in (implicit, implicit - 1):
        found = low if low == high else f"{low} to {high}"
        m.warn(f"sym is true, so the zero point is {implicit}; qzeros, which are not used, hold {found}")


def _refuse_unstated_zeros(m: PackedModule, info: TensorInfo, stored: Tensor) -> None:
    """An error where zero points, as v1 or v2 stores them, are not the implicit one of a config without sym."""
    low, high, implicit = int(stored.min()), int(stored.max()), 1 << (m.bits - 1)
    if low == high and low in (implicit, implicit - 1):
        return
    raise m.error(
        info, "zero points that the config does not account for", f"{low} to {high}, and no sym in {m.config_file.name}",
        f"{implicit} or {implicit - 1} everywhere, as without sym the weight is symmetric",
        'add "sym": false to the quantization config if the weight is asymmetric, "sym": true if it is not',
    )  # fmt: skip


# ---- warnings ------------------------------------------------------------------------------------------------------------


def _warn_about_order(m: PackedModule, g_idx: TensorInfo | None, perm: Tensor | None) -> None:
    """Where g_idx and desc_act disagree, g_idx decides."""
    if perm is not None and not m.settings.act_order:
        m.warn("g_idx holds an act-order that the config does not mention")
    elif perm is None and m.settings.act_order and m.groups > 1:
        if g_idx is None:
            m.warn("the config says desc_act, but there is no g_idx: columns are in input order")
        else:
            m.warn("the config says desc_act, but g_idx has the columns in input order")


READER = GPTQReader()
