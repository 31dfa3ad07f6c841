"""The reference kernel: dequantize, then matmul. It runs everywhere and refuses nothing, so selection never dead-ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from bitline import bitstream
from bitline.act_quant import fake_quantize
from bitline.kernels.base import Kernel, Packed, matmul_rate, roofline
from bitline.kernels.cpu import costs as cpu_costs
from bitline.platform import Platform, cpu_features
from bitline.quantized_input import QuantizedInput
from bitline.types import YES, LinearSpec, Verdict
from bitline.weight import QuantizedWeight


class ReferenceLinearKernel(Kernel):
    """Dequantizes the canonical weight one chunk of output channels at a time and multiplies it with torch's matmul.

    Every other kernel is tested against what it computes: the weight in float32 rounded once to the input dtype, activations
    fake-quantized where the scheme quantizes them, and torch's accumulation. At most one chunk is dequantized at any time.
    """

    backend = "reference"
    priority = -100
    measured: ClassVar[tuple[str, ...]] = ("zen",)
    emulates = True
    is_fallback = True
    requires_bf16_hardware = False  # torch converts bfloat16 to float32 on GPUs without it
    cuda_graph = False
    takes_quantized_input = True

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Everything."""
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """The canonical tensors, cloned: a weight read from a checkpoint is a view of a file, which may change."""
        present = {name: tensor.clone() for name, tensor in weight.tensors().items()}
        return {name: present.get(name, torch.empty(0, device=weight.device)) for name in _PACKED_NAMES}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        weight = rebuild(packed, spec)
        if spec.act is not None:
            x = fake_quantize(x, spec.act, weight.input_scale, weight.input_zero).to(spec.act_dtype)
        return cls._matmul(x, weight, bias, spec)

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """See Kernel.apply_quantized."""
        assert spec.act is not None
        x = QuantizedInput(codes, scales, zero).dequantize(spec.act, spec.act_dtype)
        return cls._matmul(x, rebuild(packed, spec), bias, spec)

    @classmethod
    def unpack(cls, packed: Sequence[Tensor], spec: LinearSpec) -> Tensor:
        """See Kernel.unpack."""
        return rebuild(packed, spec).dequantize(spec.act_dtype)

    @classmethod
    def _matmul(cls, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """x [M, K], fake-quantized, times the weight: y [M, N]."""
        y = x.new_empty(x.shape[0], spec.n)
        matmul_dtype = torch.float32 if _fp16_matmul_is_slow(x) else x.dtype
        inputs = x.to(matmul_dtype)
        for rows in _row_chunks(spec):
            part = None if bias is None else bias[rows].to(matmul_dtype)
            y[:, rows] = linear(inputs, weight.dequantize_rows(rows, x.dtype).to(matmul_dtype), part)
        return y

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """CPU: the measured dequantization and matmul.

        GPU: four passes that read and write the weight as float32; the dispatch of each chunk's many small operators (180 us at
        192x576 on an H200); and one pass over x per operator of the activation quantization, about 8, or 32 for MX and NVFP4.
        """
        if platform.vendor == "cpu":
            weights = spec.n * spec.k
            chunk = bitstream.rows_per_chunk(spec.k) * spec.k
            seconds = cpu_costs.dequantize(spec, platform, chunk) + cpu_costs.dense_gemm(weights, m, spec.act_dtype, platform)
            return seconds + cpu_costs.fake_quant(spec, platform, m)
        passes = 4 * 8 * spec.n * spec.k / platform.rates.bandwidth
        dispatch = 60 * platform.rates.launch * -(-spec.n // bitstream.rows_per_chunk(spec.k))
        rate = matmul_rate(spec, platform)
        if spec.act is not None:
            each = 8 * m * spec.k / platform.rates.bandwidth + platform.rates.launch
            passes += (8 if spec.act.scale == "float" else 32) * each
        return dispatch + passes + roofline(spec, platform, m, weight_bytes=spec.weight_bytes(), rate=rate)


class BatchInvariantLinearKernel(ReferenceLinearKernel):
    """The reference with M split into padded blocks of 16 tokens.

    torch's matmul always gets the same shape, so the bits of a token's output do not depend on the batch size.
    """

    backend = "emulation"
    priority = -110
    measured = ()
    batch_invariant = True

    @classmethod
    def _matmul(cls, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """As the reference's."""
        m = x.shape[0]
        inputs = pad(x, (0, 0, 0, -m % _BLOCK_M)).view(-1, _BLOCK_M, spec.k)
        y = x.new_empty(inputs.shape[0], _BLOCK_M, spec.n)
        for rows in _row_chunks(spec):
            w = weight.dequantize_rows(rows, x.dtype)
            for block, out in zip(inputs, y, strict=True):
                out[:, rows] = linear(block, w, None if bias is None else bias[rows].to(x.dtype))
        return y.view(-1, spec.n)[:m]

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The reference's with M padded to whole blocks, plus one launch per block."""
        blocks = -(-m // _BLOCK_M)
        return super().cost(spec, platform, blocks * _BLOCK_M) + blocks * platform.rates.launch


_BLOCK_M = 16


def _row_chunks(spec: LinearSpec) -> list[slice]:
    """The output channels in chunks whose dequantized rows fit a last-level cache."""
    step = bitstream.rows_per_chunk(spec.k)
    return [slice(start, min(start + step, spec.n)) for start in range(0, spec.n, step)]


def _fp16_matmul_is_slow(x: Tensor) -> bool:
    """Whether a float32 matmul of the same float16 values is faster: M >= 8 on a CPU without float16 matmul hardware."""
    return x.dtype == torch.float16 and x.shape[0] >= 8 and x.device.type == "cpu" and "amx" not in cpu_features()


_PACKED_NAMES = ("codes", "scale", "zero", "offset", "scale2", "offset2", "perm", "group_index", "input_scale", "input_zero")


def rebuild(packed: Sequence[Tensor], spec: LinearSpec) -> QuantizedWeight:
    """The QuantizedWeight of tensors from `ReferenceLinearKernel.pack`, without repeating its validation."""
    weight = object.__new__(QuantizedWeight)
    tensors = {name: t if t.numel() else None for name, t in zip(_PACKED_NAMES, packed, strict=True)}
    for name, value in {**tensors, "spec": spec.replace(bias=False), "bias": None, "origin": ""}.items():
        object.__setattr__(weight, name, value)
    return weight
