"""compressed-tensors' integer formats: pack-quantized (int32), int-quantized (int8), and AutoRound's MXINT4."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import types
from bitline.formats.base import TensorInfo, check_act_order_length
from bitline.formats.common.int8_codes import pack_int8
from bitline.formats.common.scales import E8M0, FLOATS, grid_of
from bitline.formats.compressed_tensors.module import QuantizedModule, Reading, WeightFields
from bitline.formats.compressed_tensors.packing import Int32Packing, act_order_of, unpack_zero_points
from bitline.types import LinearSpec


def pack_quantized(m: QuantizedModule) -> Reading:
    """pack-quantized: int32 packed along K, groups possibly in act-order."""
    n, packed_columns = m.matrix("weight_packed", (torch.int32,))
    bits, symmetric = _integer_args(m)
    k = _read_k(m, n, packed_columns)
    packing = _infer_packing(m, bits, k)
    m.require("weight_scale", FLOATS)
    block = m.scale_block(n, k)
    zeros = _find_zeros(m, n, k, block, bits)
    perm, group_index = read_act_order(m, k, block)
    spec = m.spec(
        n, k, types.unsigned(bits, symmetric=symmetric), block,
        zero="none" if symmetric else "int", act_order=perm is not None, ragged=group_index is not None,
    )  # fmt: skip

    def read_fields() -> WeightFields:
        codes = packing.repack(m.read("weight_packed"), k, perm)
        zero = _read_zeros(m, zeros, spec, bits)
        return m.fields(spec, codes, zero=zero, perm=perm, group_index=group_index)

    return "pack-quantized", spec, read_fields


def read_in_order(whole: LinearSpec, part: QuantizedModule, columns: int) -> WeightFields:
    """The fields of some rows of a pack-quantized act-order weight, with codes of some columns, in input order.

    whole: the layer's spec. part: the module over these entries. columns: their number.
    """
    bits, _ = _integer_args(part)
    spec = whole.replace(n=part.codes.shape[0])
    packing = _infer_packing(part, bits, columns)
    zeros = _find_zeros(part, spec.n, spec.k, spec.block, bits)
    perm, group_index = read_act_order(part, spec.k, spec.block)
    codes = packing.repack(part.read("weight_packed"), columns, None)
    return part.fields(spec, codes, zero=_read_zeros(part, zeros, spec, bits), perm=perm, group_index=group_index)


def int_quantized(m: QuantizedModule) -> Reading:
    """int-quantized: one signed integer per int8. Fewer than 8 bits (W4A8, W4AFP8) are packed to the bits they need."""
    n, k = m.matrix("weight", (torch.int8,))
    bits, symmetric = _integer_args(m)
    m.require("weight_scale", FLOATS)
    block = m.scale_block(n, k)
    unchanged = bits == 8 and symmetric
    zeros = _find_zeros(m, n, k, block, bits)
    weight = types.int8 if unchanged else types.unsigned(bits, symmetric=symmetric)
    spec = m.spec(n, k, weight, block, zero="none" if symmetric else "int")

    def read_fields() -> WeightFields:
        values = m.read("weight")
        codes = values.view(torch.uint8) if unchanged else pack_int8(values, bits)
        if codes is None:
            half = 1 << (bits - 1)
            found = f"{int(values.min())}..{int(values.max())}"
            raise m.error(m.codes, f"values do not fit {bits} bits", found, f"{-half}..{half - 1}")
        return m.fields(spec, codes, zero=_read_zeros(m, zeros, spec, bits))

    return "int-quantized", spec, read_fields


def mx_int4(m: QuantizedModule) -> Reading:
    """AutoRound's MXINT4: sign and magnitude, -1.75 to 1.75 in steps of 1/4, low nibble first, under E8M0 scales.

    The codes become integers up to 7, and the scales a quarter of the stored ones, which bfloat16 represents exactly.
    """
    if not (m.scheme.infer_sizes and m.scheme.weights.scale_dtype == "torch.uint8"):
        what = "minifloats that the config calls integers"
        raise m.error(m.codes, what, m.scheme.weights.type, "float, or AutoRound's mx_int")
    n, columns = m.matrix("weight_packed", (torch.uint8,))
    if m.scheme.weights.num_bits != 4:
        raise m.error(m.codes, "codes do not fit their config", f"mx_int {m.scheme.weights.num_bits} bits", "4 bits")
    m.require("weight_scale", E8M0)
    spec = m.spec(n, 2 * columns, types.uint4b8, m.scale_block(n, 2 * columns), scale_dtype=torch.bfloat16)

    def read_fields() -> WeightFields:
        stored = m.read("weight_packed")
        negative = (stored & 0x88) >> 3  # 1 in each nibble with a minus sign
        magnitude = stored & 0x77
        codes = torch.where(negative & 1 == 1, 8 - (magnitude & 7), 8 + (magnitude & 7))
        codes |= torch.where(negative & 16 == 16, 8 - (magnitude >> 4), 8 + (magnitude >> 4)) << 4
        exponent = m.read("weight_scale").view(torch.uint8).int()
        one = torch.ones(exponent.shape, dtype=torch.float32)
        scale = torch.ldexp(one, exponent - 129).masked_fill(exponent == 255, torch.nan).bfloat16()
        return m.fields(spec, codes, scale)

    return "mxint4", spec, read_fields


# ---- checks --------------------------------------------------------------------------------------------------------------


def _integer_args(m: QuantizedModule) -> tuple[int, bool]:
    """(bits, symmetric) of the scheme, which must be of integers."""
    args = m.scheme.weights
    if args.is_float or not 1 <= args.num_bits <= 8:
        raise m.error(m.codes, "codes do not fit their config group", f"{args.type} {args.num_bits} bits", "int 1..8 bits")
    return args.num_bits, args.is_symmetric


def _read_k(m: QuantizedModule, n: int, packed_columns: int) -> int:
    """K of packed codes, from weight_shape, [N, K]."""
    info = m.require("weight_shape", (torch.int64, torch.int32))
    sizes = m.read("weight_shape").flatten().tolist() if len(info.shape) == 1 and info.nbytes <= 64 else []
    sizes = sizes[1:] if len(sizes) == 3 else sizes  # [E, N, K] of stacked experts
    if len(sizes) != 2 or sizes[0] != n or not 1 <= sizes[1] <= packed_columns * 32:
        expected = f"[{n}, K] for {n} x {packed_columns} int32"
        raise m.error(info, "weight_shape does not fit weight_packed", sizes, expected)
    return int(sizes[1])


def _infer_packing(m: QuantizedModule, bits: int, k: int) -> Int32Packing:
    columns = m.codes.shape[1]
    packing = Int32Packing.infer(columns, bits, k, m.schemes.packs_densely)
    if packing is None:
        dense, padded = Int32Packing.packed_size(bits, k, True), Int32Packing.packed_size(bits, k, False)
        expected = f"{dense} (dense) or {padded} (padded)"
        raise m.error(m.codes, f"columns do not fit {k} codes of {bits} bits", columns, expected)
    return packing


def read_act_order(m: QuantizedModule, k: int, block: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """(perm, group_index) of weight_g_idx."""
    info = m.find("weight_g_idx")
    if info is None:
        if m.scheme.weights.has_group_act_order:
            m.warn("the config says that columns are in act-order, but there is no weight_g_idx")
        return None, None
    m.require("weight_g_idx", (torch.int32, torch.int64))
    check_act_order_length(info, k)
    if info.shape != (k,):
        raise m.error(info, "an act-order index does not fit its weight", list(info.shape), [k])
    groups = -(-k // block[1])
    try:
        perm, group_index = act_order_of(m.read("weight_g_idx"), block[1], groups)
    except ValueError as error:
        raise m.error(info, "not an act-order index", error, f"group numbers 0..{groups - 1}, or all -1") from None
    announced = m.scheme.weights.has_group_act_order or m.scheme.infer_sizes
    if (perm is not None or group_index is not None) and not announced:
        m.warn("weight_g_idx holds an act-order that the config does not mention")
    return perm, group_index


def _find_zeros(m: QuantizedModule, n: int, k: int, block: tuple[int, int], bits: int) -> TensorInfo | None:
    """The header of zero points: packed along N in int32 or, in older files and per tensor, one int8 each. None where the config
    says that the weight is symmetric, or where it does not say and there are none.
    """
    if m.scheme.weights.symmetric is True or (m.scheme.weights.is_symmetric and m.find("weight_zero_point") is None):
        m.leave_unused("weight_zero_point")
        return None
    info = m.require("weight_zero_point", (torch.int32, torch.int8))
    grid = grid_of(n, k, block)
    if info.dtype == torch.int8:
        allowed = {grid, (n,)} if grid == (n, 1) else ({grid, (1,), ()} if grid == (1, 1) else {grid})
    else:
        allowed = {(Int32Packing.packed_size(bits, grid[0], dense), grid[1]) for dense in (True, False)}
    if info.shape not in allowed:
        found = f"{info.dtype} {list(info.shape)}"
        raise m.error(info, "zero points do not fit the scales", found, " or ".join(map(str, allowed)))
    return info


def _read_zeros(m: QuantizedModule, info: TensorInfo | None, spec: LinearSpec, bits: int) -> Tensor | None:
    """Zero points in code units, uint8 on the scale grid; None for a symmetric weight, whose zero points must be implicit."""
    if info is None:
        return None
    zero = unpack_zero_points(m.read("weight_zero_point"), spec.grid, bits, m.schemes.packs_densely)
    if zero is None:
        half = 1 << (bits - 1)
        raise m.error(info, "zero points are out of range", f"not {bits}-bit integers", f"{-half}..{half - 1}")
    if not m.scheme.weights.is_symmetric:
        return zero
    if bool((zero != 1 << (bits - 1)).any()):
        raise m.unstated_zeros(info)
    return None
