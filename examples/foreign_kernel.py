"""A kernel of one's own: registered, ranked beside all others, tested by the public conformance suite.

python examples/foreign_kernel.py
"""

import torch

import bitline
from bitline.kernels.base import roofline
from bitline.testing import check_kernel
from bitline.types import YES, no


class TableLinearKernel(bitline.Kernel):
    """Weight-only layers as a float32 matrix, for CPUs with more memory than time."""

    platforms = ("cpu",)
    backend = "example"
    act_dtypes = (torch.float32,)

    @classmethod
    def can_implement(cls, spec):
        """Anything without activation quantization."""
        return YES if spec.act is None else no("activations are quantized", "a weight-only scheme")

    @classmethod
    def pack(cls, weight):
        """The weight in float32, [N, K]."""
        return {"w": weight.dequantize()}

    @classmethod
    def apply(cls, x, packed, bias, spec):
        """x [M, K] -> [M, N]."""
        return torch.nn.functional.linear(x, packed[0], bias)

    @classmethod
    def cost(cls, spec, platform, m):
        """Seconds of a call with M rows."""
        return roofline(spec, platform, m, weight_bytes=4 * spec.n * spec.k, rate=platform.rates.fp32)


bitline.register_kernel(TableLinearKernel)
weight = bitline.quantize(torch.randn(256, 512), "W4A16", group_size=128)
check_kernel(TableLinearKernel, specs=[weight.spec])
for candidate in bitline.choose(weight.spec, "cpu:avx2").candidates[:3]:
    print(f"{candidate.name}: {candidate.score * 1e6:.1f} us a token")
layer = bitline.QuantLinear(weight, kernel="TableLinearKernel")
print(layer(torch.randn(2, 512)).shape, layer.choice.best.name)
