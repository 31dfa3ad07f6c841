"""Weight-only int4 on CPUs: torch's `_weight_int4pack_mm_for_cpu` at small M, panels and torch's matmul at large M."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitline import memory, native
from bitline.act_quant import fake_quantize
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.cpu import costs as cpu_costs
from bitline.kernels.integers import IntegerCodes, integer_codes
from bitline.kernels.torch import int4_packing
from bitline.kernels.torch.int4_packing import BLOCK_N, NibbleLayout
from bitline.platform import Platform, cpu_features
from bitline.types import YES, LinearSpec, ScalarType, Verdict, no
from bitline.weight import QuantizedWeight

GROUP_SIZES = (256, 128, 64, 32)  # what the operator takes
# Measured seconds per weight on two cores (docs/performance.md), by `cpu_costs.cpu_class`: the operator's first token, each token
# of many, and a token of torch's matmul.
FIRST_TOKEN, EACH_TOKEN, MATMUL_TOKEN = (12.5e-12, 70e-12, 86e-12), (5.55e-12, 32e-12, 33e-12), (2.1e-12, 4.3e-12, 65e-12)
PANEL = 1 << 21  # weights dequantized at a time: 4 MiB of bfloat16, which a last-level cache holds


class TorchInt4PackLinearKernel(Kernel):
    """`aten::_weight_int4pack_mm_for_cpu`: W = (q - 8) * s + z with 4-bit q, bfloat16 s and z per group, float32 accumulation.

    Codes of up to 4 bits fill one nibble plane. Wider ones (and E2M1, whose values are multiples of 0.5) take two planes side by
    side along K, W = 16 s (high - 8) + s (low - 8) + ..., with x repeated: one accumulation, rounded once.
    From an M that depends on the shape on, panels of output channels are dequantized to bfloat16 and multiplied by torch's
    matmul (oneDNN), which is faster there than the operator.
    """

    platforms = ("cpu",)
    families = ("mp",)
    measured = ("zen", "amx")
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """x86-64 with AVX2 or AVX-512; elsewhere the operator has only scalar code."""
        if not platform.features & {"avx2", "avx512"}:
            return no("torch's int4 operator has vector code only for AVX2 and AVX-512", "an x86-64 CPU with AVX2")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Integer codes of up to 8 bits, or E2M1; groups of a multiple of 32 columns; bfloat16 input."""
        if spec.act_dtype != torch.bfloat16:
            return no("the operator has only scalar code for float16 and float32 inputs, 60 times slower",
                      "with input dtype bfloat16")  # fmt: skip
        if _nibble_planes(spec.weight) is None:
            return no(f"{spec.weight} codes are not integers of 8 bits times a step", "integer or float4_e2m1 codes")
        if spec.ragged:
            return no("groups of unequal size, as act-order weights have in a shard along K", "a shard along N")
        if _kernel_group(spec) is None:
            if spec.block[1] % 32:
                return no(f"group size {spec.block[1]} is not a multiple of 32", "group size 32, 64, 128 or 256")
            return no(f"a shard that starts {spec.block_offset[1]} columns into a group, not a multiple of 32",
                      "a shard along K that starts on a multiple of 32")  # fmt: skip
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes uint8 [N', planes * K' / 2] in torch's nibble layout; scales bfloat16 [planes * K' / g, N', 2] of (s, z); perm,
        input_scale and input_zero or empty."""
        spec = weight.spec
        nibbles, g, (n_pad, k_pad) = _require_planes(spec), _kernel_group(spec) or 0, _padded(spec)
        codes = memory.empty(n_pad, nibbles.planes * k_pad // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.zeros(nibbles.planes * k_pad // g, n_pad, 2, dtype=torch.bfloat16, device=weight.device)
        if not _pack_natively(weight, nibbles, codes, scales, k_pad, g):
            _pack_by_torch(weight, nibbles, codes, scales, k_pad, g)
        absent = torch.empty(0, device=weight.device)
        named = {"perm": weight.perm, "input_scale": weight.input_scale, "input_zero": weight.input_zero}
        return {"codes": codes, "scales": scales, **{k: absent if t is None else t.clone() for k, t in named.items()}}

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        codes, scales, perm, input_scale, input_zero = packed
        m, k = x.shape
        if m == 0:
            return x.new_empty(0, spec.n)
        if spec.act is not None:
            x = fake_quantize(x, spec.act, *(t if t.numel() else None for t in (input_scale, input_zero))).to(x.dtype)
        if perm.numel():
            x = x.index_select(1, perm)
        if k % 32:
            x = pad(x, (0, -k % 32))
        columns = codes.shape[1] * 2
        crossover = _panel_crossover_m(codes.numel() * 2, columns // x.shape[1], cpu_costs.cpu_class(cpu_features()))
        if m >= crossover and int4_packing.layout() is not None:
            return _dequantize_then_matmul(x, codes, scales, bias, spec)
        if columns > x.shape[1]:
            x = torch.cat((x, x), 1)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, columns // scales.shape[0], scales)
        if y.shape[1] != spec.n:
            y = y[:, : spec.n].contiguous()
        return y if bias is None else y.add_(bias)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The operator's time below the crossover, dequantization and a matmul above it."""
        nibbles = _nibble_planes(spec.weight)
        planes = 1 if nibbles is None else nibbles.planes
        n, k = _padded(spec)
        cpu, core_scale = cpu_costs.cpu_class(platform.features), cpu_costs.core_scale(platform)
        extra = cpu_costs.CALL * (planes + 1) / 2 + cpu_costs.fake_quant(spec, platform, m)
        if m < _panel_crossover_m(n * k * planes, planes, cpu):
            work = planes * n * k * max(FIRST_TOKEN[cpu], m * EACH_TOKEN[cpu]) * core_scale
            return max(work, cls.packed_bytes(spec) / platform.rates.bandwidth) + extra
        matmul = cpu_costs.dense_gemm(n * k, m, torch.bfloat16, platform)
        return _panel_seconds(n * k, planes, cpu) * core_scale + matmul + extra

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Nibbles and two bfloat16 per group."""
        nibbles = _nibble_planes(spec.weight)
        n, k = _padded(spec)
        return (1 if nibbles is None else nibbles.planes) * n * (k // 2 + 4 * k // (_kernel_group(spec) or 32))


@dataclass(frozen=True)
class NibblePlanes:
    """Integer codes as unsigned nibbles: integer - center + 8 in one plane, or integer - center + 128 in two."""

    codes: IntegerCodes
    center: int
    planes: int

    @property
    def step(self) -> float:
        """The value of integer 1 before scaling."""
        return self.codes.step

    @property
    def shift(self) -> int:
        """What is added to an integer to make it one unsigned nibble, or two."""
        return (8 if self.planes == 1 else 128) - self.center

    def unpacked(self, raw: Tensor, k: int) -> Tensor:
        """Unpacked codes uint8 [n, K] to nibbles uint8 [n, planes * k], the high plane first; columns past K are zero."""
        q = self.codes.shifted(raw, self.shift)
        q = pad(q, (0, k - q.shape[1]))
        return q if self.planes == 1 else torch.cat((q >> 4, q & 15), 1)


@functools.cache
def _nibble_planes(scalar: ScalarType) -> NibblePlanes | None:
    codes = integer_codes(scalar)
    if codes is None:
        return None
    center = 1 << (scalar.bits - 1) if codes.low == 0 else 0
    low, high = codes.low - center, codes.high - center
    if low < -128 or high > 127:
        return None
    return NibblePlanes(codes, center, 1 if low >= -8 and high <= 7 else 2)


def _require_planes(spec: LinearSpec) -> NibblePlanes:
    nibbles = _nibble_planes(spec.weight)
    assert nibbles is not None, "can_implement refuses these types"
    return nibbles


def _kernel_group(spec: LinearSpec) -> int | None:
    """The largest of the operator's group sizes that divides the weight's groups, preferring one that divides K."""
    size, offset = spec.block[1], spec.block_offset[1]
    fits = [g for g in GROUP_SIZES if spec.grid[1] == 1 or (size % g == 0 and offset % g == 0)]
    return next((g for g in fits if spec.k % g == 0), fits[-1] if fits else None)


def _padded(spec: LinearSpec) -> tuple[int, int]:
    """N and K as packed."""
    return spec.n + -spec.n % BLOCK_N, spec.k + -spec.k % 32


def _pack_natively(weight: QuantizedWeight, nibbles: NibblePlanes, codes: Tensor, scales: Tensor, k_pad: int, g: int) -> bool:
    """Fill codes and scales by the native library; False where it is missing or does not support the layout or type."""
    spec, layout, known = weight.spec, int4_packing.layout(), nibbles.codes
    core = native.core_for(weight.codes)
    is_int = known.scalar.kind == "int"
    if core is None or layout is None or layout.block == 16 or not (is_int or known.scalar.bits == 4):
        return False
    planes, n, k, width = nibbles.planes, spec.n, spec.k, known.scalar.bits
    flip, add = (1 << (width - 1) if known.scalar.signed else 0), (known.low + nibbles.shift) & 255
    table = None if is_int else known.shifted(torch.arange(16, dtype=torch.uint8), nibbles.shift)
    low, high = layout.low, layout.high
    order = torch.tensor([layout.block, low.start, low.step, high.start, high.step], dtype=torch.int32)
    core.int4pack_codes(
        weight.codes.data_ptr(), weight.codes.stride(0), n, k, width, flip if is_int else 0, add if is_int else 0,
        None if table is None else table.data_ptr(), planes, codes.shape[0], k_pad, order.data_ptr(), codes.data_ptr(),
    )  # fmt: skip
    exact, offsets, pick = weight.scales().contiguous(), weight.offsets(), weight.column_groups()[::g].contiguous()
    zero = None if weight.zero is None else weight.zero.contiguous()
    offsets = None if offsets is None else offsets.contiguous()
    failed = core.int4pack_scales(
        exact.data_ptr(), None if zero is None else zero.data_ptr(), None if offsets is None else offsets.data_ptr(),
        exact.shape[1], n, codes.shape[0], spec.block[0], spec.block_offset[0], pick.data_ptr(), len(pick), nibbles.step,
        nibbles.center, planes, scales.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory to pack scales in")
    return True


def _pack_by_torch(weight: QuantizedWeight, nibbles: NibblePlanes, codes: Tensor, scales: Tensor, k_pad: int, g: int) -> None:
    """Fill codes and scales by torch's operators, a chunk of output channels (1 MiB as int32) at a time."""
    n = weight.spec.n
    step = max(BLOCK_N, (1 << 18) // k_pad // BLOCK_N * BLOCK_N)
    for r in range(0, n, step):
        part = weight.narrow(0, r, min(r + step, n))
        q = nibbles.unpacked(part.unpacked(), k_pad)
        if part.spec.n % BLOCK_N:
            q = pad(q, (0, 0, 0, -part.spec.n % BLOCK_N))
        codes[r : r + q.shape[0]] = int4_packing.convert(q)
        _fill_scales(scales[:, r : r + part.spec.n], part, nibbles, g)


def _fill_scales(out: Tensor, part: QuantizedWeight, nibbles: NibblePlanes, g: int) -> None:
    """Write (s, z) of some output channels into out [planes * K' / g, n, 2]."""
    spec = part.spec
    rows = (torch.arange(spec.n, device=part.device) + spec.block_offset[0]) // spec.block[0]
    columns = part.column_groups()[::g]
    pick = lambda t: t.index_select(0, rows).index_select(1, columns).t()
    exact = pick(part.scales())
    s = (exact * nibbles.step).bfloat16().float()
    z = s * nibbles.center
    if part.zero is not None:
        z = s * (nibbles.center - pick(part.zero).float())
    offsets = part.offsets()
    if offsets is not None:
        z = exact * (nibbles.step * nibbles.center) + pick(offsets)
    low = out[-len(columns) :]
    low[..., 0], low[..., 1] = s, z
    if nibbles.planes == 2:
        out[: len(columns), :, 0], out[: len(columns), :, 1] = 16 * s, 8 * s


def _panel_crossover_m(weights: int, planes: int, cpu: int) -> float:
    """The M from which dequantized panels are faster, by the measured costs of both; `weights` counts each plane."""
    weights //= planes
    per_token = planes * EACH_TOKEN[cpu] - MATMUL_TOKEN[cpu]
    return (_panel_seconds(weights, planes, cpu) + weights * 3e-11) / (per_token * weights) if per_token > 0 else math.inf


def _panel_seconds(weights: int, planes: int, cpu: int) -> float:
    """Seconds to dequantize all panels on two cores: a dozen calls per panel, and five passes over it."""
    each = (1.9e-10, 2.4e-10)[planes - 1] * (1.3 if cpu == cpu_costs.AMX else 1.0)
    return 70e-6 * -(-weights // PANEL) + weights * each


def _dequantize_then_matmul(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """x [M, K'] times the packed weight, one panel of output channels at a time, each dequantized as [K', n]."""
    layout = int4_packing.layout()
    assert layout is not None
    k, block = x.shape[1], layout.block
    planes, n_pad = codes.shape[1] * 2 // k, codes.shape[0]
    groups = scales.shape[0] // planes
    symmetric = spec.zero == "none" and _require_planes(spec).center == 0
    step = min(n_pad, max(BLOCK_N, PANEL // k // BLOCK_N * BLOCK_N))
    panel, scratch = x.new_empty(k * step), codes.new_empty(k * step // 2)
    y = x.new_empty(x.shape[0], spec.n)
    for r in range(0, n_pad, step):
        n = min(step, n_pad - r)
        w = panel[: k * n].view(k, n)
        data = layout.blocks(codes[r : r + n], k * planes).unflatten(1, (planes, k))
        out = w.view(k, n // block, block).permute(1, 0, 2)
        _unpack_nibbles(data, scratch[: k * n // 2].view(n // block, k, -1), out, layout)
        grouped = w.view(groups, k // groups, n)
        s, z = (scales[-groups:, r : r + n, i].contiguous().unsqueeze(1) for i in (0, 1))
        if symmetric:
            grouped.mul_(s)
        else:
            torch.addcmul(z, grouped, s, out=grouped)
        rows = slice(r, min(r + n, spec.n))
        w = w[:, : rows.stop - r]
        if bias is None:
            torch.mm(x, w, out=y[:, rows])
        else:
            torch.addmm(bias[rows], x, w, out=y[:, rows])
    return y


def _unpack_nibbles(data: Tensor, scratch: Tensor, out: Tensor, layout: NibbleLayout) -> None:
    """Nibbles [blocks, planes, K, block / 2] to signed integers, out bfloat16 [blocks, K, block].

    scratch: uint8, half of out's elements. Subtracting 8 (or 128) wraps around; the byte is then read as a signed one.
    """
    first = data[:, 0]
    if data.shape[1] == 1:
        torch.bitwise_and(first, 15, out=scratch).sub_(8)
        out[..., layout.low] = scratch.view(torch.int8)
        torch.bitwise_right_shift(first, 4, out=scratch).sub_(8)
        out[..., layout.high] = scratch.view(torch.int8)
        return
    second = data[:, 1]
    torch.bitwise_left_shift(first, 4, out=scratch).bitwise_or_(second & 15).bitwise_xor_(128)
    out[..., layout.low] = scratch.view(torch.int8)
    torch.bitwise_and(first, 0xF0, out=scratch).bitwise_or_(second >> 4).bitwise_xor_(128)
    out[..., layout.high] = scratch.view(torch.int8)
