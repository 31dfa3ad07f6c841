"""GGUF's IQ1, IQ2 and IQ3 types: a code is the number of a vector of 4 or 8 magnitudes, and signs lie beside it.

The canonical weight has a code for each weight, so vectors are written out: IQ3 becomes 4-bit codes (8 magnitudes and a
sign), IQ2 3-bit ones (3 and a sign), IQ1_M 3-bit ones (-1, 0 or 1 plus or minus 1/8), IQ1_S 2-bit ones with an offset. The
vectors are the gguf package's own tables, imported when a weight is first read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bitline import bitstream, types
from bitline.errors import BitlineError

# The eight bits of every byte value, a byte each and lowest first: one look-up instead of eight passes over short runs.
BITS = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).to(torch.uint8).view(torch.int64).squeeze(1)
# Signs of eight weights in seven bits: the eighth makes the number of minus signs even.
_EVEN = torch.tensor([s | (s.bit_count() & 1) << 7 for s in range(128)])
_EVEN_BITS = BITS[_EVEN]
_SEVENS = torch.arange(0, 28, 7, dtype=torch.int32)
_THREES = torch.arange(0, 12, 3, dtype=torch.int16)


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, [n, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def fields(qs: Tensor, width: int) -> Tensor:
    """uint8 [..., bytes] to [..., bytes * 8 / width]: the fields of every byte, lowest first."""
    return torch.stack([(qs >> s) & ((1 << width) - 1) for s in range(0, 8, width)], -1).flatten(-2)


@functools.cache
def _grid(kind: str, values: tuple[float, ...]) -> Tensor:
    """A type's vectors as codes, the position of each component in `values`, one byte each in a word: int64 or int32."""
    try:
        from gguf import quants
    except ImportError as error:
        raise BitlineError(
            f"reading GGUF type {kind} needs the gguf package, which has its table", fix="pip install 'bitline[models]'"
        ) from error
    owner = getattr(quants, kind)
    owner.init_grid()
    grid = torch.from_numpy(owner.grid.copy()).squeeze(0).squeeze(0)
    same = grid.unsqueeze(-1) == torch.tensor(values)
    if not bool(same.any(-1).all()):
        raise BitlineError(f"the gguf package's table of {kind} is not the known one", expected=f"vectors of {values}",
                           fix="install another version: gguf 0.19 is known to do")  # fmt: skip
    codes = same.to(torch.uint8).argmax(-1).to(torch.uint8)
    return codes.view(torch.int64 if codes.shape[1] == 8 else torch.int32).squeeze(1)


def _vectors(table: Tensor, index: Tensor) -> Tensor:
    """Codes of vectors, uint8 [n, K] in effect: int64 [n, K / 8] that each hold eight of them."""
    return table.index_select(0, index.reshape(-1).int()).view(torch.int64).view(index.shape[0], -1)


def _pack(words: Tensor, width: int) -> Tensor:
    return bitstream.pack(words.view(torch.uint8), width)


def _words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Bytes [start, stop) of every block as little-endian integers, [n, blocks, count]."""
    return blocks[..., start:stop].contiguous().view(dtype)


# ---- IQ2: 8, 25 or 43, eighths of which are the codes' values ----------------------------------------------------------

_iq2 = functools.partial(_grid, values=(8.0, 25.0, 43.0))


def iq2_xxs(blocks: Tensor) -> Tensor:
    """For 32 weights four bytes of vector numbers, then four times seven sign bits and a 4-bit scale."""
    index = blocks[..., 2:66].unflatten(-1, (8, 2, 4))[..., 0, :]
    signs = _seven_bits(_words(blocks, 2, 66, torch.int32)[..., 1::2])
    return _pack(_vectors(_iq2("IQ2_XXS"), index) | (_EVEN_BITS[signs] << 2).flatten(1), 3)


def iq2_xxs_scales(blocks: Tensor) -> dict[str, Tensor]:
    """W = d * (1/2 + s) / 4 * grid = d * (2 s + 1) * grid / 8."""
    return {"scale": _odd(_words(blocks, 2, 66, torch.int32)[..., 1::2] >> 28), "scale2": half(blocks, 0)}


def iq2_xs(blocks: Tensor) -> Tensor:
    """For eight weights a 16-bit word: 9 bits of vector number and seven signs."""
    words = _words(blocks, 2, 66, torch.int16).flatten(1)
    return _pack(_vectors(_iq2("IQ2_XS"), words & 511) | (_EVEN_BITS[((words >> 9) & 127).int()] << 2), 3)


def iq2_s(blocks: Tensor) -> Tensor:
    """For eight weights a byte of vector number with two more bits apart, and a byte of signs."""
    index = blocks[..., 2:34].to(torch.int16) | (fields(blocks[..., 66:74], 2).to(torch.int16) << 8)
    return _pack(_vectors(_iq2("IQ2_S"), index) | (BITS[blocks[..., 34:66].int()] << 2).flatten(1), 3)


# ---- IQ3: eight magnitudes ---------------------------------------------------------------------------------------------


def iq3_xxs(blocks: Tensor) -> Tensor:
    """For four weights a byte of vector number; for 32 four times seven sign bits and a 4-bit scale."""
    table = _grid("IQ3_XXS", tuple(4 * v for v in types.iq3_xxs.values()[:8]))
    signs = _seven_bits(_words(blocks, 66, 98, torch.int32))
    return _pack(_vectors(table, blocks[..., 2:66]) | (_EVEN_BITS[signs] << 3).flatten(1), 4)


def iq3_xxs_scales(blocks: Tensor) -> dict[str, Tensor]:
    """W = d * (1/2 + s) / 2 * grid = d * (2 s + 1) * grid / 4."""
    return {"scale": _odd(_words(blocks, 66, 98, torch.int32) >> 28), "scale2": half(blocks, 0)}


def iq3_s(blocks: Tensor) -> Tensor:
    """For four weights a byte of vector number with one more bit apart; a bit of sign for each weight."""
    table = _grid("IQ3_S", types.iq3_s.values()[:8])
    index = blocks[..., 2:66].to(torch.int16) | (fields(blocks[..., 66:74], 1).to(torch.int16) << 8)
    return _pack(_vectors(table, index) | (BITS[blocks[..., 74:106].int()] << 3).flatten(1), 4)


# ---- IQ1: -1, 0 or 1, and one eighth added or subtracted ---------------------------------------------------------------

_iq1 = functools.partial(_grid, "IQ1_S", (-1.0, 0.0, 1.0))


def iq1_s(blocks: Tensor) -> Tensor:
    """For eight weights a byte of vector number with three more bits in a word that serves 32."""
    high = (_words(blocks, 34, 50, torch.int16).unsqueeze(-1) >> _THREES) & 7
    return _pack(_vectors(_iq1(), blocks[..., 2:34].to(torch.int16) | (high << 8).flatten(-2)), 2)


def iq1_s_scales(blocks: Tensor) -> dict[str, Tensor]:
    """W = d * (2 s + 1) * (code - 1 +- 1/8): an offset of -7 or -9 eighths."""
    words = _words(blocks, 34, 50, torch.int16)
    scale, d = _odd((words >> 12) & 7), half(blocks, 0)
    eighths = torch.where(words < 0, 9, 7).to(torch.uint8).flatten(1)
    return {"scale": scale, "scale2": d, "offset": scale * eighths, "offset2": d.float() * -0.125}


def iq1_m(blocks: Tensor) -> Tensor:
    """For eight weights a byte of vector number, and a nibble: three more bits, and the sign of the eighth."""
    high = fields(blocks[..., 32:48], 4)
    words = _vectors(_iq1(), blocks[..., 0:32].to(torch.int16) | ((high & 7).to(torch.int16) << 8))
    return _pack(words | BITS[(high >> 3).int() * 255].mul_(4).flatten(1), 3)


def iq1_m_scales(blocks: Tensor) -> dict[str, Tensor]:
    """Four 16-bit words hold four 3-bit scales each, and a nibble of d."""
    words = _words(blocks, 48, 56, torch.int16)
    scale = _odd((words.unsqueeze(-1) >> _THREES).flatten(-2) & 7)
    nibbles = (words.int() >> 12) & 15
    d = (nibbles << torch.arange(0, 16, 4, dtype=torch.int32)).sum(-1)
    return {"scale": scale, "scale2": d.to(torch.uint16).view(torch.float16)}


# ---- signs and scales --------------------------------------------------------------------------------------------------


def _seven_bits(words: Tensor) -> Tensor:
    """int32 [..., 32-bit words] to [..., words, 4] of seven bits each."""
    return (words.unsqueeze(-1) >> _SEVENS) & 127


def _odd(scale: Tensor) -> Tensor:
    """2 s + 1 for the low four bits, uint8 [n, grid columns]."""
    return ((scale & 15) * 2 + 1).to(torch.uint8).flatten(1)


def odd_scales(start: int, stop: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Scales 2 s + 1 with s in the nibbles of bytes [start, stop), and d at byte 0."""
    return lambda blocks: {"scale": _odd(fields(blocks[..., start:stop], 4)), "scale2": half(blocks, 0)}
