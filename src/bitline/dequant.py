"""Dequantization: packed codes to float32, and scales, zero points and offsets applied to them. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream
from bitline.types import LinearSpec, ScalarType

_FP8_DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}


def codes_to_float(codes: Tensor, scalar: ScalarType, k: int) -> Tensor:
    """Packed rows uint8 [N, >= ceil(K * bits / 8)] to the values of their codes, float32 [N, K] in memory of its own."""
    if scalar.name in _FP8_DTYPES:
        return _fp8_to_float(codes[:, :k].contiguous(), scalar)
    if scalar.bits == 4 and scalar.kind != "int":
        return _nibble_pairs_to_float(codes, scalar, k)
    raw = bitstream.unpack(codes, scalar.bits, k)
    if scalar.name == "int8":
        return raw.contiguous().view(torch.int8).float()
    if scalar.kind == "int":
        sign_bit = 1 << (scalar.bits - 1)
        # Two's complement with the sign bit flipped is the value plus 2**(bits - 1).
        values = (raw ^ sign_bit if scalar.signed else raw).float()
        bias = sign_bit if scalar.signed else scalar.bias
        return values.sub_(bias) if bias else values
    table = torch.tensor(scalar.values(), dtype=torch.float32, device=codes.device)
    return table.index_select(0, raw.reshape(-1).int()).view(raw.shape)


def _nibble_pairs_to_float(codes: Tensor, scalar: ScalarType, k: int) -> Tensor:
    """4-bit codes through a 256-entry table: a byte looks up the two float32 of its nibbles as one int64."""
    table = torch.tensor(scalar.values(), dtype=torch.float32, device=codes.device)
    pair_table = torch.stack((table.repeat(16), table.repeat_interleave(16)), 1).view(torch.int64).squeeze(1)
    pairs = pair_table.index_select(0, codes.reshape(-1).int())
    return pairs.view(torch.float32).view(codes.shape[0], 2 * codes.shape[1])[:, :k].contiguous()


def _fp8_to_float(raw: Tensor, scalar: ScalarType) -> Tensor:
    """FP8 bytes to float32. On a CPU torch casts one element at a time; shifting the bits into place is 15 times as fast."""
    fp8 = raw.view(_FP8_DTYPES[scalar.name])
    # Tensors with NaN or infinity take torch's cast. Those are the codes of the largest magnitudes; FNUZ's NaN is minus zero.
    first_special = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}.get(scalar.name, 0)
    if raw.device.type != "cpu" or not raw.numel() or int((raw & 0x7F).max()) >= first_special:
        return fp8.float()
    bits = raw.view(torch.int8).int()
    bits.bitwise_left_shift_(23 - scalar.mantissa).bitwise_and_((0x7F << (23 - scalar.mantissa)) - (1 << 31))
    return bits.view(torch.float32).mul_(2.0 ** (128 - (1 << (scalar.exponent - 1))))  # corrects the exponent bias


def apply_second_level(spec: LinearSpec, scale: Tensor, scale2: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """scale * scale2 on the scale grid, float32, for `rows` (int64) of the grid or all; offset * offset2 likewise.

    scale2 is NVFP4's global scale or GGUF's super-block scales, [1, 1] or on the grid of spec.scale2_block; None is 1.
    """
    if rows is not None:
        scale = index_select(scale, 0, rows)
    if scale2 is None:
        return scale.float()
    if rows is None:
        rows = torch.arange(scale.shape[0], device=scale.device)
    (bn, bk), (offset_n, offset_k) = spec.block, spec.block_offset
    scale2_bn, scale2_bk = spec.scale2_block or (1, 1)
    # A scale block's super-block is found through the first row and column of the block that this shard holds.
    index_n = (rows * bn - offset_n).clamp_(min=0) // scale2_bn
    index_k = (torch.arange(scale.shape[1], device=scale.device) * bk - offset_k).clamp_(min=0) // scale2_bk
    factor = scale2.index_select(0, index_n).index_select(1, index_k)
    dtype = torch.float64 if scale2.dtype == torch.float64 else torch.float32
    return (scale.to(dtype) * factor.to(dtype)).float()


def column_groups(spec: LinearSpec, group_index: Tensor | None, device: torch.device) -> Tensor:
    """int64 [K]: the scale column of each stored column."""
    if group_index is not None:
        return group_index.long()
    start = spec.block_offset[1]
    return torch.arange(start, start + spec.k, device=device) // spec.block[1]


def apply_scales(
    values: Tensor, spec: LinearSpec, scale: Tensor, zero: Tensor | None, offset: Tensor | None, group_index: Tensor | None
) -> Tensor:
    """(values - zero) * scale + offset, in place. values [R, K]; scale, zero and offset [R, G] of the same weight rows."""
    bk = spec.block[1]
    if not spec.ragged and spec.block_offset[1] == 0 and spec.k % bk == 0:
        grouped = values.view(values.shape[0], spec.k // bk, bk)
        expand = lambda t: t.unsqueeze(-1)  # broadcasts over a group: no tensor of one scale per weight
    else:
        grouped, columns = values, column_groups(spec, group_index, values.device)
        expand = lambda t: t.index_select(1, columns)
    if zero is not None:
        grouped.sub_(expand(zero))
    grouped.mul_(expand(scale))
    if offset is not None:
        grouped.add_(expand(offset))
    return values


def index_select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """torch.index_select that also takes FP8 tensors."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return tensor.view(torch.uint8).index_select(dim, index).view(tensor.dtype)
    return tensor.index_select(dim, index)
