import torch

from bitline import Kernel, register_kernel
from bitline.kernels.base import roofline
from bitline.types import YES, no


class ToyInt8LinearKernel(Kernel):
    """Weight-only int8 with per-channel scales: dequantize, then matmul."""

    platforms = ("cpu",)
    backend = "toy"
    act_dtypes = (torch.float32,)

    @classmethod
    def can_implement(cls, spec):
        if spec.weight.name not in ("int8", "uint8b128"):
            return no(f"weight type {spec.weight}", "with 8-bit integers")
        if spec.block != (1, spec.k):
            return no(f"scale block {spec.block}", "with one scale per output channel")
        if spec.act is not None or spec.act_order or spec.zero != "none" or spec.scale2_block:
            return no(f"scheme {spec.scheme}", "weight-only and symmetric")
        return YES

    @classmethod
    def pack(cls, weight):
        codes = weight.unpacked()
        if weight.spec.weight.name == "uint8b128":  # v + 128: the top bit flipped is v in two's complement
            codes = codes ^ 0x80
        return {"codes": codes.view(torch.int8).clone(), "scale": weight.scales().squeeze(1)}

    @classmethod
    def apply(cls, x, packed, bias, spec):
        codes, scale = packed
        y = (x @ codes.float().T) * scale
        return y if bias is None else y + bias

    @classmethod
    def cost(cls, spec, platform, m):
        return roofline(spec, platform, m, weight_bytes=5 * spec.n * spec.k, rate=platform.rates.fp32)


register_kernel(ToyInt8LinearKernel)
