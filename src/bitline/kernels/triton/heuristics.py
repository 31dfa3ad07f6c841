"""Tile configurations of the Triton weight-only kernels: a fixed table by shape, so no call ever autotunes. Measured on an H200.

Those of other NVIDIA GPUs and of AMD's wave32 GPUs (RDNA) come from compiling without running: the largest whose accumulators
and weights fit 256 registers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from bitline.kernels.triton.layout import PackedLayout

PANEL_ELEMENTS = 1 << 25  # weights dequantized to scratch at a time: 64 MiB in 16 bits
BLOCK_K_BYTES = 64  # packed bytes of one row of W in one K block


class GemmConfig(NamedTuple):
    """Tile shape and launch options of the fused kernel.

    k_slices: K blocks that a program works on at a time and reduces at the end (intra-CTA split-K, one per warp where it equals
    num_warps). tile_n, tile_m: rows of W and of x per program. split_k: programs along K.
    """

    k_slices: int
    tile_n: int
    tile_m: int
    num_warps: int
    num_stages: int
    split_k: int = 1

    def shared_bytes(self, block_k: int, itemsize: int) -> int:
        """Upper bound of a program's shared memory: a tile of x and of packed weights per pipeline stage."""
        return self.num_stages * self.k_slices * (block_k * self.tile_m * itemsize + self.tile_n * BLOCK_K_BYTES)


class DeviceTraits(NamedTuple):
    """What tile configurations depend on.

    is_nvidia: an NVIDIA GPU, or Triton's interpreter. wave32: an AMD GPU with waves of 32. shared_bytes: shared memory that a
    program may take. no_mma: Triton has no matrix instructions there and uses FMA (NVIDIA before sm80).
    """

    is_nvidia: bool
    wave32: bool
    shared_bytes: int
    no_mma: bool = False

    @property
    def warp_level_mma(self) -> bool:
        """MMA operands and accumulators live in one warp's registers: NVIDIA GPUs but sm90 and sm100, which have 227 KiB."""
        return self.is_nvidia and self.shared_bytes < 200 << 10


def max_fused_m(dtype: torch.dtype, layout: PackedLayout, no_mma: bool) -> int:
    """The largest M at which the fused kernel is faster than dequantizing panels to scratch and torch's matmul.

    Codes with a high-bit plane and LUT types are dequantized again for each tile of 128 tokens, which takes longer than panels
    from the second tile on, and for 3 bits from M=65 on (28672x4096 on an H200, fused and panels: NF4 207 and 269 us at M=128,
    432 and 275 at 160; 6 bits 116 and 186, 253 and 194; 3 bits 85 at 64, 233 and 164 at 65). no_mma: see DeviceTraits; torch has
    matrix instructions there.
    """
    if dtype == torch.float32:
        return 32
    if no_mma:
        return 8
    if layout.high_bits and layout.low_bits == 2:
        return 64
    return 128 if layout.high_bits or layout.lut else 256


@functools.lru_cache(maxsize=4096)
def choose_gemm_config(
    m: int, n: int, k_blocks: int, layout: PackedLayout, dtype: torch.dtype, needs_x_sums: bool, traits: DeviceTraits
) -> GemmConfig:
    """The configuration for x [m, K] and W [n, K] of `k_blocks` packed K blocks.

    needs_x_sums: zero points or offsets need a second set of accumulators, the sums of x.
    """
    if traits.no_mma:
        config = GemmConfig(8, 16, 8, 8, 2)
    elif dtype == torch.float32:
        config = GemmConfig(1, 16, 16, 8, 2, 4) if traits.wave32 else GemmConfig(4, 16, 16, 4, 2)
    elif m <= 8:
        config = _m8_config(n, k_blocks)
    elif m <= 16:
        config = _m16_config(n, k_blocks)
    else:
        config = _large_m_config(m, n, 64 if needs_x_sums else 128)  # 128 columns of two accumulators exceed the registers
    config = fit_to_device(config, layout, dtype, needs_x_sums, traits)
    return config._replace(split_k=min(config.split_k, -(-k_blocks // config.k_slices)))


def fit_to_device(
    config: GemmConfig, layout: PackedLayout, dtype: torch.dtype, needs_x_sums: bool, traits: DeviceTraits
) -> GemmConfig:
    """A configuration within the device's matrix instructions, registers and shared memory."""
    config = _adapt_to_device(config, layout.block_k, dtype, traits)
    if traits.warp_level_mma and config.tile_m > 16:
        config = _fit_registers(config, layout, needs_x_sums)
    return _fit_shared_memory(config, layout.block_k, dtype, traits)


def _m8_config(n: int, k_blocks: int) -> GemmConfig:
    """M <= 8: warps take K slices of one tile in one pass, until W has enough rows to fill the device."""
    if n > 8192:
        return GemmConfig(1, 128, 8, 4, 3, 4) if k_blocks >= 16 else GemmConfig(1, 64, 8, 4, 3)
    if k_blocks <= 8:
        return GemmConfig(8, 16, 8, 8, 2)
    if k_blocks > 64:
        return GemmConfig(2, 32, 8, 2, 3, 8 if n <= 4608 else 4)
    if n > 4608:
        return GemmConfig(4, 16, 8, 4, 3)
    return GemmConfig(8, 16, 8, 8, 3, 2 if n <= 1024 else 1)


def _m16_config(n: int, k_blocks: int) -> GemmConfig:
    if n > 8192:
        return GemmConfig(1, 128, 16, 4, 3, 4) if k_blocks >= 16 else GemmConfig(1, 64, 16, 4, 3)
    return GemmConfig(1, 32, 16, 2, 3, 16) if n <= 2048 else GemmConfig(1, 64, 16, 2, 3, 8)


def _large_m_config(m: int, n: int, max_tile_m: int) -> GemmConfig:
    """M > 16: the widest matrix instructions, and as many K splits as it takes to occupy the device."""
    tile_m = 32 if m <= 32 else 64 if m <= 64 else max_tile_m
    programs = -(-n // 128) * -(-m // tile_m)
    split_k = 8
    while split_k > 1 and split_k * programs > (256 if m <= 64 else 132):
        split_k //= 2
    return GemmConfig(1, 128, tile_m, 4 if m <= 64 else 8, 3, split_k)


def _adapt_to_device(config: GemmConfig, block_k: int, dtype: torch.dtype, traits: DeviceTraits) -> GemmConfig:
    if block_k > 128 and config.tile_n > 64:
        config = config._replace(tile_n=64, num_warps=4)  # 2-bit K blocks have twice the columns: half the rows
    if not traits.is_nvidia:
        config = config._replace(tile_m=max(16, config.tile_m), num_stages=2)  # other vendors' matrix instructions are 16 wide
    if traits.wave32 and config.k_slices == 1 and dtype != torch.float32:
        small = config.tile_m <= 16
        config = config._replace(
            tile_n=min(config.tile_n, 64), tile_m=min(config.tile_m, 64), num_warps=4 if small else 8,
            num_stages=2 if small else 1,
        )  # fmt: skip
    return config


def _fit_registers(config: GemmConfig, layout: PackedLayout, needs_x_sums: bool) -> GemmConfig:
    """More warps, then a smaller tile_m, where a thread's accumulators would take too many registers."""
    block_k = layout.block_k
    partials = layout.scale_block_k != 0 or layout.promote_k < block_k  # partial accumulators beside the final ones
    limit = 80 if block_k > 128 else 96 if layout.promote_k < block_k or layout.lut else 128
    accumulators = (1 + partials + needs_x_sums) * config.tile_n * config.tile_m // 32
    if accumulators // config.num_warps > limit:
        config = config._replace(num_warps=8)
    if accumulators // config.num_warps > limit:
        config = config._replace(tile_m=config.tile_m // 2)
    return config


def _fit_shared_memory(config: GemmConfig, block_k: int, dtype: torch.dtype, traits: DeviceTraits) -> GemmConfig:
    """Fewer pipeline stages, then a smaller tile_m, where a program would take too much shared memory."""
    while config.shared_bytes(block_k, dtype.itemsize) > traits.shared_bytes and config.num_stages > 1:
        config = config._replace(num_stages=config.num_stages - 1)
    while config.shared_bytes(block_k, dtype.itemsize) > traits.shared_bytes and config.tile_m > 16:
        config = config._replace(tile_m=config.tile_m // 2)
    return config
