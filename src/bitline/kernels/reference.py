"""The reference kernel: dequantize, then multiply. Runs everywhere, refuses nothing, so selection never dead-ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bitline import bitstream
from bitline.act_quant import fake_quantize
from bitline.kernels.base import Kernel, Packed, matmul_rate, roofline
from bitline.kernels.cpu import cpu_costs
from bitline.platform import Platform, cpu_features
from bitline.types import YES, LinearSpec, Verdict
from bitline.weight import QuantizedWeight


class ReferenceLinearKernel(Kernel):
    """Rows of the canonical weight are dequantized a chunk at a time and multiplied in the input's dtype.

    What it computes is the definition that every other kernel is tested against: the weight in float32 rounded once to
    the input dtype, an input that is quantized and read back where the scheme says so, float32 sums inside torch's
    product. At no time is more than one chunk of rows dequantized.
    """

    backend = "reference"
    priority = -100
    measured: ClassVar[tuple[str, ...]] = ("zen",)
    emulates = True
    cuda_graph = False

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Everything."""
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """The canonical tensors, copied: a weight that is read from a file is a view of it, and files change."""
        present = {name: tensor.clone() for name, tensor in weight.tensors().items()}
        return {name: present.get(name, torch.empty(0, device=weight.device)) for name in _FIELDS}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        weight = rebuild(packed, spec)
        if spec.act is not None:
            x = fake_quantize(x, spec.act, weight.input_scale, weight.input_zero).to(spec.act_dtype)
        y = x.new_empty(x.shape[0], spec.n)
        product = torch.float32 if _half_is_slow(x) else x.dtype
        inputs = x.to(product)
        step = bitstream.rows_per_chunk(spec.k)
        for r in range(0, spec.n, step):
            rows = slice(r, min(r + step, spec.n))
            part = None if bias is None else bias[rows].to(product)
            y[:, rows] = torch.nn.functional.linear(inputs, weight.dequantize_rows(rows, x.dtype).to(product), part)
        return y

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """On a CPU the measured passes over the weight; elsewhere four, each of which reads and writes it as float32, the
        dispatch of each chunk's many small operators (180 us at 192x576 on an H200), and where the input is quantized as many
        passes over it as the formula has operators: about 8, 32 for micro-scaled inputs."""
        if platform.vendor == "cpu":
            weights = spec.n * spec.k
            chunk = bitstream.rows_per_chunk(spec.k) * spec.k
            seconds = cpu_costs.dequantize(spec, platform, chunk) + cpu_costs.product(weights, m, spec.act_dtype, platform)
            return seconds + cpu_costs.quantized_input(spec, platform, m)
        passes = 4 * 8 * spec.n * spec.k / platform.rates.bandwidth
        dispatch = 60 * platform.rates.launch * -(-spec.n // bitstream.rows_per_chunk(spec.k))
        rate = matmul_rate(spec, platform)
        if spec.act is not None:
            each = 8 * m * spec.k / platform.rates.bandwidth + platform.rates.launch
            passes += (8 if spec.act.scale == "float" else 32) * each
        return dispatch + passes + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=rate)


class BatchInvariantLinearKernel(ReferenceLinearKernel):
    """The reference with the rows of x in padded blocks of 16: torch then always multiplies matrices of one shape, and what
    a row gives does not depend on how many others come with it."""

    backend = "emulation"
    priority = -110
    measured = ()
    batch_invariant = True

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        m = x.shape[0]
        weight = rebuild(packed, spec)
        if spec.act is not None:
            x = fake_quantize(x, spec.act, weight.input_scale, weight.input_zero).to(spec.act_dtype)
        inputs = torch.nn.functional.pad(x, (0, 0, 0, -m % _ROWS)).view(-1, _ROWS, spec.k)
        y = x.new_empty(inputs.shape[0], _ROWS, spec.n)
        step = bitstream.rows_per_chunk(spec.k)
        for r in range(0, spec.n, step):
            rows = slice(r, min(r + step, spec.n))
            w = weight.dequantize_rows(rows, x.dtype)
            for block, out in zip(inputs, y, strict=True):
                out[:, rows] = torch.nn.functional.linear(block, w, None if bias is None else bias[rows].to(x.dtype))
        return y.view(-1, spec.n)[:m]

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The reference's for whole blocks, and as many launches."""
        blocks = -(-m // _ROWS)
        return super().cost(spec, platform, blocks * _ROWS) + blocks * platform.rates.launch


_ROWS = 16


def _half_is_slow(x: Tensor) -> bool:
    """True where float32 multiplies the same float16 numbers faster: several rows on a CPU without float16 units."""
    return x.dtype == torch.float16 and x.shape[0] >= 8 and x.device.type == "cpu" and "amx" not in cpu_features()


_FIELDS = ("codes", "scale", "zero", "offset", "scale2", "offset2", "perm", "group_index", "input_scale", "input_zero")


def rebuild(packed: Sequence[Tensor], spec: LinearSpec) -> QuantizedWeight:
    """The packed tensors as a weight again, without the checks that they passed before they were packed."""
    weight = object.__new__(QuantizedWeight)
    tensors = {name: t if t.numel() else None for name, t in zip(_FIELDS, packed, strict=True)}
    for name, value in {**tensors, "spec": spec.replace(bias=False), "bias": None, "origin": ""}.items():
        object.__setattr__(weight, name, value)
    return weight
