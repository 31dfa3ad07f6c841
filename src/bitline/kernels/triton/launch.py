"""Launching the weight-only device code: the fused GEMM up to `max_fused_m`, dequantized panels and torch's matmul above."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline import env
from bitline.kernels.triton.heuristics import (
    PANEL_ELEMENTS,
    DeviceTraits,
    GemmConfig,
    choose_gemm_config,
    max_fused_m,
)
from bitline.kernels.triton.layout import exponent_bias, layout_of
from bitline.types import LinearSpec

REDUCE_BLOCK, PANEL_TILE_N = 512, 32


class CodeFormat(NamedTuple):
    """How codes are stored and dequantized: the compile-time argument FMT of the device code (device/dequant.py).

    low_bits, high_bits, lut, implicit_zero, zero_base, sf_vec_size, sf_e8m0: see `PackedLayout`. mantissa_bits: of a minifloat, 0
    for integers and LUT types. via_bf16: minifloats are expanded to bfloat16 bit patterns, else to float16. fp32_math: dequantize
    with float32 arithmetic. rescale, sf_rescale: the powers of two that make up for the difference of exponent biases, of weights
    and of block scales.
    """

    low_bits: int
    high_bits: int
    lut: bool
    implicit_zero: int
    zero_base: int
    sf_vec_size: int
    sf_e8m0: bool
    mantissa_bits: int
    via_bf16: bool
    fp32_math: bool
    rescale: float
    sf_rescale: float


def code_format(spec: LinearSpec, *, has_bf16x2: bool, to_panel: bool = False) -> CodeFormat:
    """The code format of a spec. has_bf16x2: the device has packed bfloat16 arithmetic. to_panel: dequantize to float32."""
    layout = layout_of(spec)
    code, fp16, bf16 = layout.code_type, spec.act_dtype == torch.float16, spec.act_dtype == torch.bfloat16
    stored = (
        layout.low_bits, layout.high_bits, layout.lut, layout.implicit_zero, layout.zero_base, layout.sf_vec_size, layout.sf_e8m0
    )  # fmt: skip
    if code.kind != "float":
        fp32_math = to_panel or not (fp16 or (bf16 and has_bf16x2 and code.bits <= 7 and not interpreted()))
        return CodeFormat(*stored, 0, False, fp32_math, 1.0, 1.0)
    via_bf16 = bf16 and has_bf16x2 and not to_panel
    fp32_math = to_panel or not (fp16 or via_bf16) or (via_bf16 and interpreted())  # the interpreter has no bfloat16 multiply
    bias = 127 if via_bf16 else 15
    # With a float16 input E8M0 is read as float16's exponent field, 112 less than float32's.
    sf_rescale = (2.0**112 if fp16 else 1.0) if layout.sf_e8m0 else 2.0 ** (bias - 7)
    rescale = 2.0 ** (bias - exponent_bias(code))
    return CodeFormat(*stored, code.mantissa, via_bf16, fp32_math, rescale, sf_rescale)


@functools.cache
def device_code() -> Any:
    """The module of device code; importing it imports Triton."""
    from bitline.kernels.triton.device import gemm

    return gemm


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a compiler."""
    return env.triton_interpret()


@functools.cache
def device_traits(device: torch.device) -> DeviceTraits:
    """What tile configurations depend on."""
    if device.type != "cuda":
        return DeviceTraits(device.type == "cpu", False, 64 * 1024)
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return DeviceTraits(False, getattr(properties, "warp_size", 64) == 32, 64 * 1024)
    return DeviceTraits(True, False, int(properties.shared_memory_per_block_optin), properties.major < 8)


@functools.lru_cache(maxsize=4096)
def gemm_constants(
    spec: LinearSpec, has_bias: bool, config: GemmConfig, k_blocks: int, has_bf16x2: bool, no_mma: bool = False
) -> dict[str, Any]:
    """The compile-time arguments of `gemm_kernel`. no_mma: see DeviceTraits; PROMOTE_K is as small as possible then, so that the
    operands of the FMA loop fit the registers."""
    layout = layout_of(spec)
    even_k = layout.aligned and not spec.act_order and layout.k_offset == 0 and spec.k == k_blocks * layout.block_k
    even_k = even_k and k_blocks % (config.k_slices * config.split_k) == 0
    return {
        "FMT": code_format(spec, has_bf16x2=has_bf16x2), "SCALE_BLOCK_K": layout.scale_block_k,
        "PROMOTE_K": 32 if no_mma else layout.promote_k, "HAS_ZERO": spec.zero == "int", "HAS_OFFSET": spec.zero == "float",
        "HAS_PERM": spec.act_order or not layout.aligned, "HAS_BIAS": has_bias, "EVEN_K": even_k,
        "IS_SPLIT_K": config.split_k > 1, "UPCAST": spec.act_dtype == torch.bfloat16 and interpreted(),
        "K_SLICES": config.k_slices, "BLOCK_SIZE_N": config.tile_n, "BLOCK_SIZE_M": config.tile_m,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


class LaunchPlan:
    """Everything about a launch that depends only on the layer and the bucket of M."""

    def __init__(
        self, spec: LinearSpec, config: GemmConfig, k_blocks: int, has_bias: bool, has_bf16x2: bool, no_mma: bool = False
    ) -> None:
        self.spec, self.config, self.k_blocks = spec, config, k_blocks
        self.constants = gemm_constants(spec, has_bias, config, k_blocks, has_bf16x2, no_mma)
        self.k_offset = layout_of(spec).k_offset
        self.k_blocks_per_split = -(-k_blocks // (config.split_k * config.k_slices)) * config.k_slices
        self.grid_n = -(-spec.n // config.tile_n)
        self.constant_args = [self.constants[name] for name in device_code().gemm_kernel.arg_names if name in self.constants]
        self.compiled_gemm: Any = None
        self.compiled_reduce: Any = None

    def launch(self, grid: tuple[int, int, int], aligned: bool, *arguments: Any) -> None:
        """Run `gemm_kernel`; after the first call without Triton's argument inspection, which costs more than the kernel.

        aligned: all pointers are multiples of 16. Triton specializes on that, and else only on what plans are keyed by.
        """
        if self.compiled_gemm is not None and aligned:
            self.compiled_gemm[grid](*arguments, *self.constant_args)
            return
        compiled = device_code().gemm_kernel[grid](*arguments, **self.constants)
        if aligned:
            self.compiled_gemm = compiled

    def reduce(self, partials: Tensor, bias_or_x: Tensor, y: Tensor, has_bias: bool, aligned: bool) -> None:
        """Reduce the split-K partials [split_k, M, N] in a fixed order, add the bias, and write y; launched as in `launch`."""
        size, n, split_k = y.numel(), self.spec.n, self.config.split_k
        grid = (-(-size // REDUCE_BLOCK), 1, 1)
        if self.compiled_reduce is not None and aligned:
            self.compiled_reduce[grid](partials, bias_or_x, y, size, n, split_k, has_bias, REDUCE_BLOCK)
            return
        compiled = device_code().reduce_kernel[grid](
            partials, bias_or_x, y, size, n, SPLIT_K=split_k, HAS_BIAS=has_bias, BLOCK_SIZE=REDUCE_BLOCK, num_warps=4
        )
        if aligned:
            self.compiled_reduce = compiled


_plans: dict[tuple[Any, ...], LaunchPlan] = {}


def launch_plan(
    spec: LinearSpec, m: int, packed: Sequence[Tensor], bias_dtype: torch.dtype | None, device: torch.device
) -> LaunchPlan:
    """The plan of a layer and M, cached by the identity of the spec, since hashing a spec takes longer than a launch.

    The key has the dtypes of bias and offsets too, which a spec leaves open. A plan keeps its spec alive, so that no other object
    can get its id.
    """
    m_bucket = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else -(-m // 128) * 128
    k_blocks = packed[0].shape[0]
    key = (id(spec), m_bucket, k_blocks, packed[3].dtype, bias_dtype, device)
    plan = _plans.get(key)
    if plan is None:
        layout, traits = layout_of(spec), device_traits(device)
        config = choose_gemm_config(m_bucket, spec.n, k_blocks, layout, spec.act_dtype, spec.zero != "none", traits)
        has_bf16x2 = device.type == "cuda" and not torch.version.hip  # AMD and Intel have no fast packed bfloat16 arithmetic
        plan = _plans[key] = LaunchPlan(spec, config, k_blocks, bias_dtype is not None, has_bf16x2, traits.no_mma)
    return plan


def run(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """x [M, K] times the packed weight, bias added: [M, N] in x's dtype."""
    m = x.shape[0]
    if m == 0:
        return x.new_empty(0, spec.n)
    if m > max_fused_m(x.dtype, layout_of(spec), device_traits(x.device).no_mma):
        return dequantize_then_matmul(x, packed, bias, spec)
    return fused_gemm(x, packed, bias, launch_plan(spec, m, packed, None if bias is None else bias.dtype, x.device))


def fused_gemm(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, plan: LaunchPlan) -> Tensor:
    """The fused dequantize-and-MMA kernel, and with split-K the reduction."""
    codes, scale, zero, offset, aux, perm = packed
    m, n, config = x.shape[0], plan.spec.n, plan.config
    # The interpreter does not round bfloat16 to nearest, torch does.
    y = torch.empty(m, n, dtype=torch.float32 if interpreted() else x.dtype, device=x.device)
    is_split_k = config.split_k > 1
    out = torch.empty(config.split_k, m, n, dtype=torch.float32, device=x.device) if is_split_k else y
    bias_or_x = x if bias is None else bias  # a valid pointer where there is no bias
    aligned = (x.data_ptr() | bias_or_x.data_ptr()) % 16 == 0
    plan.launch(
        (plan.grid_n, -(-m // config.tile_m), config.split_k), aligned,
        x, codes, scale, zero, offset, aux, perm, bias_or_x, out,
        m, n, plan.spec.k, plan.k_offset, plan.k_blocks, scale.shape[0], plan.k_blocks_per_split,
    )  # fmt: skip
    if is_split_k:
        plan.reduce(out, bias_or_x, y, bias is not None, aligned)
    return y.to(x.dtype) if y.dtype != x.dtype else y


def dequantize_then_matmul(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Dequantize a panel of rows of W into scratch, multiply it with torch's matmul, and go on with the next panel."""
    perm = packed[5]
    k, k_offset = spec.k, layout_of(spec).k_offset
    if perm.numel():  # gather x into packed column order, padding included
        x = pad(x, (0, 1)).index_select(1, perm)
        k, k_offset = perm.numel(), 0
    panel_rows = max(256, PANEL_ELEMENTS // k // 256 * 256)
    scratch_dtype = torch.float32 if interpreted() else x.dtype
    panel = torch.empty(min(panel_rows, spec.n), k, dtype=scratch_dtype, device=x.device)
    y = x.new_empty(x.shape[0], spec.n)
    for start in range(0, spec.n, panel_rows):
        stop = min(start + panel_rows, spec.n)
        _dequantize_rows(packed, panel, start, stop, k_offset, spec)
        w = panel[: stop - start].to(x.dtype).t()
        if bias is None:
            torch.mm(x, w, out=y[:, start:stop])
        else:
            torch.addmm(bias[start:stop], x, w, out=y[:, start:stop])
    return y


def _dequantize_rows(packed: Sequence[Tensor], panel: Tensor, start: int, stop: int, k_offset: int, spec: LinearSpec) -> None:
    """Rows [start, stop) of W into panel [rows, K]; column k of the panel is packed column k_offset + k."""
    codes, scale, zero, offset, aux, _perm = packed
    layout = layout_of(spec)
    device_code().dequantize_kernel[(-(-(stop - start) // PANEL_TILE_N), codes.shape[0])](
        codes, scale, zero, offset, aux, panel, spec.n, panel.shape[1], k_offset, start, stop, scale.shape[0],
        FMT=code_format(spec, has_bf16x2=False, to_panel=True), SCALE_BLOCK_K=layout.scale_block_k,
        PROMOTE_K=layout.promote_k, HAS_ZERO=spec.zero == "int", HAS_OFFSET=spec.zero == "float",
        BLOCK_SIZE_N=PANEL_TILE_N, num_warps=4,
    )  # fmt: skip
