"""The packed layout of 4-bit weights for wgmma's 8-bit operand A, shared by all M.

A block is 16 rows x 128 columns, 1 KiB. Within it, int32 [h, 4*g + q, w] holds columns 64*h + 16*w + 4*q … + 3, one a byte, of
rows g and g + 8: two registers of lane 4*g + q's fragment of m64nNk32 (PTX ISA, "wgmma register fragments"). Rows g have the low
nibble; int4 for E4M3 has its bits where `w4a8_scheme.UNPACK_PTX` says.

Packed int32 [N/16, K/128, 256], rows and columns zero-padded. Scales lie in a table float32 [N/16, groups, 8, 2], rows g and
g + 8 side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.hopper.w4a8_scheme import W4A8Scheme
from bitline.weight import QuantizedWeight

BLOCK_N, BLOCK_K = 16, 128
_ROWS = 4096  # packed at a time


def pack_codes(weight: QuantizedWeight, scheme: W4A8Scheme) -> Tensor:
    """Packed int32 [N/16, K/128, 256], in the input's column order."""
    n, k = weight.shape
    tiles, blocks = -(-n // BLOCK_N), -(-k // BLOCK_K)
    out = torch.empty(tiles, blocks, 256, dtype=torch.int32, device=weight.device)
    for r in range(0, n, _ROWS):
        codes = weight.unpacked(slice(r, min(n, r + _ROWS))) ^ scheme.xor_mask
        if weight.perm is not None:
            codes = torch.empty_like(codes).index_copy_(1, weight.perm.long(), codes)
        codes = pad(codes, (0, blocks * BLOCK_K - k, 0, -codes.shape[0] % BLOCK_N))
        spread = scheme.code == "int4" and scheme.traits.fp8
        out[r // BLOCK_N : (r + codes.shape[0]) // BLOCK_N] = _pack(codes, spread)
    return out


def _pack(codes: Tensor, spread: bool) -> Tensor:
    """Nibbles uint8 [16*T, 128*B] to int32 [T, B, 256]. spread: two's complement to sign and magnitude, bits as E4M3 has them."""
    low, high = codes.view(codes.shape[0] // BLOCK_N, 2, 8, -1, 2, 4, 4, 4).unbind(1)  # tile, g, block, h, w, q, byte
    if spread:
        magnitudes = [(c ^ (c >> 3) * 7) & 7 for c in (low, high)]  # less one where negative
        both = (low & 8) << 4 | magnitudes[0] << 1 | high >> 3 | magnitudes[1] << 4
    else:
        both = low | high << 4
    packed = both.permute(0, 2, 3, 1, 5, 4, 6).contiguous()  # tile, block, h, g, q, w, byte
    return packed.view(codes.shape[0] // BLOCK_N, -1, 1024).view(torch.int32)


def scale_table(weight: QuantizedWeight, scheme: W4A8Scheme) -> Tensor:
    """Scales over the factor of the unpacked codes, float32 [N/16, groups, 16]."""
    scale = weight.scales().float() / scheme.factor
    n = weight.shape[0]
    if scale.shape[0] != n:
        scale = scale.expand(n, -1)
    tiles, have = -(-n // BLOCK_N), scale.shape[1]
    scale = pad(scale, (0, scheme.groups - have, 0, tiles * BLOCK_N - n))
    return scale.view(tiles, 2, 8, scheme.groups).permute(0, 3, 2, 1).reshape(tiles, scheme.groups, 16).contiguous()
