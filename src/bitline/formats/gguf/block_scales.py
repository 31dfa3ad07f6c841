"""The scales and offsets of ggml blocks, as fields of a QuantizedWeight, each [n, columns of its grid].

Block scales and super-block scales stay separate where ggml multiplies them in float32. None of those products is rounded
(11 bits of the super-block scale d, at most 8 of a block scale, at most 7 of a value), so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitline import native
from bitline.errors import WeightError
from bitline.formats.gguf import iq_grids
from bitline.formats.gguf.block_codes import spread
from bitline.formats.gguf.iq_grids import half

ScaleFields = dict[str, Tensor]


def half_at(offset: int) -> Callable[[Tensor], ScaleFields]:
    """A float16 scale at this byte."""
    return lambda blocks: {"scale": half(blocks, offset)}


def scale_and_min(blocks: Tensor) -> ScaleFields:
    """Q4_1 and Q5_1: a float16 scale and minimum, W = d * q + m."""
    return {"scale": half(blocks, 0), "offset": half(blocks, 2)}


def float32_scale(blocks: Tensor) -> ScaleFields:
    """Q8_K: a float32 scale at byte 0."""
    return {"scale": blocks[..., 0:4].contiguous().view(torch.float32).squeeze(-1)}


def e8m0_scale(blocks: Tensor) -> ScaleFields:
    """MXFP4: an E8M0 scale at byte 0."""
    return {"scale": blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)}


def q2_k(blocks: Tensor) -> ScaleFields:
    """Sixteen bytes of a 4-bit scale and a 4-bit minimum, W = d * scale * q - dmin * min."""
    both = blocks[..., 0:16].flatten(1)
    return {"scale": both & 15, "scale2": half(blocks, 80), "offset": both >> 4, "offset2": -half(blocks, 82)}


def q3_k(blocks: Tensor) -> ScaleFields:
    """Sixteen 6-bit scales minus 32: nibbles of eight bytes, and the upper bits in four."""
    low, high = spread(blocks[..., 96:104], range(0, 8, 4), 15), spread(blocks[..., 104:108], range(0, 8, 2), 3)
    scale = (low.flatten(-2) | (high.flatten(-2) << 4)).sub_(32).view(torch.int8)
    return {"scale": scale.flatten(1), "scale2": half(blocks, 108)}


def q4_k(blocks: Tensor) -> ScaleFields:
    """Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes, W = d * scale * q - dmin * min."""
    n, count, nbytes = blocks.shape
    core = native.core_for(blocks)
    if core is not None and blocks.stride(1) == nbytes:
        scale, minimum = torch.empty(2, n, 8 * count, dtype=torch.uint8)
        super_scale, super_minimum = torch.empty(2, n, count, dtype=torch.float16)
        core.unpack_gguf_scales(
            blocks.data_ptr(), blocks.stride(0), n, count, nbytes, scale.data_ptr(), minimum.data_ptr(),
            super_scale.data_ptr(), super_minimum.data_ptr(),
        )  # fmt: skip
        return {"scale": scale, "scale2": super_scale, "offset": minimum, "offset2": super_minimum.neg_()}
    packed = blocks[..., 4:16].contiguous().view(torch.int32)  # four bytes at once; masks drop bits shifted in from a neighbour
    first, second, third = packed[..., 0], packed[..., 1], packed[..., 2]
    six, four, two = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    scale = torch.stack((first & six, (third & four) | ((first >> 2) & two)), -1).view(torch.uint8)
    minimum = torch.stack((second & six, ((third >> 4) & four) | ((second >> 2) & two)), -1).view(torch.uint8)
    # Negating is exact, so d * q + (-dmin) * m is ggml's d * q - dmin * m to the last bit.
    return {
        "scale": scale.flatten(1), "scale2": half(blocks, 0), "offset": minimum.flatten(1), "offset2": -half(blocks, 2),
    }  # fmt: skip


def q6_k(blocks: Tensor) -> ScaleFields:
    """Sixteen int8 scales."""
    return {"scale": blocks[..., 192:208].flatten(1).view(torch.int8), "scale2": half(blocks, 208)}


def iq4_xs(blocks: Tensor) -> ScaleFields:
    """Eight 6-bit scales minus 32: nibbles of four bytes, and the upper bits in two."""
    low, high = iq_grids.unpack_bytes(blocks[..., 4:8], 4), iq_grids.unpack_bytes(blocks[..., 2:4], 2)
    return {"scale": (low | (high << 4)).sub_(32).view(torch.int8).flatten(1), "scale2": half(blocks, 0)}


def nvfp4(blocks: Tensor) -> ScaleFields:
    """Four unsigned E4M3 numbers; ggml reads the one that stands for NaN as 0."""
    scale = blocks[..., 0:4].flatten(1)
    if bool((bad := scale > 127).any()):
        raise WeightError(
            "a scale of NVFP4 is not an unsigned E4M3 number", field="scale", found=f"{int(bad.sum())} bytes above 127",
            expected="bytes 0..127",
        )  # fmt: skip
    return {"scale": torch.where(scale == 127, 0, scale).view(torch.float8_e4m3fn)}
