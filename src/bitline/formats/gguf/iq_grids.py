"""GGUF's IQ1, IQ2 and IQ3 types: a stored code is an index into a codebook of vectors of 4 or 8 magnitudes, signs apart.

The canonical weight has one code per weight, so vectors are expanded: IQ3 becomes 4-bit codes (8 magnitudes and a sign), IQ2
3-bit codes (3 and a sign), IQ1_M 3-bit codes (-1, 0 or 1 plus or minus 1/8), IQ1_S 2-bit codes with an offset. The codebooks
are the gguf package's own ("grids" in ggml), imported when a weight is first read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.errors import BitlineError

# The eight bits of every byte value, one byte each and lowest first: one look-up instead of eight passes over short runs.
BITS = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).to(torch.uint8).view(torch.int64).squeeze(1)
# Signs of eight weights in seven bits: the eighth makes the number of minus signs even.
_EVEN_PARITY = torch.tensor([s | (s.bit_count() & 1) << 7 for s in range(128)])
_EVEN_PARITY_BITS = BITS[_EVEN_PARITY]
_SHIFTS_OF_7 = torch.arange(0, 28, 7, dtype=torch.int32)
_SHIFTS_OF_3 = torch.arange(0, 12, 3, dtype=torch.int16)


def half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of every block, [n, blocks]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


def unpack_bytes(qs: Tensor, bits: int) -> Tensor:
    """uint8 [..., bytes] to [..., bytes * 8 / bits]: the codes in every byte, lowest bits first."""
    return torch.stack([(qs >> s) & ((1 << bits) - 1) for s in range(0, 8, bits)], -1).flatten(-2)


@functools.cache
def _codebook(kind: str, values: tuple[float, ...]) -> Tensor:
    """A type's vectors as codes, the index of each component in `values`, one byte each in an int64 or int32."""
    try:
        from gguf import quants
    except ImportError as error:
        raise BitlineError(
            f"reading GGUF type {kind} needs the gguf package, which has its codebook", fix="pip install 'bitline[models]'"
        ) from error
    owner = getattr(quants, kind)
    owner.init_grid()
    grid = torch.from_numpy(owner.grid.copy()).squeeze(0).squeeze(0)
    same = grid.unsqueeze(-1) == torch.tensor(values)
    if not bool(same.any(-1).all()):
        raise BitlineError(f"the gguf package's codebook of {kind} is not the known one", expected=f"vectors of {values}",
                           fix="install another version: gguf 0.19 is known to do")  # fmt: skip
    codes = same.to(torch.uint8).argmax(-1).to(torch.uint8)
    return codes.view(torch.int64 if codes.shape[1] == 8 else torch.int32).squeeze(1)


def _look_up(codebook: Tensor, index: Tensor) -> Tensor:
    """Codes of vectors, one byte each: int64 [n, K / 8]."""
    return codebook.index_select(0, index.reshape(-1).int()).view(torch.int64).view(index.shape[0], -1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes, one byte each in int64, to canonical rows."""
    return bitstream.pack(codes.view(torch.uint8), bits)


def _integers(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Bytes [start, stop) of every block as little-endian integers, [n, blocks, count]."""
    return blocks[..., start:stop].contiguous().view(dtype)


# ---- IQ2: magnitudes 8, 25 and 43, in eighths ----------------------------------------------------------------------------

_iq2 = functools.partial(_codebook, values=(8.0, 25.0, 43.0))


def iq2_xxs(blocks: Tensor) -> Tensor:
    """For 32 weights four bytes of codebook index, then four times seven sign bits and a 4-bit scale."""
    index = blocks[..., 2:66].unflatten(-1, (8, 2, 4))[..., 0, :]
    signs = _groups_of_7(_integers(blocks, 2, 66, torch.int32)[..., 1::2])
    return _pack(_look_up(_iq2("IQ2_XXS"), index) | (_EVEN_PARITY_BITS[signs] << 2).flatten(1), 3)


def iq2_xxs_scales(blocks: Tensor) -> dict[str, Tensor]:
    """W = d * (1/2 + s) / 4 * grid = d * (2 s + 1) * grid / 8."""
    return {"scale": _odd(_integers(blocks, 2, 66, torch.int32)[..., 1::2] >> 28), "scale2": half(blocks, 0)}


def iq2_xs(blocks: Tensor) -> Tensor:
    """For eight weights an int16: 9 bits of codebook index and seven signs."""
    packed = _integers(blocks, 2, 66, torch.int16).flatten(1)
    return _pack(_look_up(_iq2("IQ2_XS"), packed & 511) | (_EVEN_PARITY_BITS[((packed >> 9) & 127).int()] << 2), 3)


def iq2_s(blocks: Tensor) -> Tensor:
    """For eight weights a byte of codebook index with two more bits apart, and a byte of signs."""
    index = blocks[..., 2:34].to(torch.int16) | (unpack_bytes(blocks[..., 66:74], 2).to(torch.int16) << 8)
    return _pack(_look_up(_iq2("IQ2_S"), index) | (BITS[blocks[..., 34:66].int()] << 2).flatten(1), 3)


# ---- IQ3: eight magnitudes -----------------------------------------------------------------------------------------------


def iq3_xxs(blocks: Tensor) -> Tensor:
    """For four weights a byte of codebook index; for 32 four times seven sign bits and a 4-bit scale."""
    codebook = _codebook("IQ3_XXS", tuple(4 * v for v in types.iq3_xxs.values()[:8]))
    signs = _groups_of_7(_integers(blocks, 66, 98, torch.int32))
    return _pack(_look_up(codebook, blocks[..., 2:66]) | (_EVEN_PARITY_BITS[signs] << 3).flatten(1), 4)


def iq3_xxs_scales(blocks: Tensor) -> dict[str, Tensor]:
    """W = d * (1/2 + s) / 2 * grid = d * (2 s + 1) * grid / 4."""
    return {"scale": _odd(_integers(blocks, 66, 98, torch.int32) >> 28), "scale2": half(blocks, 0)}


def iq3_s(blocks: Tensor) -> Tensor:
    """For four weights a byte of codebook index with one more bit apart; one sign bit per weight."""
    codebook = _codebook("IQ3_S", types.iq3_s.values()[:8])
    index = blocks[..., 2:66].to(torch.int16) | (unpack_bytes(blocks[..., 66:74], 1).to(torch.int16) << 8)
    return _pack(_look_up(codebook, index) | (BITS[blocks[..., 74:106].int()] << 3).flatten(1), 4)


# ---- IQ1: -1, 0 or 1, plus or minus one eighth ---------------------------------------------------------------------------

_iq1 = functools.partial(_codebook, "IQ1_S", (-1.0, 0.0, 1.0))


def iq1_s(blocks: Tensor) -> Tensor:
    """For eight weights a byte of codebook index with three more bits in an int16 that serves 32."""
    high = (_integers(blocks, 34, 50, torch.int16).unsqueeze(-1) >> _SHIFTS_OF_3) & 7
    return _pack(_look_up(_iq1(), blocks[..., 2:34].to(torch.int16) | (high << 8).flatten(-2)), 2)


def iq1_s_scales(blocks: Tensor) -> dict[str, Tensor]:
    """W = d * (2 s + 1) * (code - 1 +- 1/8): an offset of -7 or -9 eighths."""
    packed = _integers(blocks, 34, 50, torch.int16)
    scale, d = _odd((packed >> 12) & 7), half(blocks, 0)
    eighths = torch.where(packed < 0, 9, 7).to(torch.uint8).flatten(1)
    return {"scale": scale, "scale2": d, "offset": scale * eighths, "offset2": d.float() * -0.125}


def iq1_m(blocks: Tensor) -> Tensor:
    """For eight weights a byte of codebook index, and a nibble: three more bits, and the sign of the eighth."""
    high = unpack_bytes(blocks[..., 32:48], 4)
    codes = _look_up(_iq1(), blocks[..., 0:32].to(torch.int16) | ((high & 7).to(torch.int16) << 8))
    return _pack(codes | BITS[(high >> 3).int() * 255].mul_(4).flatten(1), 3)


def iq1_m_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Four int16 hold four 3-bit scales each, and a nibble of d."""
    packed = _integers(blocks, 48, 56, torch.int16)
    scale = _odd((packed.unsqueeze(-1) >> _SHIFTS_OF_3).flatten(-2) & 7)
    nibbles = (packed.int() >> 12) & 15
    d = (nibbles << torch.arange(0, 16, 4, dtype=torch.int32)).sum(-1)
    return {"scale": scale, "scale2": d.to(torch.uint16).view(torch.float16)}


# ---- signs and scales ----------------------------------------------------------------------------------------------------


def _groups_of_7(packed: Tensor) -> Tensor:
    """int32 [..., count] to [..., count, 4]: the low 28 bits in four groups of seven."""
    return (packed.unsqueeze(-1) >> _SHIFTS_OF_7) & 127


def _odd(scale: Tensor) -> Tensor:
    """2 s + 1 for the low four bits, uint8 [n, grid columns]."""
    return ((scale & 15) * 2 + 1).to(torch.uint8).flatten(1)


def odd_scales(start: int, stop: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Scales 2 s + 1 with s in the nibbles of bytes [start, stop), and d at byte 0."""
    return lambda blocks: {"scale": _odd(unpack_bytes(blocks[..., start:stop], 4)), "scale2": half(blocks, 0)}
