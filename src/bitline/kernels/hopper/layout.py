"""The one packed layout of the Hopper kernels, for every number of rows of x.

A block is 16 rows x 64 columns of the weight. Within it, lane 4*g + q of step w (16 columns) owns the 8 codes of rows
g and g + 8 at columns 16*w + 8*h + 2*q + e (h, e in 0, 1): its own fragment of operand A, the same for `mma.sync`
m16n8k16 and for `wgmma` m64nNk16 (PTX ISA, "Matrix fragments for mma.m16n8k16" and "wgmma register fragments").

words: int32 [N/16, K/64, planes, 4 steps, 32 lanes], rows and columns zero-padded; 1 plane of 4-bit codes, 2 of 8-bit ones.
    4 bits: the code of (row r, half h, element e) is at bit 16*e + 4*(r + 2*h), where r = 0 for row g and 1 for row g + 8.
    8 bits: plane h holds (r, e) at bit 16*e + 8*r.

wgmma takes columns in their order, so there lane 4*g + q reads word 32*w + 4*g + q of every step: 32 neighbouring words
for a warp, without bank conflicts. mma.sync is free to name columns: the lane reads the 16 bytes at word 32*q + 4*g instead,
which are the words of all four lanes of step q. Its codes are then of 16 neighbouring columns 16*q…, and its part of x is
32 neighbouring bytes of row-major memory: no shuffle, no shared memory. Both read whole blocks of 512 bytes.

Floats of few bits are stored with their bits where the decoder wants them (`spread`).

scale: one entry for each row and group, in tables [N/16, groups, …] (see `pair_table`).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 16, 64  # of a block
_CHUNK_BYTES = 1 << 26  # packed bytes made at a time


def padded(n: int, k: int) -> tuple[int, int]:
    """Row tiles of 16, and columns padded to whole blocks."""
    return -(-n // ROWS), -(-k // COLUMNS) * COLUMNS


def pack_words(codes: Tensor, width: int, k: int, flip: int) -> Tensor:
    """Packed rows uint8 [N, >= K*width/8] (`bitline.bitstream`) to words int32 [N/16, K/64, planes, 128].

    width: 4 or 8. flip: what every code is xor-ed with (8 and 128 turn two's complement into offset binary). Padding
    holds the code `flip`. Only bytes are moved, a run of rows at a time: scratch is at most about 4 x 64 MiB.
    """
    n = codes.shape[0]
    tiles, columns = padded(n, k)
    row = columns * width // 8
    fill = flip | flip << 4 if width == 4 else flip
    words = torch.empty(tiles, columns // COLUMNS, width // 4, 128, dtype=torch.int32, device=codes.device)
    step = max(1, _CHUNK_BYTES // (ROWS * row))
    used = k * width // 8
    for t in range(0, tiles, step):
        part = codes[t * ROWS : (t + step) * ROWS, : (k * width + 7) // 8]
        rows = min(step, tiles - t) * ROWS
        if part.shape != (rows, row):
            whole = torch.zeros(rows, row, dtype=torch.uint8, device=codes.device)
            whole[: part.shape[0], : part.shape[1]] = part
            if width == 4 and k % 2:
                whole[:, used] &= 0x0F  # the bits after the last code are nobody's
            part = whole
        if fill:
            part = part ^ fill
        words[t : t + step] = _words4(part) if width == 4 else _words8(part)
    return words


def _words4(rows: Tensor) -> Tensor:
    """uint8 [16*T, K/2] to int32 [T, K/64, 1, 128]."""
    tiles, blocks = rows.shape[0] // ROWS, rows.shape[1] // 32
    low, high = rows.view(tiles, 2, 8, blocks, 4, 2, 4).unbind(1)  # tile, g, block, step, half, lane of the quad
    out = torch.empty(tiles, blocks, 4, 8, 4, 2, 2, dtype=torch.uint8, device=rows.device)
    order = (0, 2, 3, 1, 5, 4)  # tile, block, step, g, lane, half
    out[..., 0, :] = ((low & 15) | (high << 4)).permute(order)
    out[..., 1, :] = ((low >> 4) | (high & 0xF0)).permute(order)
    return out.view(tiles, blocks, 1, 512).view(torch.int32)


def _words8(rows: Tensor) -> Tensor:
    """uint8 [16*T, K] to int32 [T, K/64, 2, 128]."""
    tiles, blocks = rows.shape[0] // ROWS, rows.shape[1] // COLUMNS
    fields = rows.view(tiles, 2, 8, blocks, 4, 2, 4, 2)  # tile, r, g, block, step, half, lane, element
    return fields.permute(0, 3, 5, 4, 2, 6, 7, 1).reshape(tiles, blocks, 2, 512).view(torch.int32)


# Where the bits of field f go within 16: the sign, then the others from the highest. A bfloat16 has them at 15, 8, 7, 6
# (E2M1) and at 15, 10 … 4 (E4M3), a float16 at 15, 11, 10, 9 (E2M1); a field whose bits are those, shifted alike, takes one
# shift and one mask.
_E2M1_HALF = ((15, 11, 10, 9), (12, 8, 7, 6), (14, 2, 1, 0), (13, 5, 4, 3))
_E2M1 = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
_E4M3 = ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))


def spread(words: Tensor, width: int, half: bool = False) -> Tensor:
    """Words with each 16 bits re-ordered as the tables above say, a table look-up on bytes; a new tensor, in runs.

    width: 4 for E2M1, 8 for E4M3. half: to be decoded as float16 (E2M1 alone).
    """
    fields = _E4M3 if width == 8 else _E2M1_HALF if half else _E2M1
    byte = torch.arange(256, dtype=torch.int32)
    tables = []
    for part in range(2):  # the lower and the upper byte of a half-word
        word = byte << (8 * part)
        moved = torch.zeros_like(byte)
        for f, places in enumerate(fields):
            for i, place in enumerate(places):
                moved |= ((word >> (width * f + width - 1 - i)) & 1) << place
        tables.append((moved & 0xFFFF).to(torch.uint16).view(torch.int16).to(words.device))
    out = torch.empty_like(words)
    flat, into = words.view(-1).view(torch.uint8).view(-1, 2), out.view(-1).view(torch.int16)
    for at in range(0, flat.shape[0], 1 << 23):
        run = flat[at : at + (1 << 23)]
        into[at : at + (1 << 23)] = tables[0].index_select(0, run[:, 0].int()) | tables[1].index_select(0, run[:, 1].int())
    return out


def byte_pairs(words: Tensor) -> Tensor:
    """Words of 8-bit codes with the bytes of each row side by side: [e0 r0, e0 r1, e1 r0, e1 r1] to [e0 r0, e1 r0, …]."""
    pairs = words.view(torch.uint8).view(*words.shape, 2, 2).transpose(-1, -2)
    return pairs.reshape(*words.shape[:-1], 4 * words.shape[-1]).view(torch.int32)


def pair_table(values: Tensor, row: Tensor) -> Tensor:
    """One number for each row and group to what a lane loads: rows g and g + 8 side by side.

    values: [row blocks, groups]; row: int64 [N], the row block of each row. -> [N/16, groups, 8, 2], padding zero. Of
    16-bit numbers two make one 32-bit word.
    """
    n, groups = row.numel(), values.shape[1]
    tiles = -(-n // ROWS)
    raw = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    if not (values.shape[0] == n and n == tiles * ROWS and bool((row[1:] > row[:-1]).all())):
        raw = raw.index_select(0, row)
        raw = torch.nn.functional.pad(raw, (0, 0, 0, tiles * ROWS - n))
    return (
        raw.view(values.dtype if values.dtype.itemsize > 1 else torch.uint8)
        .view(tiles, 2, 8, groups)
        .permute(0, 3, 2, 1)
        .contiguous()
    )


# ---- emulated walks: what each reader sees, on a CPU ------------------------------------------------------------------


def fragments(words: Tensor, width: int) -> Tensor:
    """Codes as lanes own them: uint8 [tiles, blocks, 4 steps, 8 g, 4 q, 2 r, 2 h, 2 e]."""
    tiles, blocks = words.shape[:2]
    if width == 4:
        raw = words.view(torch.uint8).view(tiles, blocks, 4, 8, 4, 2, 2)  # e, h
        pair = torch.stack((raw & 15, raw >> 4), -1)  # e, h, r
        return pair.permute(0, 1, 2, 3, 4, 7, 6, 5)
    raw = words.view(torch.uint8).view(tiles, blocks, 2, 4, 8, 4, 2, 2)  # e, r
    return raw.permute(0, 1, 3, 4, 5, 7, 2, 6)
