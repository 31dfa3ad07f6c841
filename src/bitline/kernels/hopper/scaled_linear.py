"""GluonHopperScaledMMLinearKernel: FP8 and int8 linear with quantized activations on an H100 or H200."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline.errors import InputError
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.hopper.launch import num_sms
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.hopper.quantized_x import laid_out
from bitline.kernels.hopper.runtime import fast_empty, prepare, raw_stream
from bitline.kernels.hopper.scaled_config import SCALED_SMALL_M, m_bucket
from bitline.kernels.hopper.scaled_heuristics import estimated_us
from bitline.kernels.hopper.scaled_plans import ScaledLargeMPlan, ScaledPersistentPlan, ScaledSmallMPlan, persistent_plan
from bitline.kernels.hopper.scaled_scheme import check_spec, scaled_scheme
from bitline.kernels.hopper.tensor_scale import is_dynamic_per_tensor, scale_of, tensor_scale_us
from bitline.kernels.hopper.w4a8_config import W4A8_SMALL_M
from bitline.kernels.hopper.w4a8_plans import W4A8PersistentPlan, W4A8SmallMPlan
from bitline.kernels.hopper.w4a8_scheme import check_w4a8, w4a8_scheme
from bitline.kernels.integers import channel_scales, int8_codes
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

Plan = ScaledSmallMPlan | ScaledPersistentPlan | ScaledLargeMPlan | W4A8SmallMPlan | W4A8PersistentPlan
_plans: dict[tuple[int, int, bool, int], Plan] = {}


@functools.lru_cache(maxsize=4096)
def small_m_limit(spec: LinearSpec) -> int:
    """The largest M of the kernel that quantizes x inside its launch."""
    return W4A8_SMALL_M if check_w4a8(spec) else SCALED_SMALL_M


def plan_of(spec: LinearSpec, m: int, has_bias: bool, device: int) -> Plan:
    """The plan of a layer for M on a GPU. `spec` is identified by its id."""
    key = (id(spec), m if m > small_m_limit(spec) else m_bucket(m), has_bias, device)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) > 1 << 16:
            _plans.clear()
        plan = _plans[key] = _new_plan(spec, m, has_bias, num_sms(device))
    return plan


def _new_plan(spec: LinearSpec, m: int, has_bias: bool, sms: int) -> Plan:
    """The plan of a layer of any of this package's kernels with quantized activations."""
    small = m <= small_m_limit(spec)
    if check_w4a8(spec):
        return (W4A8SmallMPlan if small else W4A8PersistentPlan)(spec, w4a8_scheme(spec), m, has_bias, sms)
    scheme = scaled_scheme(spec)
    return ScaledSmallMPlan(spec, scheme, m, has_bias, sms) if small else persistent_plan(spec, scheme, m, has_bias, sms)


def _check_device(x: Tensor, weight: Tensor) -> None:
    """InputError where x is not on the weight's GPU: the launcher takes any address."""
    device = x.get_device()
    if device < 0 or weight.get_device() != device:
        raise InputError("a layer of this kernel and its input are on one GPU", found=f"an input on {x.device}, weights on "
                         f"{weight.device}", fix="move them, or choose a kernel for the weight's device")  # fmt: skip


def run(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """y [M, N]; x [M, K] contiguous. InputError where x is not on the weight's GPU."""
    _check_device(x, packed[0])
    plan = plan_of(spec, x.shape[0], bias is not None, x.get_device())
    if spec.k % 8:
        x = pad(x, (0, -spec.k % 8))
    elif x.data_ptr() % 16:
        x = x.clone()
    if bias is not None and bias.data_ptr() % 16:
        bias = bias.clone()
    if spec.act is not None and is_dynamic_per_tensor(spec.act):
        packed = (*packed[:-2], scale_of(x, spec.act), packed[-1])
    return plan(x, packed, bias)


def run_quantized(
    codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
) -> Tensor:
    """y [M, N] of codes [M, K], scales and zero points as in `Kernel.apply_quantized`. InputError as `run`.

    The kernels are those of `run` for the same M, so that the bits are the same. With M = 1 that for M up to 8, whose tiles and
    sums are the same: only a launch for M = 1 may have each CTA quantize x for itself.
    """
    for tensor in (codes, scales) if zero is None else (codes, scales, zero):
        _check_device(tensor, packed[0])
    plan = plan_of(spec, max(2, codes.shape[0]), bias is not None, codes.get_device())
    if bias is not None and bias.data_ptr() % 16:
        bias = bias.clone()
    x = laid_out(codes, scales, zero, plan.scheme_of_x, plan.space.stride, plan.fragment_order)
    return plan.multiply(x, packed, bias)


class EagerScaledLinear:
    """x [..., K] to y [..., N], or None where `run` must be called: as `eager.EagerLinear`.

    That is: a shape not run before, an x that must be copied first, another dtype or device, and a weight whose storage has
    moved. The weight's tensors are kept alive here.
    """

    def __init__(self, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> None:
        self.layer = packed, bias, spec
        self.weight, self.dtype, self.device = packed[0], spec.act_dtype, packed[0].get_device()
        self.weight_address = packed[0].data_ptr()
        self.empty = fast_empty()
        self.launches: dict[torch.Size, tuple[Any, ...] | None] = {}  # plan, its arguments, shape and strides of y; None: `run`

    def __reduce__(self) -> Any:
        return EagerScaledLinear, self.layer  # a copy has its own tensors

    def __call__(self, x: Tensor) -> Tensor | None:
        """See the class."""
        entry = self.launches.get(x.shape)
        if entry is None:
            if x.shape not in self.launches:
                self._record(x)
            return None
        if (
            x.data_ptr() & 15 or x.dtype is not self.dtype or x.get_device() != self.device or not x.is_contiguous()
            or self.weight.data_ptr() != self.weight_address
        ):  # fmt: skip
            return None
        plan, prepared, y_shape, y_strides = entry
        y: Tensor = self.empty(y_shape, y_strides, self.dtype)
        plan.run(x, prepared, y, raw_stream(self.device))
        return y

    def _record(self, x: Tensor) -> None:
        """Make the entry of a shape, once its kernels are compiled."""
        packed, bias, spec = self.layer
        if x.dim() == 0 or x.shape[-1] != spec.k or x.dtype is not self.dtype or x.numel() == 0 or x.get_device() != self.device:
            return
        m = x.numel() // spec.k
        plan = plan_of(spec, m, bias is not None, self.device)
        if plan.find_binary(self.device) is None:
            return
        if len(self.launches) >= 256:
            self.launches.clear()
        copies = spec.k % 8 or (bias is not None and bias.data_ptr() % 16) or (m > small_m_limit(spec) and spec.n % 8)
        y_shape = (*x.shape[:-1], spec.n)
        strides = torch.empty(y_shape, device="meta").stride()
        self.launches[x.shape] = None if copies else (plan, plan.prepare(m, packed, bias), y_shape, strides)


class GluonHopperScaledMMLinearKernel(Kernel):
    """FP8 and int8 codes of x times codes of W by wgmma, on the same weights for all M.

    FP8 per tensor, per channel and per token, static or dynamic, and in blocks of multiples of 128 columns; int8 with or without
    a zero point of x. Up to M = 64 x is quantized inside the launch, above in one launch before.
    """

    platforms = ("cuda",)
    backend = "gluon"
    families: ClassVar[tuple[str, ...]] = ("int8", "fp8", "fp8_block")
    quantizes_input = True
    takes_quantized_input = True
    priority = 20
    measured = ("sm90",)
    act_dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """As the weight-only Gluon kernel."""
        return GluonHopperLinearKernel.is_supported(platform)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """E4M3 weights and activations, or integers of up to 8 bits and int8 activations; any shape."""
        if check_w4a8(spec):
            return no("4-bit weights", "GluonHopperW4A8LinearKernel")
        return check_spec(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """weight: codes E4M3 or int8 in the input's column order, in contiguous blocks of 64 x 128 with zero
        padding, [blocks * 64, 128]. scale: float32 [row blocks, column
        blocks]. colsum: int32 [N] where x has a zero point. input_scale float32 [1], input_zero int32 [1]: of a static scheme.
        What a layer lacks is empty."""
        if weight.device.type == "cuda":
            prepare()
        spec, absent = weight.spec, torch.empty(0, device=weight.device)
        scheme = scaled_scheme(spec)
        if scheme.act.fp8:
            codes, scale = _fp8_codes(weight), weight.scales()
        else:
            codes, scale = int8_codes(weight), channel_scales(weight).view(-1, 1)
        static, zero = scheme.act.granularity == "tensor", weight.input_zero
        if static and scheme.act.asymmetric and zero is None:
            zero = torch.zeros(1, device=weight.device)
        return {
            "weight": _blocks(codes),
            "scale": scale.to(torch.float32, copy=True).contiguous(),
            "colsum": codes.sum(1, dtype=torch.int32) if scheme.traits.zero_points else absent.int(),
            "input_scale": absent if weight.input_scale is None else weight.input_scale.to(torch.float32, copy=True).reshape(1),
            "input_zero": absent.int() if zero is None else zero.to(torch.int32, copy=True).reshape(1),
        }

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        if x.shape[0] == 0:
            return x.new_empty(0, spec.n)
        return run(x, packed, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        return run_quantized(codes, scales, zero, packed, bias, spec)

    @classmethod
    def eager(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> EagerScaledLinear | None:
        """See Kernel.eager."""
        eager = EagerScaledLinear(packed, bias, spec) if packed[0].is_cuda and not is_dynamic_per_tensor(spec.act) else None
        return eager if eager and eager.empty else None

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Fitted to times measured on an H200."""
        us = estimated_us(m, spec.n, spec.k, scaled_scheme(spec), cls.packed_bytes(spec))
        return 1e-6 * (us + tensor_scale_us(spec, m))

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors."""
        return -(-spec.n // 64) * 64 * -(-spec.k // 128) * 128 + 4 * spec.grid[0] * spec.grid[1]


def _blocks(codes: Tensor) -> Tensor:
    """Codes [N, K] in contiguous blocks of 64 rows x 128 columns, blocks of the same rows side by side: [blocks * 64, 128]."""
    n, k = codes.shape
    blocks_n, blocks_k = -(-n // 64), -(-k // 128)
    out = torch.zeros(blocks_n, blocks_k, 64, 128, dtype=torch.uint8, device=codes.device)
    step = 256  # scratch of 16,384 rows
    for b in range(0, blocks_n, step):
        rows = codes[b * 64 : (b + step) * 64].view(torch.uint8)
        rows = pad(rows, (0, blocks_k * 128 - k, 0, -rows.shape[0] % 64))
        out[b : b + step] = rows.view(-1, 64, blocks_k, 128).transpose(1, 2)
    return out.view(-1, 128).view(codes.dtype)


def _fp8_codes(weight: QuantizedWeight) -> Tensor:
    """E4M3 codes [N, K] in the input's column order."""
    codes: Any = weight.codes[:, : weight.spec.k]
    if weight.perm is None:
        return codes.contiguous().view(torch.float8_e4m3fn)
    out = torch.empty_like(codes, memory_format=torch.contiguous_format)
    return out.index_copy_(1, weight.perm.long(), codes).view(torch.float8_e4m3fn)
