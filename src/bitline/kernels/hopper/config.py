"""Launch configurations of the Hopper kernels: tile shape, pipeline, warps, scheduling. Data only; `heuristics` chooses them.

y [M, N] = x [M, K] @ W.T. W is operand A of the MMA and x operand B, so that "n16" and "n64" count the MMA's rows.
"""

from __future__ import annotations

from typing import NamedTuple

from bitline.kernels.hopper.scheme import DequantScheme

SMEM_BYTES = 226 * 1024  # shared memory of a CTA (227 KiB on sm90), less 1 KiB for mbarriers
MAX_FLAGS = 1024  # int32 arrival counters of a launch, one for each tile whose partials are reduced


def _describe(name: str, config: SmallMConfig | WgmmaConfig) -> str:
    """One line: the fields without a default, and those that differ from it."""
    defaults = config._field_defaults
    fields = (f"{k}={v}" for k, v in config._asdict().items() if k not in defaults or v != defaults[k])
    return f"{name}({', '.join(fields)})"


class StageLayout(NamedTuple):
    """Bytes of a shared-memory stage: x; packed weights, scales and zero points of one 16-row tile of W; all of the K slice."""

    x: int
    weights: int
    scales: int
    zeros: int
    total: int


class SmallMConfig(NamedTuple):
    """A config of the mma.sync kernels, M <= 32: `gemv_mma` where stages is 0, else `small_m_pipelined`.

    n16_per_warp: 16-row tiles of W per warp, each against all rows of x.
    k_tiles_per_iter: K tiles per warp and iteration; 1 in the pipelined kernel.
    max_registers: cap per thread, 0 for none.
    stages: shared-memory stages of the cp.async pipeline; 0: weights go from global memory to registers.
    warps_per_k_slice: warps that share a K slice, and thus x; the CTA has num_warps / warps_per_k_slice K slices.
    stage_x: x goes through the pipeline as well, else each lane loads it from the L2.
    stagger_x_loads: odd rows load their two 16-byte halves in the other order, against bank conflicts in the L1; stages = 0 only.
    pdl_early: griddepcontrol.wait after the weights of the first stage, not of all stages - 1 (programmatic dependent launch).
    split_k: CTAs that share K of the same rows of W and reduce their partials through global memory.
    """

    n16_per_warp: int
    num_warps: int
    k_tiles_per_iter: int = 1
    max_registers: int = 0
    stages: int = 0
    warps_per_k_slice: int = 1
    stage_x: bool = False
    stagger_x_loads: bool = False
    pdl_early: bool = False
    split_k: int = 1

    def __str__(self) -> str:
        return _describe("small_m_pipelined" if self.stages else "gemv_mma", self)

    @property
    def k_slices(self) -> int:
        """K slices of a CTA (intra-CTA split-K)."""
        return self.num_warps // self.warps_per_k_slice

    @property
    def n16_per_cta(self) -> int:
        """16-row tiles of W per CTA."""
        return self.n16_per_warp * self.warps_per_k_slice

    def accumulator_bytes(self, m8_tiles: int) -> int:
        """Bytes of all warps' accumulators, which are reduced through shared memory."""
        return 512 * self.num_warps * self.n16_per_warp * m8_tiles

    def stage_layout(self, scheme: DequantScheme, m8_tiles: int) -> StageLayout:
        """Of the pipelined kernel."""
        k_blocks = scheme.k_blocks_per_tile
        entries = k_blocks * scheme.scales_per_k_block if scheme.scales_per_k_block > 1 else 1
        if not scheme.k_blocks_per_scale:  # per-channel scales stay in registers
            entries = 0
        x = 1024 * m8_tiles * k_blocks if self.stage_x else 0
        weights = 512 * k_blocks * scheme.bits // 4
        scales = entries * (64 if scheme.fp32_scales else 32)
        zeros = entries * 16 if scheme.zero_points else 0
        return StageLayout(x, weights, scales, zeros, -(-(x + self.n16_per_cta * (weights + scales + zeros)) // 128) * 128)

    def smem_bytes(self, scheme: DequantScheme, m: int) -> int:
        """Shared memory of a CTA: the pipeline's stages or all accumulators, whichever is larger."""
        m8_tiles = -(-m // 8)
        stages = self.k_slices * self.stages * self.stage_layout(scheme.pipelined(), m8_tiles).total
        return max(stages, self.accumulator_bytes(m8_tiles))

    def fit_stages(self, scheme: DequantScheme, m: int, ctas_per_sm: int = 1) -> SmallMConfig | None:
        """The same with as many stages as fit with `ctas_per_sm` CTAs on an SM; None if two stages do not fit."""
        config = self
        while config.smem_bytes(scheme, m) + 1024 > (SMEM_BYTES + 1024) // ctas_per_sm:
            if config.stages <= 2:
                return None
            config = config._replace(stages=config.stages - 1)
        return config._replace(pdl_early=config.pdl_early and config.stages > 2)


class WgmmaConfig(NamedTuple):
    """A config of `wgmma_persistent`: persistent, warp-specialized, for M > 16.

    tile_m: tile size along M, which is wgmma's N.
    k_blocks_per_stage: K blocks of 64 columns per pipeline stage.
    stages: shared-memory stages of the TMA pipeline.
    n64_per_warpgroup: 64-row tiles of W per consumer warpgroup; 1 or 2.
    num_ctas: persistent CTAs; 0 in cost tables, where none are chosen yet.
    raster_group_n: tiles along N that are rasterized together, for L2 reuse.
    pdl: programmatic dependent launch: weights are prefetched before the previous kernel ends.
    num_consumer_warpgroups: consumer (math) warpgroups, side by side along N.
    tile_m_extra: added to the tile size along M by a second MMA with the same fragment of W; 0 for none.
    ctas_per_sm: CTAs that share an SM.
    pingpong: consumer warpgroups issue their MMAs one after the other and dequantize meanwhile.
    split_reduce: where all stream-K tiles have equally many CTAs, two or four of these reduce and store a half or quarter each.
    """

    tile_m: int
    k_blocks_per_stage: int = 2
    stages: int = 4
    n64_per_warpgroup: int = 1
    num_ctas: int = 0
    raster_group_n: int = 8
    pdl: bool = True
    num_consumer_warpgroups: int = 2
    tile_m_extra: int = 0
    ctas_per_sm: int = 1
    pingpong: bool = False
    split_reduce: bool = False

    def __str__(self) -> str:
        return _describe("wgmma_persistent", self)

    @property
    def cta_m(self) -> int:
        """Tile size along M, both MMAs together."""
        return self.tile_m + self.tile_m_extra

    @property
    def n64_per_cta(self) -> int:
        """64-row tiles of W per tile."""
        return self.num_consumer_warpgroups * self.n64_per_warpgroup

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers per thread: cap at launch (0 for none), of consumer warpgroups, of the producer warp."""
        if self.ctas_per_sm == 2:
            return 80, 104, 32
        return (0, 112, 24) if self.num_consumer_warpgroups == 4 else (0, 232, 40)

    def smem_bytes(self, scheme: DequantScheme) -> int:
        """Shared memory of a CTA without mbarriers: the pipeline's stages, and the tile of y."""
        entries = ((16 if scheme.fp32_scales else 8) + (4 if scheme.zero_points else 0)) * scheme.scales_per_k_block
        weights = self.n64_per_cta * 16 * (128 * scheme.bits // 4 + entries)
        return self.stages * self.k_blocks_per_stage * (self.cta_m * 128 + weights) + self.n64_per_cta * self.tile_m * 128

    def fit_stages(self, scheme: DequantScheme) -> WgmmaConfig:
        """The same with as many stages as fit."""
        config = self
        while config.smem_bytes(scheme) > SMEM_BYTES // self.ctas_per_sm:
            config = config._replace(stages=config.stages - 1)
        return config


class LargeMConfig(NamedTuple):
    """A config of `scaled_large_m`, and its compile-time part: fields of `WgmmaConfig`, but for these.

    tile_n: rows of W per tile, 128 or 256; a tile has 128 rows of x.
    """

    tile_n: int
    stages: int = 8
    num_ctas: int = 0
    raster_group_n: int = 8
    pingpong: bool = True
    num_consumer_warpgroups: int = 2
    consumer_registers: int = 232
    producer_registers: int = 40
    cta_m: int = 128
    k_blocks_per_stage: int = 2
    ctas_per_sm: int = 1
    split_reduce: bool = False

    @property
    def n64_per_cta(self) -> int:
        """64-row parts of W per tile."""
        return self.tile_n // 64

    def smem_bytes(self, grouped: bool, columns: bool) -> int:
        """Shared memory of a CTA without mbarriers: the pipeline's stages, a part of y per warpgroup, scratch of the epilogue."""
        stage = 128 * (128 + self.tile_n) + (512 if grouped else 0)
        return self.stages * stage + 2 * 64 * 128 * 2 + (1024 if columns else 0)

    def fit_stages(self, grouped: bool, columns: bool) -> LargeMConfig:
        """The same with as many stages as fit. grouped: scales of x change along K. columns: the epilogue multiplies by or adds
        numbers of each row of W."""
        config = self
        while config.smem_bytes(grouped, columns) > SMEM_BYTES:
            config = config._replace(stages=config.stages - 1)
        return config


PersistentConfig = WgmmaConfig | LargeMConfig
