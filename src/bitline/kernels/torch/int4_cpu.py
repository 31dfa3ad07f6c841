"""torch's CPU int4 operator for few rows, and its packed weight dequantized a panel at a time for many."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bitline import memory, native
from bitline.act_quant import fake_quantize
from bitline.kernels.base import Kernel, Packed
from bitline.kernels.cpu import cpu_costs
from bitline.kernels.integers import Integers, integers
from bitline.kernels.torch import int4_packing
from bitline.platform import Platform, cpu_features
from bitline.types import YES, LinearSpec, ScalarType, Verdict, no
from bitline.weight import QuantizedWeight

GROUPS = (256, 128, 64, 32)  # what the operator takes
# Measured seconds a weight on two cores (docs/performance.md), without and with AMX: the operator's first row, each row of
# many, and a row of torch's matrix product.
ONE_ROW, EACH_ROW, PRODUCT_ROW = (12.5e-12, 26e-12), (5.55e-12, 11.6e-12), (2.1e-12, 1.1e-12)
PANEL = 1 << 21  # weights dequantized at a time: 4 MiB of bfloat16, which a last-level cache holds


class TorchInt4PackLinearKernel(Kernel):
    """`aten::_weight_int4pack_mm_for_cpu`: W = (q - 8) * s + z with 4-bit q, bfloat16 s and z per group, float32 sums.

    Codes of up to 4 bits are one plane of nibbles. Wider ones (and E2M1, whose values are integers times a half) are
    two planes side by side along K, W = 16 s (high - 8) + s (low - 8) + …, with x repeated: one sum, rounded once.
    From a number of rows that depends on the shape on, a panel of output rows at a time is dequantized into bfloat16
    and multiplied by torch's matrix product, which is faster there than the operator.
    """

    platforms = ("cpu",)
    families = ("mp",)
    measured = ("zen", "amx")
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """x86-64 with AVX2 or AVX-512: elsewhere the operator computes one number at a time."""
        if not platform.features & {"avx2", "avx512"}:
            return no("torch's int4 operator has vector code for AVX2 and AVX-512 alone", "an x86-64 CPU with AVX2")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Integer codes of up to 8 bits, or E2M1; groups of a multiple of 32 columns; bfloat16 input."""
        if spec.act_dtype != torch.bfloat16:
            return no("the operator computes float16 and float32 inputs one number at a time, 60 times slower",
                      "with input dtype bfloat16")  # fmt: skip
        if _nibbles(spec.weight) is None:
            return no(f"{spec.weight} codes are not integers of 8 bits times a step", "integer or float4_e2m1 codes")
        if spec.ragged:
            return no("groups of unequal size, as an act-order weight has after a cut along K", "a cut along N")
        if _group(spec) is None:
            if spec.block[1] % 32:
                return no(f"group size {spec.block[1]} is not a multiple of 32", "group size 32, 64, 128 or 256")
            return no(f"its first group was cut after {spec.block_offset[1]} columns, not a multiple of 32",
                      "a cut along K on a multiple of 32")  # fmt: skip
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes uint8 [N', planes * K' / 2] in torch's layout; scales bfloat16 [planes * K' / g, N', 2] of (s, z)."""
        spec = weight.spec
        nibbles, g, (n_pad, k_pad) = _require(spec), _group(spec) or 0, _padded(spec)
        codes = memory.empty(n_pad, nibbles.planes * k_pad // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.zeros(nibbles.planes * k_pad // g, n_pad, 2, dtype=torch.bfloat16, device=weight.device)
        if not _pack_natively(weight, nibbles, codes, scales, k_pad, g):
            step = max(
                int4_packing.ROWS, (1 << 18) // k_pad // int4_packing.ROWS * int4_packing.ROWS
            )  # a chunk is 1 MiB as int32
            for r in range(0, spec.n, step):
                part = weight.narrow(0, r, min(r + step, spec.n))
                n = part.spec.n
                q = nibbles.of(part.unpacked(), k_pad)
                if n % int4_packing.ROWS:
                    q = torch.nn.functional.pad(q, (0, 0, 0, -n % int4_packing.ROWS))
                codes[r : r + q.shape[0]] = int4_packing.convert(q)
                _fill_scales(scales[:, r : r + n], part, nibbles, g)
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
            x = torch.nn.functional.pad(x, (0, -k % 32))
        columns = codes.shape[1] * 2
        if m >= _switch(codes.numel() * 2, columns // x.shape[1], "amx" in cpu_features()) and int4_packing.layout() is not None:
            return _by_panels(x, codes, scales, bias, spec)
        if columns > x.shape[1]:
            x = torch.cat((x, x), 1)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, columns // scales.shape[0], scales)
        if y.shape[1] != spec.n:
            y = y[:, : spec.n].contiguous()
        return y if bias is None else y.add_(bias)

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """The operator below the switch, a dequantization and a matrix product above it."""
        nibbles = _nibbles(spec.weight)
        planes = 1 if nibbles is None else nibbles.planes
        n, k = _padded(spec)
        amx, share = "amx" in platform.features, cpu_costs.share(platform)
        extra = cpu_costs.CALL * (planes + 1) / 2 + cpu_costs.quantized_input(spec, platform, m)
        if m < _switch(n * k * planes, planes, amx):
            work = planes * n * k * max(ONE_ROW[amx], m * EACH_ROW[amx]) * share
            return max(work, cls.packed_bytes(spec) / platform.rates.bandwidth) + extra
        product = cpu_costs.product(n * k, m, torch.bfloat16, platform)
        return _panel_seconds(n * k, planes, amx) * share + product + extra

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Nibbles and two bfloat16 a group."""
        nibbles = _nibbles(spec.weight)
        n, k = _padded(spec)
        return (1 if nibbles is None else nibbles.planes) * n * (k // 2 + 4 * k // (_group(spec) or 32))


@dataclass(frozen=True)
class Nibbles:
    """Integers as nibbles: integer - center + 8 in one plane, or + 128 in two."""

    known: Integers
    center: int
    planes: int

    @property
    def step(self) -> float:
        """What an integer is worth before scaling."""
        return self.known.step

    @property
    def shift(self) -> int:
        """What makes an integer a nibble, or two."""
        return (8 if self.planes == 1 else 128) - self.center

    def of(self, raw: Tensor, k: int) -> Tensor:
        """Raw codes uint8 [n, K] to nibbles uint8 [n, planes * k], high plane first; columns past K are zero."""
        q = self.known.shifted(raw, self.shift)
        q = torch.nn.functional.pad(q, (0, k - q.shape[1]))
        return q if self.planes == 1 else torch.cat((q >> 4, q & 15), 1)


@functools.cache
def _nibbles(scalar: ScalarType) -> Nibbles | None:
    known = integers(scalar)
    if known is None:
        return None
    center = 1 << (scalar.bits - 1) if known.low == 0 else 0
    low, high = known.low - center, known.high - center
    if low < -128 or high > 127:
        return None
    return Nibbles(known, center, 1 if low >= -8 and high <= 7 else 2)


def _require(spec: LinearSpec) -> Nibbles:
    nibbles = _nibbles(spec.weight)
    assert nibbles is not None, "can_implement refuses these types"
    return nibbles


def _group(spec: LinearSpec) -> int | None:
    """The largest of the operator's group sizes whose boundaries fall on this weight's, without padding if possible."""
    size, offset = spec.block[1], spec.block_offset[1]
    fits = [g for g in GROUPS if spec.grid[1] == 1 or (size % g == 0 and offset % g == 0)]
    return next((g for g in fits if spec.k % g == 0), fits[-1] if fits else None)


def _padded(spec: LinearSpec) -> tuple[int, int]:
    """N and K as packed."""
    return spec.n + -spec.n % int4_packing.ROWS, spec.k + -spec.k % 32


def _pack_natively(weight: QuantizedWeight, nibbles: Nibbles, codes: Tensor, scales: Tensor, k_pad: int, g: int) -> bool:
    """Fill codes and scales in C++; False where the native core cannot."""
    spec, layout, known = weight.spec, int4_packing.layout(), nibbles.known
    core = native.usable(weight.codes)
    whole = known.scalar.kind == "int"
    if core is None or layout is None or layout.block == 16 or not (whole or known.scalar.bits == 4):
        return False
    planes, n, k, width = nibbles.planes, spec.n, spec.k, known.scalar.bits
    flip, add = (1 << (width - 1) if known.scalar.signed else 0), (known.low + nibbles.shift) & 255
    table = None if whole else known.shifted(torch.arange(16, dtype=torch.uint8), nibbles.shift)
    low, high = layout.low, layout.high
    order = torch.tensor([layout.block, low.start, low.step, high.start, high.step], dtype=torch.int32)
    core.int4pack(
        weight.codes.data_ptr(), weight.codes.stride(0), n, k, width, flip if whole else 0, add if whole else 0,
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


def _fill_scales(out: Tensor, part: QuantizedWeight, nibbles: Nibbles, g: int) -> None:
    """Write (s, z) of some rows, out [planes * K' / g, n, 2]."""
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


def _switch(weights: int, planes: int, amx: bool) -> float:
    """The number of rows from which panels are faster, by the measured costs of both; `weights` counts each plane."""
    weights //= planes
    per_row = planes * EACH_ROW[amx] - PRODUCT_ROW[amx]
    return (_panel_seconds(weights, planes, amx) + weights * 3e-11) / (per_row * weights)


def _panel_seconds(weights: int, planes: int, amx: bool) -> float:
    """Seconds to dequantize on two cores: a dozen calls a panel, and five passes over it."""
    each = (1.9e-10, 2.4e-10)[planes - 1] * (1.3 if amx else 1.0)
    return 70e-6 * -(-weights // PANEL) + weights * each


def _by_panels(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """x [M, K'] times the packed weight, some rows of it at a time, each dequantized as [K', rows]."""
    layout = int4_packing.layout()
    assert layout is not None
    k, block = x.shape[1], layout.block
    planes, n_pad = codes.shape[1] * 2 // k, codes.shape[0]
    groups = scales.shape[0] // planes
    symmetric = spec.zero == "none" and _require(spec).center == 0
    step = min(n_pad, max(int4_packing.ROWS, PANEL // k // int4_packing.ROWS * int4_packing.ROWS))
    panel, byte = x.new_empty(k * step), codes.new_empty(k * step // 2)
    y = x.new_empty(x.shape[0], spec.n)
    for r in range(0, n_pad, step):
        n = min(step, n_pad - r)
        w = panel[: k * n].view(k, n)
        data = layout.blocks(codes[r : r + n], k * planes).unflatten(1, (planes, k))
        _decode(data, byte[: k * n // 2].view(n // block, k, -1), w.view(k, n // block, block).permute(1, 0, 2), layout)
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


def _decode(data: Tensor, byte: Tensor, out: Tensor, layout: int4_packing.Layout) -> None:
    """Nibbles [blocks, planes, K, block / 2] to the signed integers they stand for, out bfloat16 [blocks, K, block].

    `byte` is room for half of them. Subtracting 8 (or 128) wraps around, and the byte is then read as a signed one.
    """
    first = data[:, 0]
    if data.shape[1] == 1:
        torch.bitwise_and(first, 15, out=byte).sub_(8)
        out[..., layout.low] = byte.view(torch.int8)
        torch.bitwise_right_shift(first, 4, out=byte).sub_(8)
        out[..., layout.high] = byte.view(torch.int8)
        return
    second = data[:, 1]
    torch.bitwise_left_shift(first, 4, out=byte).bitwise_or_(second & 15).bitwise_xor_(128)
    out[..., layout.low] = byte.view(torch.int8)
    torch.bitwise_and(first, 0xF0, out=byte).bitwise_or_(second >> 4).bitwise_xor_(128)
    out[..., layout.high] = byte.view(torch.int8)
