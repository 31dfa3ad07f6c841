# mypy: ignore-errors
"""4-bit codes of W as fragments of wgmma's operand A of 8 bits, in registers.

A block of packed codes is 16 rows x 128 columns, int32 [2, 32, 4] (`w4a8_layout`): lane 4*g + q of a warp owns int32 [h, lane],
four words with columns 64*h + 16*w + 4*q … + 3 of rows g and g + 8, w = 0 … 3. So a word becomes two registers of a fragment.

`scheme` is a `w4a8_scheme.W4A8Traits`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # renamed in Triton 3.9


@gluon.jit
def load_words(smem, h: gl.constexpr):
    """Words of columns 64*h … + 63 of four 16-row tiles, [4 warps, 8 rows, 4 lanes, 4 words]. smem: int32 [4, 256]."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[1, 0], [2, 0]], [], [4, 128]
    )
    return gl.reshape(smem.slice(h * 128, 128, dim=1).load(L), [4, 8, 4, 4])


@gluon.jit
def unpack_words(words, scheme: gl.constexpr):
    """8-bit codes of 64 columns: for each word w and row half r a tensor [4 warps, 8 rows, 4 lanes, 4 columns], at 2*w + r."""
    PTX: gl.constexpr = scheme.unpack_ptx
    codes = gl.inline_asm_elementwise(PTX[0], PTX[1], [words], dtype=(gl.int8,) * 8, is_pure=True, pack=4)
    if scheme.fp8:
        out = ()
        for i in gl.static_range(8):
            out = out + (codes[i].to(gl.float8e4nv, bitcast=True),)
        return out
    else:
        return codes


@gluon.jit
def join_step(codes, t: gl.constexpr):
    """The t-th k32 step of `unpack_words`: [4, 8, 4, 4, row half, column half]."""
    return gl.join(gl.join(codes[4 * t], codes[4 * t + 1]), gl.join(codes[4 * t + 2], codes[4 * t + 3]))


@gluon.jit
def fragment32(codes, t: gl.constexpr, TILE_M: gl.constexpr):
    """The t-th 32 columns of `unpack_words` as operand A [64, 32]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    v = gl.permute(join_step(codes, t), [0, 4, 1, 5, 2, 3])
    return gl.convert_layout(gl.reshape(v, [64, 32]), A, assert_trivial=True)


@gluon.jit
def fragment64(codes, TILE_M: gl.constexpr):
    """`unpack_words` as operand A [64, 64]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    v = gl.permute(gl.join(join_step(codes, 0), join_step(codes, 1)), [0, 4, 1, 6, 5, 2, 3])
    return gl.convert_layout(gl.reshape(v, [64, 64]), A, assert_trivial=True)


@gluon.jit
def fragment128(c0, c1, TILE_M: gl.constexpr):
    """`unpack_words` of both halves of a block as operand A [64, 128]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    v = gl.join(gl.join(join_step(c0, 0), join_step(c0, 1)), gl.join(join_step(c1, 0), join_step(c1, 1)))
    v = gl.permute(v, [0, 4, 1, 7, 6, 5, 2, 3])
    return gl.convert_layout(gl.reshape(v, [64, 128]), A, assert_trivial=True)


@gluon.jit
def block_fragments(words, TILE_M: gl.constexpr, scheme: gl.constexpr):
    """Operands A of a block of 128 columns, one for each of its scale groups. words: `load_words` of both halves."""
    c0 = unpack_words(words[0], scheme)
    c1 = unpack_words(words[1], scheme)
    if scheme.groups_per_k_block == 1:
        return (fragment128(c0, c1, TILE_M),)
    elif scheme.groups_per_k_block == 2:
        return (fragment64(c0, TILE_M), fragment64(c1, TILE_M))
    else:
        return (fragment32(c0, 0, TILE_M), fragment32(c0, 1, TILE_M), fragment32(c1, 0, TILE_M), fragment32(c1, 1, TILE_M))


@gluon.jit
def load_row_scales(smem, TILE_M: gl.constexpr):
    """Scales of the rows of four 16-row tiles, [64, 1]. smem: float32 [4, 16], rows g and g + 8 side by side."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 32])
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]], [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]], [[1, 0], [2, 0]], [], [4, 16]
    )
    v = gl.reshape(gl.permute(gl.reshape(smem.load(L), [4, 8, 2]), [0, 2, 1]), [64])
    return gl.expand_dims(gl.convert_layout(v, gl.SliceLayout(1, MMA), assert_trivial=True), 1)
