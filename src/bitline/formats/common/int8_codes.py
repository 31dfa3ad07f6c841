"""Codes stored as one int8 each, packed to the bits that they need."""

from __future__ import annotations

import torch
from torch import Tensor

from bitline import bitstream


def pack_int8(values: Tensor, bits: int) -> Tensor | None:
    """int8 [N, K] to unsigned codes `value + 2**(bits - 1)`, uint8 [N, ceil(K * bits / 8)]; None where a value does not fit."""
    n, k = values.shape
    half = 1 << (bits - 1)
    out = torch.empty(n, bitstream.row_bytes(k, bits), dtype=torch.uint8)
    step = bitstream.rows_per_chunk(k)
    for r in range(0, n, step):
        rows = values[r : r + step]
        if bits < 8 and (int(rows.min()) < -half or int(rows.max()) >= half):
            return None
        out[r : r + step] = bitstream.pack(rows.view(torch.uint8) + half, bits)  # modulo 256: no wider type is needed
    return out
