"""The packed layout of the Hopper kernels: one for all M, read by `mma.sync` and `wgmma` alike.

A block is 16 rows x 64 columns of W. Within it, lane 4*g + q of k16 step w owns the 8 codes of rows g and g + 8 at columns 16*w +
8*h + 2*q + e (h, e in 0, 1): its fragment of operand A, which is the same for `mma.sync` m16n8k16 and `wgmma` m64nNk16 (PTX ISA,
"Matrix fragments for mma.m16n8k16" and "wgmma register fragments").

Packed int32 [N/16, K/64, planes, 4 k16 steps, 32 lanes], rows and columns zero-padded; 1 plane of 4-bit codes, 2 of 8-bit ones.
    4 bits: the code of (row r, half h, element e) is at bit 16*e + 4*(r + 2*h), where r = 0 is row g and r = 1 row g + 8.
    8 bits: plane h holds (r, e) at bit 16*e + 8*r.

wgmma takes columns in their order: lane 4*g + q reads int32 32*w + 4*g + q of every step, so that a warp reads 32 neighbouring
int32 without bank conflicts. mma.sync may permute K, as long as x is permuted alike: a lane reads the 16 bytes at int32 32*q +
4*g instead, which belong to the four lanes of step q. Its codes are then of the 16 neighbouring columns 16*q…, and its elements
of x are 32 neighbouring bytes of a row: no shuffle, no shared memory. Both read whole blocks of 512 bytes.

Float codes are stored with their bits where dequantization needs them (`spread_float_bits`). Scales and zero points lie in tables
[N/16, scale blocks, 8, 2] (`scale_table`).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_N, BLOCK_K = 16, 64
_CHUNK_BYTES = 1 << 26  # packed bytes made at a time


def padded_shape(n: int, k: int) -> tuple[int, int]:
    """(16-row tiles, columns padded to whole blocks)."""
    return -(-n // BLOCK_N), -(-k // BLOCK_K) * BLOCK_K


def pack_codes(codes: Tensor, bits: int, k: int, xor_mask: int) -> Tensor:
    """Packed rows uint8 [N, >= K * bits / 8] (`bitline.bitstream`) to packed int32 [N/16, K/64, planes, 128].

    bits: 4 or 8. xor_mask: XORed onto every code (8 and 128 turn two's complement into offset binary); padding holds it. Only
    bytes are moved, a chunk of rows at a time: scratch is at most about 4 x 64 MiB.
    """
    n = codes.shape[0]
    n16_tiles, columns = padded_shape(n, k)
    row_bytes = columns * bits // 8
    mask_byte = xor_mask | xor_mask << 4 if bits == 4 else xor_mask
    packed = torch.empty(n16_tiles, columns // BLOCK_K, bits // 4, 128, dtype=torch.int32, device=codes.device)
    step = max(1, _CHUNK_BYTES // (BLOCK_N * row_bytes))
    used_bytes = k * bits // 8
    for t in range(0, n16_tiles, step):
        chunk = codes[t * BLOCK_N : (t + step) * BLOCK_N, : (k * bits + 7) // 8]
        rows = min(step, n16_tiles - t) * BLOCK_N
        if chunk.shape != (rows, row_bytes):
            padded = torch.zeros(rows, row_bytes, dtype=torch.uint8, device=codes.device)
            padded[: chunk.shape[0], : chunk.shape[1]] = chunk
            if bits == 4 and k % 2:
                padded[:, used_bytes] &= 0x0F  # the bits after the last code are undefined
            chunk = padded
        if mask_byte:
            chunk = chunk ^ mask_byte
        packed[t : t + step] = _pack_4_bits(chunk) if bits == 4 else _pack_8_bits(chunk)
    return packed


def _pack_4_bits(rows: Tensor) -> Tensor:
    """uint8 [16*T, K/2] to int32 [T, K/64, 1, 128]."""
    tiles, blocks = rows.shape[0] // BLOCK_N, rows.shape[1] // 32
    row_g, row_g8 = rows.view(tiles, 2, 8, blocks, 4, 2, 4).unbind(1)  # tile, g, block, step, half, lane of the quad
    out = torch.empty(tiles, blocks, 4, 8, 4, 2, 2, dtype=torch.uint8, device=rows.device)
    order = (0, 2, 3, 1, 5, 4)  # tile, block, step, g, lane, half
    out[..., 0, :] = ((row_g & 15) | (row_g8 << 4)).permute(order)
    out[..., 1, :] = ((row_g >> 4) | (row_g8 & 0xF0)).permute(order)
    return out.view(tiles, blocks, 1, 512).view(torch.int32)


def _pack_8_bits(rows: Tensor) -> Tensor:
    """uint8 [16*T, K] to int32 [T, K/64, 2, 128]."""
    tiles, blocks = rows.shape[0] // BLOCK_N, rows.shape[1] // BLOCK_K
    codes = rows.view(tiles, 2, 8, blocks, 4, 2, 4, 2)  # tile, r, g, block, step, half, lane, element
    return codes.permute(0, 3, 5, 4, 2, 6, 7, 1).reshape(tiles, blocks, 2, 512).view(torch.int32)


# Bit positions, within 16, of the i-th code of a half-word: the sign, then the others from the highest. A bfloat16 has them at
# 15, 8, 7, 6 (E2M1) and at 15, 10 … 4 (E4M3), a float16 at 15, 11, 10, 9 (E2M1); a code whose bits are those, all shifted alike,
# is dequantized by one shift and one mask.
_E2M1_FP16 = ((15, 11, 10, 9), (12, 8, 7, 6), (14, 2, 1, 0), (13, 5, 4, 3))
_E2M1_BF16 = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
_E4M3_BF16 = ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))


def spread_float_bits(packed: Tensor, bits: int, fp16: bool = False) -> Tensor:
    """Packed int32 with the bits of each half-word at the positions above: a table look-up on bytes, in chunks; a new tensor.

    bits: 4 for E2M1, 8 for E4M3. fp16: for dequantization to float16 (E2M1 alone).
    """
    codes = _E4M3_BF16 if bits == 8 else _E2M1_FP16 if fp16 else _E2M1_BF16
    byte = torch.arange(256, dtype=torch.int32)
    tables = []
    for i_byte in range(2):  # the lower and the upper byte of a half-word
        half_word = byte << (8 * i_byte)
        moved = torch.zeros_like(byte)
        for c, positions in enumerate(codes):
            for i, position in enumerate(positions):
                moved |= ((half_word >> (bits * c + bits - 1 - i)) & 1) << position
        tables.append((moved & 0xFFFF).to(torch.uint16).view(torch.int16).to(packed.device))
    out = torch.empty_like(packed)
    source, target = packed.view(-1).view(torch.uint8).view(-1, 2), out.view(-1).view(torch.int16)
    for at in range(0, source.shape[0], 1 << 23):
        chunk = source[at : at + (1 << 23)]
        target[at : at + (1 << 23)] = tables[0].index_select(0, chunk[:, 0].int()) | tables[1].index_select(0, chunk[:, 1].int())
    return out


def byte_pairs(packed: Tensor) -> Tensor:
    """Packed int32 of 8-bit codes with the bytes of each row side by side: [e0 r0, e0 r1, e1 r0, e1 r1] to [e0 r0, e1 r0, …]."""
    pairs = packed.view(torch.uint8).view(*packed.shape, 2, 2).transpose(-1, -2)
    return pairs.reshape(*packed.shape[:-1], 4 * packed.shape[-1]).view(torch.int32)


def scale_table(values: Tensor, row: Tensor) -> Tensor:
    """Scales or zero points as lanes load them: rows g and g + 8 side by side.

    values: [row blocks, scale blocks]; row: int64 [N], the row block of each row of W. -> [N/16, scale blocks, 8, 2], padding
    zero. Two 16-bit entries make one int32.
    """
    n, scale_blocks = row.numel(), values.shape[1]
    n16_tiles = -(-n // BLOCK_N)
    raw = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    if not (values.shape[0] == n and n == n16_tiles * BLOCK_N and bool((row[1:] > row[:-1]).all())):
        raw = raw.index_select(0, row)
        raw = torch.nn.functional.pad(raw, (0, 0, 0, n16_tiles * BLOCK_N - n))
    return (
        raw.view(values.dtype if values.dtype.itemsize > 1 else torch.uint8)
        .view(n16_tiles, 2, 8, scale_blocks)
        .permute(0, 3, 2, 1)
        .contiguous()
    )
