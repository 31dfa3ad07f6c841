"""Compile-time parameters of the device code: what of a scheme, a config and a shape its machine code depends on."""

from __future__ import annotations

import functools
from typing import NamedTuple

from bitline.kernels.hopper import ptx
from bitline.kernels.hopper.config import SmallMConfig, WgmmaConfig
from bitline.kernels.hopper.scheme import DequantScheme

Ptx = tuple[str, str]  # (assembly, constraints)
_NONE: Ptx = ("", "")


class SchemeTraits(NamedTuple):
    """Compile-time part of a `DequantScheme` for one kernel, with its inline PTX (`ptx`).

    k_tiles_per_scale: K tiles that share a scale, 0 for per-channel scales; a K tile of the wgmma kernel is one K block.
    planes: of 4 bits per code, 1 or 2. folds_exponent_bias: scales and global scale hold the `ptx.fragment_exponent_bias`.
    """

    code_format: str
    fp16: bool
    fp32_scales: bool
    scales_per_k_block: int
    k_tiles_per_scale: int
    zero_points: bool
    planes: int
    has_bias: bool
    has_global_scale: bool
    folds_exponent_bias: bool
    scale_pairs_ptx: Ptx
    fragment_ptx: Ptx = _NONE
    mma_ptx: Ptx = _NONE
    load_weights_ptx: Ptx = _NONE
    load_x_ptx: Ptx = _NONE
    copy_weights_ptx: Ptx = _NONE
    copy_table_ptx: Ptx = _NONE
    copy_x_ptx: Ptx = _NONE


class SmallMTraits(NamedTuple):
    """Compile-time part of a `SmallMConfig`, and of the shape.

    m8_tiles: 8-row tiles of x. even: no remainders (of K in the pipelined kernel, of tiles of W and K tiles in `gemv_mma`). The
    others are the pipelined kernel's. k_tiles_per_step: K tiles from one iteration of a warp to the next. x_vectors_per_lane:
    16-byte vectors of x that a lane copies per K block. Bytes: k_tile_x_bytes of one row of x in a K tile; tile_* of a 16-row
    tile of W; stage_x_bytes of x, stage_bytes of all in a stage; slice_bytes of a K slice's stages. wait_stage_ptx,
    sync_k_slice_ptx: wait for the copies of the oldest stage, and for the warps of a K slice.
    """

    n16_per_warp: int
    k_tiles_per_iter: int
    m8_tiles: int
    k_blocks_per_tile: int
    even: bool
    pdl: bool = True
    stages: int = 0
    warps_per_k_slice: int = 1
    stage_x: bool = False
    stagger_x_loads: bool = False
    pdl_early: bool = False
    split_k: int = 1
    k_tiles_per_step: int = 0
    x_vectors_per_lane: int = 0
    k_tile_x_bytes: int = 0
    tile_weight_bytes: int = 0
    tile_scale_bytes: int = 0
    tile_zero_bytes: int = 0
    stage_x_bytes: int = 0
    stage_bytes: int = 0
    slice_bytes: int = 0
    wait_stage_ptx: str = ""
    sync_k_slice_ptx: str = ""


class WgmmaTraits(NamedTuple):
    """Compile-time part of a `WgmmaConfig`.

    consumer_registers, producer_registers: per thread (setmaxnreg). reduce_slices: CTAs that reduce a slice of a stream-K tile
    each, 2 or 4; 0: one reduces all of it.
    """

    tile_m: int
    k_blocks_per_stage: int
    stages: int
    num_consumer_warpgroups: int
    n64_per_warpgroup: int
    raster_group_n: int
    pdl: bool
    tile_m_extra: int
    consumer_registers: int
    producer_registers: int
    pingpong: bool
    reduce_slices: int


@functools.lru_cache(maxsize=4096)
def wgmma_scheme_traits(scheme: DequantScheme, has_bias: bool) -> SchemeTraits:
    """Of `wgmma_persistent`."""
    s, folds = scheme, scheme.fragment_exponent_bias > 0
    pairs = ptx.folded_scale_pairs(s.code_format, s.fp32_scales) if folds else ptx.scale_pairs(s.fp16, s.fp32_scales)
    return SchemeTraits(
        s.code_format, s.fp16, s.fp32_scales, s.scales_per_k_block, s.k_blocks_per_scale, s.zero_points, s.bits // 4, has_bias,
        s.global_scale or folds, folds, pairs, fragment_ptx=ptx.dequant_fragment(s.code_format, s.fp16),
    )  # fmt: skip


def _mma_sync_traits(scheme: DequantScheme, has_bias: bool, m8_tiles: int, staged: bool) -> SchemeTraits:
    s = scheme
    k_tiles_per_scale = 1 if s.scales_per_k_block > 1 else s.k_blocks_per_scale // s.k_blocks_per_tile
    return SchemeTraits(
        s.code_format, s.fp16, s.fp32_scales, s.scales_per_k_block, k_tiles_per_scale, s.zero_points, s.bits // 4, has_bias,
        s.global_scale, False, ptx.scale_pairs(s.fp16, s.fp32_scales),
        mma_ptx=ptx.mma_k_tile(s.code_format, s.fp16, s.k_blocks_per_tile, m8_tiles, s.scales_per_k_block > 1, staged),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def gemv_scheme_traits(scheme: DequantScheme, has_bias: bool, m8_tiles: int, stagger_x_loads: bool) -> SchemeTraits:
    """Of `gemv_mma`."""
    k_blocks = scheme.k_blocks_per_tile
    return _mma_sync_traits(scheme, has_bias, m8_tiles, False)._replace(
        load_weights_ptx=ptx.load_weights(k_blocks * scheme.bits // 4),
        load_x_ptx=ptx.load_x_staggered(k_blocks) if stagger_x_loads else ptx.load_x(k_blocks),
    )


@functools.lru_cache(maxsize=4096)
def pipelined_scheme_traits(scheme: DequantScheme, has_bias: bool, m8_tiles: int, stage_x: bool, even: bool) -> SchemeTraits:
    """Of `small_m_pipelined`. even: K is a multiple of a K tile."""
    k_blocks = scheme.k_blocks_per_tile
    load_x = ptx.load_x_shared(k_blocks, m8_tiles) if stage_x else ptx.load_x(k_blocks) if even else ptx.load_x_masked(k_blocks)
    return _mma_sync_traits(scheme, has_bias, m8_tiles, True)._replace(
        load_x_ptx=load_x, copy_weights_ptx=ptx.copy_weights(k_blocks, scheme.bits // 4), copy_table_ptx=ptx.copy_table(),
        copy_x_ptx=ptx.copy_x(),
    )  # fmt: skip


def gemv_traits(config: SmallMConfig, m8_tiles: int, k_blocks_per_tile: int, even: bool) -> SmallMTraits:
    """Of `gemv_mma`."""
    return SmallMTraits(
        config.n16_per_warp, config.k_tiles_per_iter, m8_tiles, k_blocks_per_tile, even, stagger_x_loads=config.stagger_x_loads
    )


def pipelined_traits(config: SmallMConfig, scheme: DequantScheme, m8_tiles: int, even: bool) -> SmallMTraits:
    """Of `small_m_pipelined`."""
    stage = config.stage_layout(scheme, m8_tiles)
    warps = config.warps_per_k_slice
    return SmallMTraits(
        config.n16_per_warp, config.k_tiles_per_iter, m8_tiles, scheme.k_blocks_per_tile, even, stages=config.stages,
        warps_per_k_slice=warps, stage_x=config.stage_x, pdl_early=config.pdl_early, split_k=config.split_k,
        k_tiles_per_step=config.k_slices * config.split_k, x_vectors_per_lane=(2 * m8_tiles + warps - 1) // warps,
        k_tile_x_bytes=128 * scheme.k_blocks_per_tile, tile_weight_bytes=stage.weights, tile_scale_bytes=stage.scales,
        tile_zero_bytes=stage.zeros, stage_x_bytes=stage.x, stage_bytes=stage.total,
        slice_bytes=max(config.stages * stage.total, config.accumulator_bytes(m8_tiles) // config.k_slices),
        wait_stage_ptx=f"cp.async.wait_group {config.stages - 2}; // $0", sync_k_slice_ptx=f"bar.sync $1, {32 * warps}; // $0",
    )  # fmt: skip


def wgmma_traits(config: WgmmaConfig, reduce_slices: int) -> WgmmaTraits:
    """Of `wgmma_persistent`."""
    c = config
    _, consumer, producer = c.registers
    return WgmmaTraits(
        c.tile_m, c.k_blocks_per_stage, c.stages, c.num_consumer_warpgroups, c.n64_per_warpgroup, c.raster_group_n, c.pdl,
        c.tile_m_extra, consumer, producer, c.pingpong, reduce_slices,
    )  # fmt: skip
