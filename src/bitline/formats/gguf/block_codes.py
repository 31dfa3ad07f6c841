"""The codes of ggml blocks, repacked to canonical rows.

Within a block codes are in half order (low nibbles first, then the high nibbles of the same bytes), with the fifth and sixth
bits in bytes of their own; the canonical weight wants one sequential bit stream. Both hold the same numbers. Types whose
codes are indices into a codebook are in iq_grids.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitline import bitstream, native
from bitline.formats.gguf import iq_grids


@dataclass(frozen=True)
class BitPlanes:
    """Codes of `bits` bits, `size` to a block, stored in bit planes: a function of blocks, uint8 [n, blocks, bytes], to
    canonical rows.

    planes: (first byte, bytes in a run, bits, shift of these bits in the code). Byte l of a run holds elements l, l + run, …,
        the lowest bits first. zero_code: a code that is replaced by 0, -1 for none.
    """

    size: int
    bits: int
    planes: tuple[tuple[int, int, int, int], ...]
    zero_code: int = -1

    def __call__(self, blocks: Tensor) -> Tensor:
        """Repack with torch."""
        codes: Tensor | None = None
        for start, run, bits, shift in self.planes:
            runs = blocks[..., start : start + self.size * bits // 8].unflatten(-1, (-1, run))
            plane = (spread(runs, range(0, 8, bits), (1 << bits) - 1) << shift).flatten(-3)
            codes = plane if codes is None else codes | plane
        assert codes is not None
        if self.zero_code >= 0:
            codes = codes.masked_fill(codes == self.zero_code, 0)
        return bitstream.pack(codes.flatten(1), self.bits)

    def repack_native(self, blocks: Tensor, out: Tensor) -> bool:
        """The same by the native core, to `out`; False where it cannot."""
        core = native.core_for(blocks, out)
        n, count, nbytes = blocks.shape
        if core is None or blocks.stride(1) != nbytes or not out.is_contiguous():
            return False
        planes = torch.tensor(self.planes, dtype=torch.int32)
        failed = core.repack_gguf_blocks(
            blocks.data_ptr(), blocks.stride(0), n, count, nbytes, self.size, planes.data_ptr(), len(planes), self.bits,
            self.zero_code, out.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory to repack blocks")
        return True


def spread(qs: Tensor, shifts: range, mask: int) -> Tensor:
    """uint8 [..., run] to [..., len(shifts), run]: the bits at each shift of every byte."""
    return torch.stack([(qs >> s) & mask for s in shifts], -2)


def q5_legacy(high: Tensor, low: Tensor) -> Tensor:
    """Q5_0 and Q5_1: bit j of the 32-bit `high` is element j's fifth bit."""
    fifth = iq_grids.BITS[high.int()].view(torch.uint8)
    codes = spread(low, range(0, 8, 4), 15).flatten(-2) | (fifth << 4)
    return bitstream.pack(codes.flatten(1), 5)


_POWERS_OF_3 = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(-1)


def tq1_0(blocks: Tensor) -> Tensor:
    """Five base-3 digits per byte, stored as a fraction of 256: after a multiplication by 3**i, modulo 256, digit i is on top."""
    runs = ((blocks[..., 0:32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4))
    rest = torch.cat([(run.unsqueeze(-2) * _POWERS_OF_3[:count]).flatten(-2) for run, count in runs], -1)
    digit = (rest > 85).to(torch.uint8).add_(rest > 170)  # rest * 3 // 256
    return bitstream.pack(digit.flatten(1), 2)
