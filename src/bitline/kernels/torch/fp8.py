"""FP8 weights times FP8 inputs on torch's own scaled matrix product (cuBLASLt, CUTLASS or hipBLASLt inside torch)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.kernels.base import Kernel, Packed, roofline
from bitline.kernels.triton.act_quant import rows_of
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_ALIGN = 16  # torch's scaled product wants K and N in multiples of 16
_AMD = ("gfx942", "gfx950", "gfx1200", "gfx1201")


class _TorchFP8Kernel(Kernel):
    """What the three kernels share: FP8 codes padded to multiples of 16, an input quantized as the scheme asks."""

    platforms: ClassVar[tuple[str, ...]] = ("cuda", "rocm", "cpu")
    backend = "torch"
    families = ("fp8",)
    quantizes_input = True
    measured = ("sm90",)
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.bfloat16,
        torch.float16,
    )  # FP8 units sum in fewer bits than a float32 output promises
    min_rows: ClassVar[int] = 1

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """NVIDIA from sm89, AMD with FP8 units: OCP's, and gfx942's, whose codes stand for half as much (`fnuz`)."""
        if platform.vendor == "cpu":
            return no("torch's FP8 product on a CPU is 100 to 1000 times slower than its bfloat16 one", "cuda:sm89 or newer")
        if platform.vendor == "cuda" and platform.capability < 89:
            return no(f"{platform.arch} has no FP8 matrix instructions", "sm89 or newer")
        if platform.vendor == "rocm" and platform.arch not in _AMD:
            return no(f"{platform.arch} has no FP8 matrix instructions", ", ".join(_AMD))
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """float8_e4m3fn weights with one scale, or one per row, and inputs quantized to float8_e4m3fn."""
        if spec.weight.name != "float8_e4m3fn":
            return no(f"weight type {spec.weight}", "float8_e4m3fn weights")
        if spec.act is None:
            return no("the input stays in 16 bits", "a scheme with FP8 inputs, such as FP8_DYNAMIC")
        if spec.act.dtype.name != "float8_e4m3fn" or spec.act.scale != "float" or spec.act.granularity == "group":
            return no(f"input scheme {spec.act}", "float8_e4m3fn inputs scaled per tensor or per token")
        if spec.block[1] != spec.k or spec.ragged or spec.zero != "none":
            return no("weight scales change along K", "one weight scale per tensor or per row")
        return cls._scales(spec)

    @classmethod
    def _scales(cls, spec: LinearSpec) -> Verdict:
        """Whether this way of scaling can do what the spec asks."""
        raise NotImplementedError

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes float8_e4m3fn [N', K'] in input order, scale float32 [N'], input_scale float32 [1, 1] or empty. On gfx942 codes
        are float8_e4m3fnuz and scales twice the weight's."""
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
        halved = _takes_fnuz(weight.device)
        return {
            "codes": fnuz(codes) if halved else codes.view(torch.float8_e4m3fn),
            "scale": 2 * scale if halved else scale,
            "input_scale": absent if static is None else static.float().reshape(1, 1),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        m = x.shape[0]
        if m == 0:
            return x.new_empty(0, spec.n)
        codes, scale, static = packed
        halved = codes.dtype == torch.float8_e4m3fnuz
        a, a_scale = _quantize(x, spec, static, codes.shape[1], max(m, cls.min_rows), fused=not halved)
        a, a_scale = (fnuz(a), 2 * a_scale) if halved else (a, a_scale)
        if bias is not None and codes.shape[0] != spec.n:
            bias = pad(bias, (0, codes.shape[0] - spec.n))
        return cls._product(a, a_scale, codes, scale, bias, x.dtype)[:m, : spec.n].contiguous()

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """a FP8 [M, K'] with scale [M or 1, 1], w FP8 [N', K'] with scale [N'] -> [M, N'] in dtype."""
        raise NotImplementedError

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Quantizing x is a pass over it and a launch; the product reaches 75 % of its rates."""
        quantize = 3 * m * spec.k * spec.act_dtype.itemsize / platform.rates.bandwidth + platform.rates.launch
        product = roofline(spec, platform, m, weight_bytes=spec.n * spec.k, rate=platform.rates.of("fp8"))
        return quantize + product / 0.75

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Padded codes and one float32 scale a row."""
        return _aligned(spec.n) * (_aligned(spec.k) + 4)


class PerTensorTorchFP8ScaledMMLinearKernel(_TorchFP8Kernel):
    """One scale for the weight and one for the input, both applied by the product itself."""

    priority = 2

    @classmethod
    def _scales(cls, spec: LinearSpec) -> Verdict:
        if spec.block != (spec.n, spec.k):
            return no("the weight has a scale per row", "RowWiseTorchFP8ScaledMMLinearKernel, or one scale for the weight")
        if spec.act is not None and spec.act.granularity != "tensor":
            return no("the input has a scale per token", "RowWiseTorchFP8ScaledMMLinearKernel, or one scale for the input")
        return YES

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(a, w.t(), a_scale.reshape(()), scale[0].reshape(()), bias=bias, out_dtype=dtype)


class RowWiseTorchFP8ScaledMMLinearKernel(_TorchFP8Kernel):
    """A scale per row of the weight and per token, applied by the product itself, which rounds to bfloat16 only."""

    priority = 1
    act_dtypes = (torch.bfloat16,)
    min_rows = 16  # torch's row-wise product takes 1.4 times as long with one row as with 16

    @classmethod
    def _scales(cls, spec: LinearSpec) -> Verdict:
        if spec.act is not None and spec.act.granularity != "token":
            return no("the input has one scale", "PerTensor- or ChannelWiseTorchFP8ScaledMMLinearKernel, or a scale per token")
        return YES

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(a, w.t(), a_scale, scale.reshape(1, -1), bias=bias, out_dtype=dtype)


class ChannelWiseTorchFP8ScaledMMLinearKernel(_TorchFP8Kernel):
    """The product unscaled into float32, scales and bias after it: every mixture of scales, float16 output too."""

    @classmethod
    def _scales(cls, spec: LinearSpec) -> Verdict:
        return YES

    @classmethod
    def _product(cls, a: Tensor, a_scale: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        one = _one(a.device)
        y = torch._scaled_mm(a, w.t(), one, one, out_dtype=torch.float32)
        y.mul_(a_scale).mul_(scale)
        return y.to(dtype) if bias is None else y.add_(bias).to(dtype)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Besides, a float32 result that is written, scaled twice and rounded."""
        passes = 4 * 8 * m * spec.n / platform.rates.bandwidth + platform.rates.launch
        return super().cost(spec, platform, m) + passes


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@functools.cache
def _one(device: torch.device) -> Tensor:
    """A scale of 1 for each device, made before any graph is captured by the warm-up that capturing needs anyway."""
    return torch.ones((), device=device)


def fnuz(codes: Tensor) -> Tensor:
    """E4M3's codes, or their bytes, as float8_e4m3fnuz of half the value, whose bits are the same but for -0 and NaN: it has one
    more of exponent bias, one zero, and 0x80 for NaN."""
    raw = codes.view(torch.uint8)
    nan = raw.new_full((), 0x80)
    return torch.where((raw & 0x7F) == 0x7F, nan, torch.where(raw == 0x80, raw.new_zeros(()), raw)).view(torch.float8_e4m3fnuz)


@functools.cache
def _takes_fnuz(device: torch.device) -> bool:
    """AMD's gfx942, whose FP8 units are of before OCP's standard."""
    if device.type != "cuda" or torch.version.hip is None:
        return False
    return str(torch.cuda.get_device_properties(device).gcnArchName).startswith("gfx942")


def _quantize(
    x: Tensor, spec: LinearSpec, static: Tensor, columns: int, rows: int, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """x [M, K] to FP8 codes [rows, columns], zeros beyond M and K, and its scale float32 [rows, 1] or [1, 1]."""
    assert spec.act is not None
    codes, scale, _none = rows_of(x, spec.act, rows, columns, static, fused=fused)
    return codes, scale.view(-1, 1)
