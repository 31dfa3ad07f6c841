"""W8A8 by `torch._int_mm`: oneDNN on CPUs, cuBLAS int8 tensor cores on CUDA GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.cpu import costs as cpu_costs
from bitline.kernels.integers import channel_scales, fits_int8, int8_codes, per_channel_only
from bitline.kernels.triton.act_quant import quantize_padded
from bitline.platform import Platform, cpu_features
from bitline.quantized_input import pad_codes
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

ALIGN = 8  # cuBLAS takes K and N in multiples of 8; on a CPU K = 1 gives wrong sums
MIN_CUDA_M = 32  # `_int_mm` on CUDA takes only M > 16
ACCUMULATORS = {"cpu": 1 << 20, "cuda": 1 << 25}  # int32 accumulators of an output tile: what a cache holds until they are scaled
CACHED = 1 << 22  # bytes of weight that stay in cache while several tokens pass over them


class TorchInt8ScaledMMLinearKernel(Kernel):
    """`torch._int_mm` on int8 codes: y = (Xq @ Wq.T - zero * colsum(Wq)) * x_scale * w_scale + bias.

    Activations are quantized per token or per tensor, dynamically or statically, with or without a zero point (AZP).
    Accumulation is exact in int32; scales are applied in float32 and the result is rounded once. Weights of fewer than 8 bits
    are widened to bytes.
    """

    platforms: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    families = ("int8",)
    quantizes_input = True
    takes_quantized_input = True
    measured = ("sm90",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Any x86-64 or Arm CPU with vector units; CUDA GPUs with int8 tensor cores."""
        if platform.vendor == "cuda" and platform.capability < 75:
            return no(f"{platform.arch} has no int8 tensor cores", "sm75 or later")
        if platform.vendor == "cpu" and not platform.features & {"avx2", "avx512", "neon"}:
            return no("this CPU has no AVX2, AVX-512 or Neon", "a CPU with AVX2")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Integer activations of up to 8 bits per token or tensor; symmetric integer weights with per-channel scales."""
        act = spec.act
        if act is None or act.dtype.kind != "int" or act.dtype.bits > 8:
            what = "16 or 32 bit" if act is None else f"{act.dtype}"
            return no(f"the scheme has {what} activations", "int8 activations (W8A8)")
        if act.granularity == "group":
            return no(f"activation scheme {act}: the scale changes along K", "activation scales per token or per tensor")
        if not fits_int8(spec):
            return no(f"{spec.weight} codes are not integers of -128..127 times a step", "a signed or biased integer type")
        if spec.k > 1 << 16:
            return no(f"int32 accumulators over K of {spec.k} can overflow", "K up to 65536")
        return per_channel_only(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int8 [N', K'], padded to multiples of 8; scale float32 [N]; colsum int32 [N] for asymmetric activations."""
        spec, device = weight.spec, weight.device
        codes = int8_codes(weight)
        if spec.k % ALIGN or spec.n % ALIGN:
            codes = pad(codes, (0, -spec.k % ALIGN, 0, -spec.n % ALIGN))
        absent = torch.empty(0, device=device)
        asymmetric = spec.act is not None and not spec.act.symmetric
        return {
            "codes": codes,
            "scale": channel_scales(weight),
            "colsum": codes[: spec.n].sum(1, dtype=torch.int32) if asymmetric else absent,
            "input_scale": absent if weight.input_scale is None else weight.input_scale.clone(),
            "input_zero": absent if weight.input_zero is None else weight.input_zero.clone(),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        assert spec.act is not None
        q, x_scale, zero = quantize_padded(x, spec.act, x.shape[0], packed[0].shape[1], *packed[3:])
        return _multiply(q, x_scale, zero, packed, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        return _multiply(pad_codes(codes, 0, packed[0].shape[1]), scales, zero, packed, bias, spec)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The GEMM, activation quantization, and the scaling of the accumulators."""
        gemm = roofline(spec, platform, m, weight_bytes=cls.packed_bytes(spec), rate=platform.rates.int8)
        passes = 4 * m * (6 * spec.k + 6 * spec.n)  # bytes of float32 and int32
        if platform.vendor != "cpu":
            return gemm + passes / platform.rates.bandwidth + 5 * platform.rates.launch
        if m > 8 or (m > 1 and "amx" in platform.features):  # oneDNN repacks the weight in each call
            gemm += spec.n * spec.k * 5e-11 * cpu_costs.core_scale(platform)
        return gemm + passes / (3 * platform.rates.bandwidth) + 6 * cpu_costs.CALL

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """One byte per weight and four per channel."""
        return (spec.n + -spec.n % ALIGN) * (spec.k + -spec.k % ALIGN) + 4 * spec.n


def _multiply(
    q: Tensor, x_scale: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
) -> Tensor:
    """Codes int8 [M, K'] with scales and zero points [M] or [1] times the packed weight: [M, N] in act_dtype."""
    codes, scale, colsum, *_static = packed
    x_scale, zero = x_scale.view(-1, 1), None if zero is None else zero.view(-1, 1)
    y = torch.empty(q.shape[0], spec.n, dtype=spec.act_dtype, device=q.device)
    bias32 = None if bias is None else bias.float()
    tile_m, tile_n = _output_tile(y.shape[0], codes.shape[0], q.device.type)
    for r, c in itertools.product(range(0, y.shape[0], tile_m), range(0, spec.n, tile_n)):
        rows, columns = slice(r, r + tile_m), slice(c, min(c + tile_n, spec.n))
        acc = _int_mm(q[rows], codes[c : c + tile_n])[:, : columns.stop - c]
        if zero is not None:
            acc = acc - (zero if zero.shape[0] == 1 else zero[rows]) * colsum[columns]
        out = (acc * (x_scale if x_scale.shape[0] == 1 else x_scale[rows])).mul_(scale[columns])
        y[rows, columns] = out if bias32 is None else out.add_(bias32[columns])
    return y


def _output_tile(m: int, n: int, device: str) -> tuple[int, int]:
    """(tile_m, tile_n). tile_m covers M up to 1024, since every call repacks the part of the weight that it reads."""
    tile_m = min(m, 1024)
    return tile_m, min(n, max(ALIGN, ACCUMULATORS[device] // tile_m // ALIGN * ALIGN))


def _int_mm(q: Tensor, codes: Tensor) -> Tensor:
    """q int8 [M, K] @ codes.T int8 [K, N] -> int32 [M, N]."""
    m, (n, k) = q.shape[0], codes.shape
    if q.device.type != "cpu":
        padded = pad(q, (0, 0, 0, MIN_CUDA_M - m)) if m <= 16 else q
        return torch._int_mm(padded, codes.t())[:m]
    if not 1 < m <= 8 or "amx" in cpu_features():
        return torch._int_mm(q, codes.t())
    # At M=1 oneDNN runs a bandwidth-bound GEMV; from M=2 on it repacks the weight, which takes ten times as long.
    acc = torch.empty(m, n, dtype=torch.int32)
    step = max(1, CACHED // k)
    for r in range(0, n, step):
        part = codes[r : r + step].t()
        for row in range(m):
            acc[row : row + 1, r : r + step] = torch._int_mm(q[row : row + 1], part)
    return acc
