"""int8 and FP8 layers with inputs of the same kind, on any GPU that Triton knows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitline.kernels.base import Kernel, Packed
from bitline.kernels.integers import fits_bytes, row_scales, signed_bytes
from bitline.kernels.providers import common
from bitline.kernels.triton.act_quant import groups_of, rows_of
from bitline.kernels.triton.launch import interpreted
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_ALIGN = 16


class _TritonScaledMM(Kernel):
    """What both kernels share: the machines, the launch and the padding of K to 16."""

    platforms = ("cuda", "rocm", "xpu", "cpu")
    backend = "triton"
    quantizes_input = True
    priority = 5
    measured = ("sm90",)
    rate: ClassVar[str] = "int8"

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Triton, and a GPU with matrix instructions for these codes, or its interpreter on a CPU."""
        there = common.triton(platform)
        return cls._units(platform) if there else there

    @classmethod
    def _units(cls, platform: Platform) -> Verdict:
        raise NotImplementedError

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Two launches, a pass over x, and the shares of bandwidth and of matrix rate that were measured on an H200."""
        if platform.vendor == "cpu":
            return 1.0  # the interpreter is for tests
        read, multiply = cls._shares(spec)
        size, rates = spec.weight_bytes() + m * (spec.n + spec.k) * spec.act_dtype.itemsize, platform.rates
        product = max(size / (read * rates.bandwidth), 2.0 * m * spec.n * spec.k / (multiply * rates.of(cls.rate)))
        return product + 3 * m * spec.k / rates.bandwidth + 2 * rates.launch

    @classmethod
    def _shares(cls, spec: LinearSpec) -> tuple[float, float]:
        """Of the bandwidth and of the rate of products."""
        return 0.8, 0.6


class TritonInt8ScaledMMLinearKernel(_TritonScaledMM):
    """W8A8: exact int32 sums, per token or per tensor, static or dynamic, with a zero point or without.

    A zero point is rounded as everywhere in Bitline; its part of the sum, zero * (row sum of the weight), is taken off in
    int32 and not in the output's dtype.
    """

    families = ("int8",)

    @classmethod
    def _units(cls, platform: Platform) -> Verdict:
        if platform.vendor == "cuda" and platform.capability < 80:
            return no(f"{platform.arch} has no int8 matrix instructions that Triton uses", "sm80 or newer")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Integer weights and inputs of up to 8 bits, scales per tensor or row, any shape and order of columns."""
        act = spec.act
        if act is None or act.dtype.kind != "int" or act.dtype.bits != 8:
            return no("the scheme has no int8 input", "W8A8")
        if act.granularity == "group":
            return no(f"the input's scale changes along K, in groups of {act.group_size}", "input scales per token or per tensor")
        if not fits_bytes(spec) or spec.zero != "none":
            return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
        if spec.k > 1 << 16:
            return no(f"sums over {spec.k} columns can overflow int32", "K up to 65536")
        if spec.ragged or spec.block[1] < spec.k:
            return no("weight scales change along K", "one weight scale per tensor or per row")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int8 [N, K'] in input order, K' a multiple of 16; scale float32 [N]; colsum int32 [N]; static scale, zero."""
        codes = torch.nn.functional.pad(signed_bytes(weight), (0, -weight.spec.k % _ALIGN))
        asymmetric = weight.spec.act is not None and not weight.spec.act.symmetric
        absent = torch.empty(0, device=weight.device)
        return {
            "codes": codes,
            "scale": row_scales(weight),
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
        q, x_scale, zero = rows_of(x, spec.act, m, k, static, static_zero)
        return _launch(q, codes, x_scale, scale, zero, colsum, bias, spec, x.dtype)


class TritonFp8BlockScaledMMKernel(_TritonScaledMM):
    """Block-scaled FP8: weights in blocks, inputs in groups of a row, each tile's sum scaled in float32.

    Blocks are counted from the whole weight's first row and column, so that a tensor-parallel cut may fall inside one.
    """

    families = ("fp8_block", "fp8", "mxfp8")
    rate = "fp8"
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def _units(cls, platform: Platform) -> Verdict:
        if platform.vendor == "cuda" and platform.capability < 89:
            return no(f"{platform.arch} has no FP8 matrix instructions", "sm89 or newer")
        if platform.vendor == "rocm" and platform.arch not in ("gfx950", "gfx1200", "gfx1201"):
            return no(f"{platform.arch} has no matrix instructions for OCP FP8", "gfx950, gfx1200 or gfx1201")
        if platform.vendor == "xpu":
            return no("Intel GPUs have no FP8 matrix instructions that Triton uses", "cuda:sm89 or newer")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """float8_e4m3fn weights whose blocks, and inputs whose groups, are of 32 columns or a multiple."""
        act = spec.act
        if spec.weight.name != "float8_e4m3fn":
            return no(f"weight type {spec.weight}", "float8_e4m3fn weights")
        if act is None or act.dtype.name != "float8_e4m3fn" or act.granularity != "group" or act.scale == "e4m3":
            return no(f"input scheme {act or 'of 16 bits'}", "float8_e4m3fn inputs in groups of a row")
        if spec.ragged or spec.act_order or spec.zero != "none" or spec.scale2_block is not None:
            return no("columns in another order, or zero points", "a plain block-scaled weight")
        if _step(spec) < 32:
            return no(f"scales change within {_step(spec)} columns", "blocks, groups and cuts of a multiple of 32 columns")
        return YES

    @classmethod
    def _shares(cls, spec: LinearSpec) -> tuple[float, float]:
        """Scales between products of 32 columns cost far more than between products of 128."""
        return (0.8, 0.35) if _step(spec) >= 64 else (0.25, 0.115)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes float8_e4m3fn [N, K'], K' a multiple of 16; scale float32 on the weight's grid."""
        k = weight.spec.k
        codes = torch.nn.functional.pad(weight.codes, (0, -k % _ALIGN)) if k % _ALIGN else weight.codes.clone()
        return {"codes": codes.view(torch.float8_e4m3fn), "scale": weight.scales().contiguous()}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scale = packed
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        q, x_scale = groups_of(x, spec.act, x.shape[0], codes.shape[1])
        return _launch(q, codes, x_scale, scale, None, scale, bias, spec, x.dtype)


@functools.lru_cache(maxsize=4096)
def _step(spec: LinearSpec) -> int:
    """Columns that share a scale of the weight and one of the input, wherever they start: a power of two up to 128."""
    assert spec.act is not None
    common = math.gcd(128, spec.act.group_size)
    if spec.block[1] < spec.k:
        common = math.gcd(common, spec.block[1], spec.block_offset[1])
    return common


def _launch(
    q: Tensor, codes: Tensor, x_scale: Tensor, scale: Tensor, zero: Tensor | None, colsum: Tensor, bias: Tensor | None,
    spec: LinearSpec, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    (m, k), n = q.shape, spec.n
    # The interpreter rounds to bfloat16 in its own way and multiplies small types as they are.
    y = torch.empty(m, n, dtype=torch.float32 if interpreted() else dtype, device=q.device)
    act = spec.act
    assert act is not None
    grouped = act.granularity == "group"
    amd = torch.version.hip is not None
    kind, hopper = spec.weight.name if grouped else "int8", _hopper(q.device)
    bm, bn, bk, slices, warps, stages = _tile(m, n, _step(spec) if grouped else 128, kind, amd, hopper)
    (block_n, block_k), (off_n, off_k) = spec.block, spec.block_offset
    _device().scaled_mm_kernel[(-(-n // bn), -(-m // bm))](
        q, codes, x_scale, scale, x_scale if zero is None else zero, colsum, q if bias is None else bias, y,
        m, n, k, x_scale.shape[1] if grouped else 0, scale.shape[1] if grouped else 0,
        off_n if grouped else 0, off_k if grouped else 0,
        A_TOKEN=x_scale.numel() > 1, BLOCK_N=block_n if grouped else 1, BLOCK_K=block_k if grouped else 0,
        GROUP=act.group_size if grouped else 1, HAS_ZERO=zero is not None, HAS_BIAS=bias is not None,
        EVEN=k % (slices * bk) == 0, UPCAST=interpreted(), SLICES=slices, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y.to(dtype)


def _tile(
    m: int, n: int, bk: int, kind: str = "int8", amd: bool = False, hopper: bool = False
) -> tuple[int, int, int, int, int, int]:
    """(BM, BN, BK, slices, warps, stages). Few rows: narrow tiles and several slices of K, while the weight's bytes are what is
    waited for. hopper: the fastest of some thirty tiles, measured on an H200 for three layers and eight numbers of rows. amd:
    fewer columns in flight, so that waves of 32 keep block-scaled sums in their 256 registers (by compiling for gfx1201)."""
    if interpreted():
        return 16, 32, bk, 1 + (m <= 16), 4, 1
    if hopper:
        return _hopper_tile(m, n, bk, kind)
    if m <= 16:
        return 16, 32, bk, 4, 4, 3
    if m <= 64:
        return 64, 64, bk, 1, 4, 2 if amd else 4
    return (128, 128, min(bk, 64), 1, 8, 2) if amd else (128, 128, bk, 1, 8, 3)


def _hopper_tile(m: int, n: int, bk: int, kind: str) -> tuple[int, int, int, int, int, int]:
    wide = n >= 16384  # rows of W for four programs of 32 on each multiprocessor
    if m <= 16 and bk == 32:
        return (16, 64, bk, 2, 4, 4) if wide else (16, 32, bk, 4, 4, 4)
    if m <= 16:
        return (16, 32, bk, 1, 4, 4) if wide else (16, 16, bk, 4, 4, 4)
    if m <= 32 or (bk == 32 and m <= 64 and not wide):
        return 32, 32, bk, 4, 4, 3
    if kind == "int8" and m * n >= 1 << 21:
        return 128, 128, bk, 1, 8, 3
    if m * n >= 1 << 20:
        return 64, 128, bk, 1, 4, 4
    return (64, 32, bk, 1, 4, 8) if m <= 64 else (64, 64, bk, 1, 4, 5)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _device() -> Any:
    from bitline.kernels.triton.device import scaled_mm

    return scaled_mm
