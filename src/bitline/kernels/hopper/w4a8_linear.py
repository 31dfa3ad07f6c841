"""GluonHopperW4A8LinearKernel: 4-bit weights with int8 or FP8 activations on an H100 or H200."""

from __future__ import annotations

import torch

from bitline.kernels.base import Packed
from bitline.kernels.hopper.runtime import prepare
from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel
from bitline.kernels.hopper.tensor_scale import tensor_scale_us
from bitline.kernels.hopper.w4a8_heuristics import estimated_us
from bitline.kernels.hopper.w4a8_layout import pack_codes, scale_table
from bitline.kernels.hopper.w4a8_plans import prepare_device_code
from bitline.kernels.hopper.w4a8_scheme import check_w4a8, w4a8_scheme
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict
from bitline.weight import QuantizedWeight


class GluonHopperW4A8LinearKernel(GluonHopperScaledMMLinearKernel):
    """W4A8 and W4AFP8 by wgmma on 8-bit codes, 4-bit codes of W unpacked in registers; the same weights for all M.

    int4 with a scale for each row or group of 32, 64 or a multiple of 128 columns, x int8 or E4M3 per token or tensor; E2M1
    (MXFP4) with x E4M3. Up to M = 32 x is quantized inside the launch, above in one launch before.
    """

    families = ("mp",)

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """int4 weights with int8 or E4M3 activations, E2M1 weights with E4M3 activations; any shape."""
        return check_w4a8(spec)

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """weight: packed int32 [N/16, K/128, 256] (`w4a8_layout`). scale: float32 [N/16, groups, 16], over the factor of the
        unpacked codes. input_scale float32 [1]: of a static scheme, else empty. input_zero: empty."""
        if weight.device.type == "cuda":
            prepare()
            prepare_device_code()
        scheme, absent = w4a8_scheme(weight.spec), torch.empty(0, device=weight.device)
        return {
            "weight": pack_codes(weight, scheme),
            "scale": scale_table(weight, scheme),
            "input_scale": absent if weight.input_scale is None else weight.input_scale.to(torch.float32, copy=True).reshape(1),
            "input_zero": absent.int(),
        }

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Fitted to times measured on an H200."""
        us = estimated_us(m, spec.n, spec.k, w4a8_scheme(spec), cls.packed_bytes(spec))
        return 1e-6 * (us + tensor_scale_us(spec, m))

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors."""
        return -(-spec.n // 16) * (-(-spec.k // 128) * 1024 + 64 * w4a8_scheme(spec).groups)
