"""W8A8 FP8 by `torch._scaled_mm`: cuBLASLt (per-tensor), CUTLASS (row-wise) or, on AMD, hipBLASLt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.triton.act_quant import quantize_padded
from bitline.platform import Platform
from bitline.quantized_input import pad_codes
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_ALIGN = 16  # `_scaled_mm` takes N and K in multiples of 16
_AMD = ("gfx942", "gfx950", "gfx1200", "gfx1201")


class _TorchFP8Kernel(Kernel):
    """Base of the FP8 kernels: pads codes to multiples of 16 and quantizes activations as the scheme asks.

    min_m: the value that smaller M are padded to.
    """

    platforms: ClassVar[tuple[str, ...]] = ("cuda", "rocm", "cpu")
    backend = "torch"
    families = ("fp8",)
    quantizes_input = True
    takes_quantized_input = True
    measured = ("sm90",)
    # No float32: FP8 tensor cores accumulate with fewer bits than a float32 output promises.
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    min_m: ClassVar[int] = 1

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """NVIDIA from sm89; AMD GPUs with OCP FP8, and gfx942 with its `fnuz` variant, whose codes stand for half the value."""
        if platform.vendor == "cpu":
            return no("torch's FP8 matmul on a CPU is 100 to 1000 times slower than its bfloat16 one", "cuda:sm89 or newer")
        if platform.vendor == "cuda" and platform.capability < 89:
            return no(f"{platform.arch} has no FP8 matrix instructions", "sm89 or newer")
        if platform.vendor == "rocm" and platform.arch not in _AMD:
            return no(f"{platform.arch} has no FP8 matrix instructions", ", ".join(_AMD))
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """float8_e4m3fn weights and activations, scales that do not change along K."""
        if spec.weight.name != "float8_e4m3fn":
            return no(f"weight type {spec.weight}", "float8_e4m3fn weights")
        if spec.act is None:
            return no("activations stay in 16 bits", "a scheme with FP8 activations, such as FP8_DYNAMIC")
        if spec.act.dtype.name != "float8_e4m3fn" or spec.act.scale != "float" or spec.act.granularity == "group":
            return no(f"activation scheme {spec.act}", "float8_e4m3fn activations scaled per tensor or per token")
        if spec.block[1] != spec.k or spec.ragged or spec.zero != "none":
            return no("weight scales change along K", "one weight scale per tensor or per channel")
        return cls._takes_scales(spec)

    @classmethod
    def _takes_scales(cls, spec: LinearSpec) -> Verdict:
        """Whether this way of scaling fits the granularity of the spec's scales."""
        raise NotImplementedError

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes float8_e4m3fn [N', K'] in the input's column order, scale float32 [N'], input_scale float32 [1, 1] or empty.

        On gfx942 codes are float8_e4m3fnuz and scales are doubled.
        """
        s = weight.spec
        n, k = _aligned(s.n), _aligned(s.k)
        codes = torch.zeros(n, k, dtype=torch.uint8, device=weight.device)
        if weight.perm is None:
            codes[: s.n, : s.k] = weight.codes
        else:
            codes[: s.n, weight.perm.long()] = weight.codes
        row = (torch.arange(s.n, device=weight.device) + s.block_offset[0]) // s.block[0]
        scale = pad(weight.scales()[:, 0].index_select(0, row), (0, n - s.n), value=1.0)
        static = weight.input_scale if s.act is not None and not s.act.dynamic else None
        absent = torch.empty(0, device=weight.device)
        fnuz = _uses_fnuz(weight.device)
        return {
            "codes": to_fnuz(codes) if fnuz else codes.view(torch.float8_e4m3fn),
            "scale": 2 * scale if fnuz else scale,
            "input_scale": absent if static is None else static.float().reshape(1, 1),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        m = x.shape[0]
        if m == 0:
            return x.new_empty(0, spec.n)
        codes, _scale, static = packed
        assert spec.act is not None
        a, a_scale, _zero = quantize_padded(x, spec.act, max(m, cls.min_m), codes.shape[1], static)
        return cls._multiply(a, a_scale.view(-1, 1), packed, bias, spec)[:m].contiguous()

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        m, rows = codes.shape[0], max(codes.shape[0], cls.min_m)
        a = pad_codes(codes, rows, packed[0].shape[1])
        per_token = spec.act is not None and spec.act.granularity == "token"
        a_scale = pad(scales, (0, rows - m), value=1.0) if per_token else scales
        return cls._multiply(a, a_scale.view(-1, 1), packed, bias, spec)[:m].contiguous()

    @classmethod
    def _multiply(cls, a: Tensor, a_scale: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """E4M3 codes [M', K'] with scales [M', 1] or [1, 1] times the packed weight: [M', N] in act_dtype."""
        codes, scale, _static = packed
        if codes.dtype == torch.float8_e4m3fnuz:
            a, a_scale = to_fnuz(a), 2 * a_scale
        if bias is not None and codes.shape[0] != spec.n:
            bias = pad(bias, (0, codes.shape[0] - spec.n))
        return cls._scaled_mm(a, a_scale, codes, scale, bias, spec.act_dtype)[:, : spec.n]

    @classmethod
    def _scaled_mm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """FP8 a [M, K'] with scale [M or 1, 1] times FP8 w [N', K'] with scale [N'] -> [M, N'] in dtype."""
        raise NotImplementedError

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Activation quantization as one pass over x and a launch; the GEMM at 75 % of peak."""
        quantize = 3 * m * spec.k * spec.act_dtype.itemsize / platform.rates.bandwidth + platform.rates.launch
        gemm = roofline(spec, platform, m, weight_bytes=spec.n * spec.k, rate=platform.rates.of("fp8"))
        return quantize + gemm / 0.75

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Padded codes and one float32 scale per channel."""
        return _aligned(spec.n) * (_aligned(spec.k) + 4)


class PerTensorTorchFP8ScaledMMLinearKernel(_TorchFP8Kernel):
    """Per-tensor weight and activation scales, both applied by the GEMM (cuBLASLt; hipBLASLt on AMD)."""

    priority = 2

    @classmethod
    def _takes_scales(cls, spec: LinearSpec) -> Verdict:
        if spec.block != (spec.n, spec.k):
            return no("the weight has per-channel scales", "RowWiseTorchFP8ScaledMMLinearKernel, or one scale for the weight")
        if spec.act is not None and spec.act.granularity != "tensor":
            return no("activations have per-token scales", "RowWiseTorchFP8ScaledMMLinearKernel, or one activation scale")
        return YES

    @classmethod
    def _scaled_mm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(a, w.t(), a_scale.reshape(()), scale[0].reshape(()), bias=bias, out_dtype=dtype)


class ROCmFP8ScaledMMLinearKernel(PerTensorTorchFP8ScaledMMLinearKernel):
    """PerTensorTorchFP8ScaledMMLinearKernel (hipBLASLt) under the name of vLLM's kernel for AMD GPUs."""

    platforms = ("rocm",)
    backend = "rocm"
    priority = -10


class RowWiseTorchFP8ScaledMMLinearKernel(_TorchFP8Kernel):
    """Per-channel weight and per-token activation scales applied by the GEMM (CUTLASS inside torch), bfloat16 output only."""

    priority = 1
    act_dtypes = (torch.bfloat16,)
    min_m = 16  # torch's row-wise GEMM takes 1.4 times as long at M=1 as at M=16

    @classmethod
    def _takes_scales(cls, spec: LinearSpec) -> Verdict:
        if spec.act is not None and spec.act.granularity != "token":
            fix = "PerTensor- or ChannelWiseTorchFP8ScaledMMLinearKernel, or a scale per token"
            return no("activations have one scale", fix)
        return YES

    @classmethod
    def _scaled_mm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(a, w.t(), a_scale, scale.reshape(1, -1), bias=bias, out_dtype=dtype)


class ChannelWiseTorchFP8ScaledMMLinearKernel(_TorchFP8Kernel):
    """An unscaled GEMM into float32, then scales and bias: any mix of per-tensor, per-token and per-channel scales, any dtype."""

    @classmethod
    def _takes_scales(cls, spec: LinearSpec) -> Verdict:
        return YES

    @classmethod
    def _scaled_mm(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        one = _one(a.device)
        y = torch._scaled_mm(a, w.t(), one, one, out_dtype=torch.float32)
        y.mul_(a_scale).mul_(scale)
        return y.to(dtype) if bias is None else y.add_(bias).to(dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """As the others, plus a float32 result that is written, scaled twice and rounded."""
        passes = 4 * 8 * m * spec.n / platform.rates.bandwidth + platform.rates.launch
        return super().cost(spec, platform, m) + passes


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@functools.cache
def _one(device: torch.device) -> Tensor:
    """A scale of 1 on each device. The warm-up before a CUDA graph capture creates it, so capture allocates nothing."""
    return torch.ones((), device=device)


def to_fnuz(codes: Tensor) -> Tensor:
    """E4M3 codes, or their bytes, as float8_e4m3fnuz of half the value.

    The bits are the same but for -0 and NaN: fnuz has an exponent bias larger by one, a single zero, and 0x80 for NaN.
    """
    raw = codes.view(torch.uint8)
    nan = raw.new_full((), 0x80)
    return torch.where((raw & 0x7F) == 0x7F, nan, torch.where(raw == 0x80, raw.new_zeros(()), raw)).view(torch.float8_e4m3fnuz)


@functools.cache
def _uses_fnuz(device: torch.device) -> bool:
    """Whether the device is a gfx942, whose FP8 predates the OCP standard."""
    if device.type != "cuda" or torch.version.hip is None:
        return False
    return str(torch.cuda.get_device_properties(device).gcnArchName).startswith("gfx942")
