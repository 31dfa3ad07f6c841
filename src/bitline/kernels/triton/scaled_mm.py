"""W8A8 on any GPU of Triton's: int8 and block-scaled FP8 weights with activations of the same type."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.base import Kernel, Packed
from bitline.kernels.integers import channel_scales, fits_int8, int8_codes
from bitline.kernels.providers.common import triton_available
from bitline.kernels.triton.act_quant import quantize_groups_padded, quantize_padded
from bitline.kernels.triton.launch import interpreted
from bitline.platform import Platform
from bitline.quantized_input import pad_codes
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_ALIGN = 16  # K is padded to it


class _TritonScaledMM(Kernel):
    """Base of the W8A8 kernels: platforms and cost. rate: the peak that `cost` uses, "int8" or "fp8"."""

    platforms = ("cuda", "rocm", "xpu", "cpu")
    backend = "triton"
    quantizes_input = True
    takes_quantized_input = True
    priority = 5
    measured = ("sm90",)
    rate: ClassVar[str] = "int8"

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Triton, and a GPU with matrix instructions for these codes, or its interpreter on a CPU."""
        available = triton_available(platform)
        return cls._has_mma(platform) if available else available

    @classmethod
    def _has_mma(cls, platform: Platform) -> Verdict:
        raise NotImplementedError

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Two launches, a pass over x, and a roofline with the efficiencies measured on an H200."""
        if platform.vendor == "cpu":
            return 1.0  # the interpreter is for tests
        bandwidth, mma = cls._efficiency(spec)
        size, rates = spec.weight_bytes() + m * (spec.n + spec.k) * spec.act_dtype.itemsize, platform.rates
        gemm = max(size / (bandwidth * rates.bandwidth), 2.0 * m * spec.n * spec.k / (mma * rates.of(cls.rate)))
        return gemm + 3 * m * spec.k / rates.bandwidth + 2 * rates.launch

    @classmethod
    def _efficiency(cls, spec: LinearSpec) -> tuple[float, float]:
        """The fractions of peak bandwidth and of the peak MMA rate that are reached."""
        return 0.8, 0.6


class TritonInt8ScaledMMLinearKernel(_TritonScaledMM):
    """W8A8 int8 with exact int32 accumulators; activations per token or tensor, static or dynamic, with or without a zero point.

    The zero-point correction, zero * colsum(W), is subtracted in int32 and not in the output's dtype.
    """

    families = ("int8",)

    @classmethod
    def _has_mma(cls, platform: Platform) -> Verdict:
        if platform.vendor == "cuda" and platform.capability < 80:
            return no(f"{platform.arch} has no int8 matrix instructions that Triton uses", "sm80 or newer")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Symmetric integer weights of up to 8 bits with per-channel or per-tensor scales, int8 activations, any shape."""
        act = spec.act
        if act is None or act.dtype.kind != "int" or act.dtype.bits != 8:
            return no("the scheme has no int8 activations", "W8A8")
        if act.granularity == "group":
            return no(f"activation scheme {act}: the scale changes along K", "activation scales per token or per tensor")
        if not fits_int8(spec) or spec.zero != "none":
            return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
        if spec.k > 1 << 16:
            return no(f"int32 accumulators over K of {spec.k} can overflow", "K up to 65536")
        if spec.ragged or spec.block[1] < spec.k:
            return no("weight scales change along K", "one weight scale per tensor or per channel")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int8 [N, K'] in the input's column order, K' a multiple of 16; scale float32 [N]; colsum int32 [N]; a static
        scheme's input_scale and input_zero. Absent ones are empty."""
        codes = pad(int8_codes(weight), (0, -weight.spec.k % _ALIGN))
        asymmetric = weight.spec.act is not None and not weight.spec.act.symmetric
        absent = torch.empty(0, device=weight.device)
        return {
            "codes": codes,
            "scale": channel_scales(weight),
            "colsum": codes.sum(1, dtype=torch.int32) if asymmetric else absent,
            "input_scale": absent if weight.input_scale is None else weight.input_scale.float().reshape(1),
            "input_zero": absent if weight.input_zero is None else weight.input_zero.to(torch.int32).reshape(1),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale, colsum, static, static_zero = packed
        m, k = x.shape[0], codes.shape[1]
        if m == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        q, x_scale, zero = quantize_padded(x, spec.act, m, k, static, static_zero)
        return _launch(q, codes, x_scale, scale, zero, colsum, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        weight, scale, colsum, *_static = packed
        return _launch(pad_codes(codes, 0, weight.shape[1]), weight, scales, scale, zero, colsum, bias, spec)


class TritonFp8BlockScaledMMKernel(_TritonScaledMM):
    """Block-scaled FP8: scales per weight block and per activation group, applied to each partial accumulator in float32.

    Blocks are counted from the whole weight's first row and column, so a tensor-parallel shard may start inside one.
    """

    families = ("fp8_block", "fp8", "mxfp8")
    rate = "fp8"
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def _has_mma(cls, platform: Platform) -> Verdict:
        if platform.vendor == "cuda" and platform.capability < 89:
            return no(f"{platform.arch} has no FP8 matrix instructions", "sm89 or newer")
        if platform.vendor == "rocm" and platform.arch not in ("gfx950", "gfx1200", "gfx1201"):
            return no(f"{platform.arch} has no matrix instructions for OCP FP8", "gfx950, gfx1200 or gfx1201")
        if platform.vendor == "xpu":
            return no("Intel GPUs have no FP8 matrix instructions that Triton uses", "cuda:sm89 or newer")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """float8_e4m3fn weights and activations whose scales change at multiples of 32 columns."""
        act = spec.act
        if spec.weight.name != "float8_e4m3fn":
            return no(f"weight type {spec.weight}", "float8_e4m3fn weights")
        if act is None or act.dtype.name != "float8_e4m3fn" or act.granularity != "group" or act.scale == "e4m3":
            return no(f"activation scheme {act or 'none'}", "float8_e4m3fn activations in groups of a row")
        if spec.ragged or spec.act_order or spec.zero != "none" or spec.scale2_block is not None:
            return no("act-order, or zero points", "a symmetric block-scaled weight in the input's column order")
        if _scale_interval(spec) < 32:
            return no(f"scales change within {_scale_interval(spec)} columns",
                      "blocks, groups and shards of a multiple of 32 columns")  # fmt: skip
        return YES

    @classmethod
    def _efficiency(cls, spec: LinearSpec) -> tuple[float, float]:
        """Scaling after every 32 columns of MMA costs far more than after 128."""
        return (0.8, 0.35) if _scale_interval(spec) >= 64 else (0.25, 0.115)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes float8_e4m3fn [N, K'], K' a multiple of 16; scale float32 [row blocks, column blocks]."""
        k = weight.spec.k
        codes = pad(weight.codes, (0, -k % _ALIGN)) if k % _ALIGN else weight.codes.clone()
        return {"codes": codes.view(torch.float8_e4m3fn), "scale": weight.scales().contiguous()}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        q, x_scale = quantize_groups_padded(x, spec.act, x.shape[0], codes.shape[1])
        return _launch(q, codes, x_scale, scale, None, scale, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        weight, scale = packed
        return _launch(pad_codes(codes, 0, weight.shape[1]), weight, scales, scale, None, scale, bias, spec)


@functools.lru_cache(maxsize=4096)
def _scale_interval(spec: LinearSpec) -> int:
    """The largest power of two up to 128 whose aligned column ranges never cross a weight block or an activation group."""
    assert spec.act is not None
    common = math.gcd(128, spec.act.group_size)
    if spec.block[1] < spec.k:
        common = math.gcd(common, spec.block[1], spec.block_offset[1])
    return common


def _launch(
    q: Tensor, codes: Tensor, x_scale: Tensor, scale: Tensor, zero: Tensor | None, colsum: Tensor, bias: Tensor | None,
    spec: LinearSpec,
) -> Tensor:  # fmt: skip
    (m, k), n = q.shape, spec.n
    # The interpreter does not round bfloat16 to nearest and has no FP8 or int8 matmul.
    y = torch.empty(m, n, dtype=torch.float32 if interpreted() else spec.act_dtype, device=q.device)
    act = spec.act
    assert act is not None
    grouped = act.granularity == "group"
    config = tile_config(
        m, n, _scale_interval(spec) if grouped else 128, spec.weight.name if grouped else "int8",
        is_amd=torch.version.hip is not None, is_hopper=_is_hopper(q.device),
    )  # fmt: skip
    (block_n, block_k), (offset_n, offset_k) = spec.block, spec.block_offset
    _device_code().scaled_mm_kernel[(-(-n // config.tile_n), -(-m // config.tile_m))](
        q, codes, x_scale, scale, x_scale if zero is None else zero, colsum, q if bias is None else bias, y,
        m, n, k, x_scale.shape[1] if grouped else 0, scale.shape[1] if grouped else 0,
        offset_n if grouped else 0, offset_k if grouped else 0,
        PER_TOKEN=x_scale.numel() > 1, SCALE_BLOCK_N=block_n if grouped else 1, SCALE_BLOCK_K=block_k if grouped else 0,
        ACT_GROUP_SIZE=act.group_size if grouped else 1, HAS_ZERO=zero is not None, HAS_BIAS=bias is not None,
        EVEN_K=k % (config.k_slices * config.tile_k) == 0, UPCAST=interpreted(), K_SLICES=config.k_slices,
        BLOCK_SIZE_M=config.tile_m, BLOCK_SIZE_N=config.tile_n, BLOCK_SIZE_K=config.tile_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y.to(spec.act_dtype)


class TileConfig(NamedTuple):
    """Tile shape and launch options. k_slices: tiles of K per iteration, each multiplied by its own warps and reduced at
    the end (intra-CTA split-K)."""

    tile_m: int
    tile_n: int
    tile_k: int
    k_slices: int
    num_warps: int
    num_stages: int


def tile_config(m: int, n: int, tile_k: int, kind: str = "int8", *, is_amd: bool = False, is_hopper: bool = False) -> TileConfig:
    """The configuration for x [m, K] and W [n, K]; tile_k: columns that share scales. kind: the type of the codes.

    Small M is bandwidth-bound: narrow tiles and several K slices. On Hopper the fastest of some thirty tiles, measured on an H200
    for three layers and eight values of M. On AMD fewer columns in flight, so that the block-scaled accumulators of wave32 GPUs
    fit 256 registers (found by compiling for gfx1201).
    """
    if interpreted():
        return TileConfig(16, 32, tile_k, 1 + (m <= 16), 4, 1)
    if is_hopper:
        return _hopper_config(m, n, tile_k, kind)
    if m <= 16:
        return TileConfig(16, 32, tile_k, 4, 4, 3)
    if m <= 64:
        return TileConfig(64, 64, tile_k, 1, 4, 2 if is_amd else 4)
    return TileConfig(128, 128, min(tile_k, 64), 1, 8, 2) if is_amd else TileConfig(128, 128, tile_k, 1, 8, 3)


def _hopper_config(m: int, n: int, tile_k: int, kind: str) -> TileConfig:
    fills_device = n >= 16384  # four programs with tile_n = 32 per SM
    if m <= 16 and tile_k == 32:
        return TileConfig(16, 64, tile_k, 2, 4, 4) if fills_device else TileConfig(16, 32, tile_k, 4, 4, 4)
    if m <= 16:
        return TileConfig(16, 32, tile_k, 1, 4, 4) if fills_device else TileConfig(16, 16, tile_k, 4, 4, 4)
    if m <= 32 or (tile_k == 32 and m <= 64 and not fills_device):
        return TileConfig(32, 32, tile_k, 4, 4, 3)
    if kind == "int8" and m * n >= 1 << 21:
        return TileConfig(128, 128, tile_k, 1, 8, 3)
    if m * n >= 1 << 20:
        return TileConfig(64, 128, tile_k, 1, 4, 4)
    return TileConfig(64, 32, tile_k, 1, 4, 8) if m <= 64 else TileConfig(64, 64, tile_k, 1, 4, 5)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _device_code() -> Any:
    from bitline.kernels.triton.device import scaled_mm

    return scaled_mm
