"""Canonical codes in the words and blocks of checkpoint formats: the inverse of what the readers do.

Words are int32 with the bits of an unsigned word, the first code in the lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream
from bitline.formats.common.packed_int32 import AWQ_ORDER, BIT_PLANES


def clean_rows(codes: Tensor, width: int, k: int) -> Tensor:
    """Rows uint8 [N, ceil(k*width/8)] whose bits past k*width are zero, contiguous."""
    used = k * width % 8
    if not used:
        return codes.contiguous()
    codes = codes.clone(memory_format=torch.contiguous_format)
    codes[:, -1] &= (1 << used) - 1
    return codes


def row_words(codes: Tensor, width: int, k: int) -> Tensor:
    """Canonical rows as whole words, int32 [N, ceil(k*width/32)]: compressed-tensors' dense packing."""
    return _words(clean_rows(codes, width, k))


def _words(rows: Tensor) -> Tensor:
    """Rows of bytes uint8 [R, B] as int32 [R, ceil(B/4)], filled up with zeros."""
    whole = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
    return whole.reshape(-1).view(torch.int32).view(rows.shape[0], -1)  # flat, since one row may have any stride


def column_words(codes: Tensor, width: int, k: int) -> Tensor:
    """Canonical rows as words along K, int32 [k*width/32, N]: GPTQ's qweight. k*width is a multiple of 32."""
    return row_words(codes, width, k).t().contiguous()


def planar_words(codes: Tensor, width: int, k: int) -> Tensor:
    """Canonical rows as planar words along K, int32 [k*width/32, N]: GPTQModel's gptq_p. k is a multiple of 32."""
    out = torch.empty(k * width // 32, codes.shape[0], dtype=torch.int32)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, codes.shape[0], step):
        out[:, r : r + step] = _planes(bitstream.unpack(codes[r : r + step], width, k), width).t()
    return out


def _planes(fields: Tensor, width: int) -> Tensor:
    """One code per byte, uint8 [R, C], C a multiple of 32, to planar words int32 [R, C*width/32]."""
    blocks = fields.reshape(-1, 32)
    planes = [bitstream.pack(blocks >> shift, plane) for plane, shift in BIT_PLANES[width]]
    return torch.cat(planes, 1).view(torch.int32).view(fields.shape[0], -1)


def field_words(fields: Tensor, width: int, *, planar: bool = False) -> Tensor:
    """One code per byte, uint8 [R, C], to words int32 [R, ceil(C*width/32)]; planar: C is a multiple of 32."""
    if planar:
        return _planes(fields, width)
    return _words(bitstream.pack(fields, width))


def awq_fields(fields: Tensor) -> Tensor:
    """Columns in the order of AWQ's 4-bit fields, uint8 [R, C], C a multiple of 8."""
    order = torch.tensor(AWQ_ORDER)
    return fields.reshape(fields.shape[0], -1, 8).index_select(2, order).view(fields.shape[0], -1)


def awq_words(codes: Tensor, k: int) -> Tensor:
    """Canonical 4-bit rows as AWQ's words along N, int32 [k, N/8]. N is a multiple of 8."""
    n = codes.shape[0]
    out = torch.empty(k, n // 8, dtype=torch.int32)
    step = max(8, bitstream.rows_per_chunk(k) // 8 * 8)
    for r in range(0, n, step):
        columns = bitstream.unpack(codes[r : r + step], 4, k).t().contiguous()
        out[:, r // 8 : (r + step) // 8] = field_words(awq_fields(columns), 4)
    return out


def row_pairs(codes: Tensor, k: int) -> Tensor:
    """Canonical `uint4b8` rows as ModelOpt's bytes, uint8 [N/2, k]: row 2i low, 2i + 1 high, two's complement."""
    out = torch.empty(codes.shape[0] // 2, k, dtype=torch.uint8)
    step = max(2, bitstream.rows_per_chunk(k) // 2 * 2)
    for r in range(0, codes.shape[0], step):
        rows = bitstream.unpack(codes[r : r + step], 4, k)
        out[r // 2 : (r + step) // 2] = (rows[0::2] | (rows[1::2] << 4)) ^ 0x88
    return out


def unordered(codes: Tensor, width: int, k: int, perm: Tensor) -> Tensor:
    """Rows whose column j belongs at input column perm[j], with their columns in the order of the input."""
    return bitstream.take(codes, width, k, perm.long().argsort())


def signed_bytes(codes: Tensor, width: int, k: int) -> Tensor:
    """Canonical unsigned rows as one byte a code, less the middle, uint8 [N, k] in two's complement."""
    out = torch.empty(codes.shape[0], k, dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, codes.shape[0], step):
        out[r : r + step] = bitstream.unpack(codes[r : r + step], width, k) - (1 << (width - 1))  # modulo 256
    return out


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of any dtypes hold the same numbers; NaN is NaN, and the sign of a zero counts."""
    if one.dtype == other.dtype:
        return one.shape == other.shape and raw_bytes(one) == raw_bytes(other)
    one, other = one.double(), other.double()
    equal = one.contiguous().view(torch.int64) == other.contiguous().view(torch.int64) if one.shape == other.shape else None
    return equal is not None and bool((equal | (one.isnan() & other.isnan())).all())


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
