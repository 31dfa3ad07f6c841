"""Canonical codes in the packed layouts of checkpoint formats: the inverse of the readers' repacking.

A packed int32 holds unsigned codes, the first one in the lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream
from bitline.formats.common.packed_int32 import AWQ_ORDER, BIT_PLANES


def clear_padding(codes: Tensor, bits: int, k: int) -> Tensor:
    """Canonical rows uint8 [N, ceil(k*bits/8)], contiguous, with the bits past k*bits set to zero."""
    used = k * bits % 8
    if not used:
        return codes.contiguous()
    codes = codes.clone(memory_format=torch.contiguous_format)
    codes[:, -1] &= (1 << used) - 1
    return codes


def pack_rows(codes: Tensor, bits: int, k: int) -> Tensor:
    """Canonical rows as int32 [N, ceil(k*bits/32)]: compressed-tensors' dense packing."""
    return _as_int32(clear_padding(codes, bits, k))


def _as_int32(rows: Tensor) -> Tensor:
    """Rows of bytes uint8 [R, B] as int32 [R, ceil(B/4)], zero-padded."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
    return padded.reshape(-1).view(torch.int32).view(rows.shape[0], -1)  # flat, since a single row may have any stride


def pack_gptq(codes: Tensor, bits: int, k: int) -> Tensor:
    """Canonical rows packed along K, int32 [k*bits/32, N]: GPTQ's qweight. k*bits is a multiple of 32."""
    return pack_rows(codes, bits, k).t().contiguous()


def pack_gptq_planar(codes: Tensor, bits: int, k: int) -> Tensor:
    """Canonical rows as bit planes along K, int32 [k*bits/32, N]: GPTQModel's gptq_p. k is a multiple of 32."""
    out = torch.empty(k * bits // 32, codes.shape[0], dtype=torch.int32)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, codes.shape[0], step):
        out[:, r : r + step] = _bit_planes(bitstream.unpack(codes[r : r + step], bits, k), bits).t()
    return out


def _bit_planes(values: Tensor, bits: int) -> Tensor:
    """One code per byte, uint8 [R, C] with C a multiple of 32, to bit planes int32 [R, C*bits/32]."""
    blocks = values.reshape(-1, 32)
    planes = [bitstream.pack(blocks >> shift, plane_bits) for plane_bits, shift in BIT_PLANES[bits]]
    return torch.cat(planes, 1).view(torch.int32).view(values.shape[0], -1)


def pack_int32(values: Tensor, bits: int, *, planar: bool = False) -> Tensor:
    """One code per byte, uint8 [R, C], to int32 [R, ceil(C*bits/32)]; planar: as bit planes, C a multiple of 32."""
    if planar:
        return _bit_planes(values, bits)
    return _as_int32(bitstream.pack(values, bits))


def awq_interleave(values: Tensor) -> Tensor:
    """Columns in the order of AWQ's 4-bit fields, uint8 [R, C], C a multiple of 8."""
    order = torch.tensor(AWQ_ORDER)
    return values.reshape(values.shape[0], -1, 8).index_select(2, order).view(values.shape[0], -1)


def pack_awq(codes: Tensor, k: int) -> Tensor:
    """Canonical 4-bit rows packed along N, int32 [k, N/8]: AWQ's gemm qweight. N is a multiple of 8."""
    n = codes.shape[0]
    out = torch.empty(k, n // 8, dtype=torch.int32)
    step = max(8, bitstream.rows_per_chunk(k) // 8 * 8)
    for r in range(0, n, step):
        columns = bitstream.unpack(codes[r : r + step], 4, k).t().contiguous()
        out[:, r // 8 : (r + step) // 8] = pack_int32(awq_interleave(columns), 4)
    return out


def pack_modelopt_int4(codes: Tensor, k: int) -> Tensor:
    """Canonical `uint4b8` rows as ModelOpt's bytes, uint8 [N/2, k]: row 2i low, row 2i + 1 high, two's complement."""
    out = torch.empty(codes.shape[0] // 2, k, dtype=torch.uint8)
    step = max(2, bitstream.rows_per_chunk(k) // 2 * 2)
    for r in range(0, codes.shape[0], step):
        rows = bitstream.unpack(codes[r : r + step], 4, k)
        out[r // 2 : (r + step) // 2] = (rows[0::2] | (rows[1::2] << 4)) ^ 0x88
    return out


def undo_act_order(codes: Tensor, bits: int, k: int, perm: Tensor) -> Tensor:
    """Rows whose column j belongs to input column perm[j], with their columns in the order of the input."""
    return bitstream.take(codes, bits, k, perm.long().argsort())


def signed_bytes(codes: Tensor, bits: int, k: int) -> Tensor:
    """Canonical unsigned rows as one byte per code less 2^(bits-1), uint8 [N, k] in two's complement."""
    out = torch.empty(codes.shape[0], k, dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, codes.shape[0], step):
        out[r : r + step] = bitstream.unpack(codes[r : r + step], bits, k) - (1 << (bits - 1))  # modulo 256
    return out
