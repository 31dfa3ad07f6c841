"""TritonW4A16LinearKernel: 2-, 4- and 8-bit integer weights with 16- or 32-bit inputs, on any GPU that Triton knows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitline import bits, env
from bitline.kernels.base import Kernel, Packed, matmul_rate
from bitline.kernels.triton.tiles import PANEL_ELEMENTS, Tile, choose_tile, fused_limit
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, no
from bitline.weight import QuantizedWeight

_WORDS = 16  # int32 words of one row and chunk; the device code's layout (w4a16_device.py)
_SPAN = 32  # the fewest columns that share a scale in the packed form


class TritonW4A16LinearKernel(Kernel):
    """Integer codes go into the matrix instruction as they are; scales are applied to float32 sums.

    More exact than dequantizing first, since no weight is rounded to the input's dtype. Up to `fused_limit` rows one
    kernel does it all; above, panels of the weight are dequantized to scratch and torch multiplies.
    """

    platforms = ("cuda", "rocm", "xpu", "cpu")
    backend = "triton"
    families = ("mp",)
    priority = 10
    measured = ("sm90",)

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Triton, and a device for it: NVIDIA from sm75, AMD, Intel, or its interpreter on a CPU."""
        if "triton" not in platform.packages:
            return no("the package triton is not installed", "pip install triton")
        if platform.vendor == "cpu" and not platform.interpreted:
            return no("Triton has no compiler for CPUs; only its interpreter runs here", "TRITON_INTERPRET=1, for tests")
        if platform.vendor == "cuda" and platform.capability < 75:
            return no(f"{platform.arch} is older than Triton supports", "sm75 or newer")
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Weight-only 2, 4 and 8 bits: every shape, group size, zero point, offset, column order and cut."""
        if spec.act is not None:
            return no(
                f"the input is to be quantized ({spec.act}); this kernel is weight-only", "a weight-only scheme, such as W4A16"
            )
        if spec.weight.kind != "int":
            return no(f"weight type {spec.weight} is not an integer", "2-, 4- or 8-bit integers")
        if spec.weight.bits not in (2, 4, 8):
            return no(f"{spec.weight.bits}-bit codes straddle the words of the packed layout", "2, 4 or 8 bits")
        if spec.weight.signed and spec.zero == "int":
            return no("signed codes with zero points", f"uint{spec.weight.bits} with zero points")
        return YES

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """codes int32 [chunks, N, 16]; scale, zero, offset [groups, N]; perm int32 [packed K]; absent ones are empty."""
        layout = _layout(weight.spec)
        position, perm, picked, chunks = _columns(weight, layout)
        codes = _pack_codes(weight, layout, position, chunks)
        row = (torch.arange(weight.spec.n, device=weight.device) + weight.spec.block_offset[0]) // weight.spec.block[0]
        absent = torch.empty(0, device=weight.device)
        folded = weight.scale2 is not None
        tables = {
            "scale": weight.scales() if folded else weight.scale,
            "zero": weight.zero,
            "offset": weight.offsets() if folded else weight.offset,
        }
        packed = {"codes": codes}
        for name, table in tables.items():
            packed[name] = absent if table is None else _table(table, row, picked)
        packed["perm"] = absent.int() if perm is None else perm
        return packed

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """See Kernel.apply."""
        m = x.shape[0]
        if m == 0:
            return x.new_empty(0, spec.n)
        if m > fused_limit(x.dtype):
            return _by_panels(x, packed, bias, spec)
        bias_dtype = None if bias is None else bias.dtype
        return _fused(x, packed, bias, _plan(spec, m, packed[0].shape[0], packed[3].dtype, bias_dtype, x.device))

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """A roofline with the shares of bandwidth and of matrix rate that it was measured to reach on an H200."""
        if platform.vendor == "cpu":
            return 1.0  # the interpreter is for tests
        rates = platform.rates
        size = cls.packed_bytes(spec) + m * (spec.n + spec.k) * spec.act_dtype.itemsize
        flops, rate = 2.0 * m * spec.n * spec.k, matmul_rate(spec, platform)
        if m > fused_limit(spec.act_dtype):
            scratch = spec.act_dtype.itemsize * spec.n * spec.k
            return (size + scratch) / (0.8 * rates.bandwidth) + flops / (0.87 * rate) + 2 * rates.launch
        return max(size / (0.7 * rates.bandwidth), flops / (0.43 * rate)) + 1.5 * rates.launch

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors; of groups that are no multiple of 32 columns, the least that they can take."""
        layout = _layout(spec)
        columns = -(-(spec.k + layout.shift) // layout.chunk) * layout.chunk
        groups = 1 if layout.group == 0 else -(-columns // layout.group)
        scale = spec.scale_dtype.itemsize if spec.scale2_block is None else 4
        per_group = scale * (2 if spec.zero == "float" else 1) + (1 if spec.zero == "int" else 0)
        perm = 4 * columns if spec.act_order or not layout.regular else 0
        return columns * spec.n * layout.bits // 8 + groups * spec.n * per_group + perm


@dataclass(frozen=True)
class _Layout:
    """What the packed form of a spec looks like.

    regular: columns keep their order, and group boundaries fall on multiples of 32 once `shift` empty columns, left
    by a tensor-parallel cut inside a group, are put back. Otherwise each group is padded to a multiple of 32 columns
    and x is gathered. group: columns per scale, 0 where one scale serves a row. middle: the number subtracted from
    every code before the product. adjust: middle minus the type's own bias.
    """

    bits: int
    chunk: int
    regular: bool
    shift: int
    group: int
    middle: int
    adjust: int

    @property
    def span(self) -> int:
        """Columns of a chunk that share a scale."""
        return self.chunk if self.group == 0 else math.gcd(self.chunk, self.group)


@functools.lru_cache(maxsize=4096)
def _layout(spec: LinearSpec) -> _Layout:
    width = spec.weight.bits
    chunk = 32 * _WORDS // width
    half = 1 << (width - 1)
    middle = half if spec.weight.signed or spec.zero == "int" else spec.weight.bias
    bias = half if spec.weight.signed else spec.weight.bias
    channel = not spec.ragged and spec.block[1] >= spec.k
    regular = channel or (not spec.ragged and spec.block[1] % _SPAN == 0)
    group = 0 if channel else spec.block[1] if regular else _SPAN
    shift = spec.block_offset[1] if regular and not channel else 0
    return _Layout(width, chunk, regular, shift, group, middle, middle - bias)


def _columns(weight: QuantizedWeight, layout: _Layout) -> tuple[Tensor | slice, Tensor | None, Tensor | None, int]:
    """Where stored columns go: (positions, perm or None, scale column of each packed group or None, chunks)."""
    k, device = weight.spec.k, weight.device
    source = weight.perm if weight.perm is not None else torch.arange(k, dtype=torch.int32, device=device)
    if layout.regular:
        position: Tensor | slice = slice(layout.shift, layout.shift + k)
        total, picked = layout.shift + k, None
        if weight.perm is None:
            return position, None, None, -(-total // layout.chunk)
    else:
        group = weight.column_groups()
        used, member, count = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
        padded = (count + _SPAN - 1) // _SPAN * _SPAN
        start = padded.cumsum(0) - padded
        within = torch.arange(k, device=device) - (count.cumsum(0) - count)[member]
        position, total = start[member] + within, int(padded.sum())
        picked = used.repeat_interleave(padded // _SPAN)
    chunks = -(-total // layout.chunk)
    perm = torch.full((chunks * layout.chunk,), k, dtype=torch.int32, device=device)
    perm[position] = source
    if picked is not None:
        picked = torch.nn.functional.pad(picked, (0, chunks * layout.chunk // _SPAN - picked.numel()))
    return position, perm, picked, chunks


def _table(table: Tensor, row: Tensor, picked: Tensor | None) -> Tensor:
    """[row blocks, groups] to [groups, N]; 16- and 32-bit floats and zero points keep their dtype."""
    if table.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
        table = table.float()
    if picked is not None:
        table = table.index_select(1, picked)
    return table.t().index_select(1, row).contiguous()


def _pack_codes(weight: QuantizedWeight, layout: _Layout, position: Tensor | slice, chunks: int) -> Tensor:
    """Codes re-laid a run of rows at a time: int32 [chunks, N, 16]."""
    s, width = weight.spec, layout.bits
    out = torch.empty(chunks, s.n, _WORDS, dtype=torch.int32, device=weight.device)
    step = bits.rows_per_chunk(8 * s.k)
    for r in range(0, s.n, step):
        codes = bits.unpack(weight.codes[r : r + step], width, s.k)
        if s.weight.signed:
            codes = codes ^ (1 << (width - 1))
        rows = codes.shape[0]
        placed = torch.zeros(rows, chunks * layout.chunk, dtype=torch.uint8, device=weight.device)
        placed[:, position] = codes
        fields = placed.view(rows, chunks, 16 // width, _WORDS, 2)
        words = torch.zeros(rows, chunks, _WORDS, dtype=torch.int32, device=weight.device)
        for f in range(16 // width):
            for half in (0, 1):
                words |= fields[:, :, f, :, half].int() << (f * width + 16 * half)
        out[:, r : r + rows] = words.transpose(0, 1)
    return out


@functools.cache
def _device() -> Any:
    """The device code's module: the only import of Triton."""
    from bitline.kernels.triton import w4a16_device

    return w4a16_device


@functools.cache
def _interpreted() -> bool:
    return env.triton_interpret()


@functools.cache
def _machine(device: torch.device) -> tuple[bool, int]:
    """Whether it is NVIDIA's (or the interpreter), and the shared memory that one program may take."""
    if device.type == "cuda" and not torch.version.hip:
        properties: Any = torch.cuda.get_device_properties(device)
        return True, int(properties.shared_memory_per_block_optin)
    return device.type == "cpu", 64 * 1024


@functools.lru_cache(maxsize=4096)
def _constants(spec: LinearSpec, bias: bool, tile: Tile, chunks: int, pair_bfloat: bool) -> dict[str, Any]:
    """The compile-time arguments of `gemm_kernel`; looked up once per layer, bias and tile."""
    layout = _layout(spec)
    even = layout.regular and not spec.act_order and layout.shift == 0 and spec.k == chunks * layout.chunk
    even = even and chunks % (tile.slices * tile.splits) == 0
    bfloat = spec.act_dtype == torch.bfloat16
    pairs = (bfloat and layout.bits <= 4 and pair_bfloat) or spec.act_dtype == torch.float16
    return {
        "BITS": layout.bits, "GROUP": layout.group, "SPAN": layout.span, "MIDDLE": layout.middle, "ADJUST": layout.adjust,
        "HAS_ZERO": spec.zero == "int", "HAS_OFFSET": spec.zero == "float",
        "HAS_PERM": spec.act_order or not layout.regular, "HAS_BIAS": bias, "EVEN": even, "SPLIT": tile.splits > 1,
        "PAIRS": pairs, "UPCAST": bfloat and _interpreted(), "S": tile.slices, "BN": tile.bn, "BM": tile.bm,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


class _Plan:
    """Everything about a launch that depends on the layer and the bucket of M only."""

    def __init__(self, spec: LinearSpec, tile: Tile, chunks: int, bias: bool, device: torch.device) -> None:
        self.spec, self.tile, self.chunks = spec, tile, chunks
        # AMD and Intel have no packed bfloat16 arithmetic to speak of, the interpreter none at all.
        self.constants = _constants(spec, bias, tile, chunks, device.type == "cuda" and not torch.version.hip)
        self.shift = _layout(spec).shift
        self.per_split = -(-chunks // (tile.splits * tile.slices)) * tile.slices
        self.columns = -(-spec.n // tile.bn)
        self.values = [self.constants[name] for name in _device().gemm_kernel.arg_names if name in self.constants]
        self.compiled: Any = None
        self.reducer: Any = None

    def launch(self, grid: tuple[int, int, int], aligned: bool, *arguments: Any) -> None:
        """Run `gemm_kernel`: past the first call without Triton's argument inspection, which costs more than the kernel.

        What Triton compiled depends on what a plan is looked up by, and on the pointers being multiples of 16.
        """
        if self.compiled is not None and aligned:
            self.compiled[grid](*arguments, *self.values)
            return
        compiled = _device().gemm_kernel[grid](*arguments, **self.constants)
        if aligned:
            self.compiled = compiled

    def reduce(self, parts: Tensor, bias_or_x: Tensor, y: Tensor, has_bias: bool, aligned: bool) -> None:
        """Add the splits' sums [splits, M, N] in their order, and the bias, into y; launched as in `launch`."""
        size, n, splits = y.numel(), self.spec.n, self.tile.splits
        grid = (-(-size // 512), 1, 1)
        if self.reducer is not None and aligned:
            self.reducer[grid](parts, bias_or_x, y, size, n, splits, has_bias, 512)
            return
        compiled = _device().reduce_kernel[grid](
            parts, bias_or_x, y, size, n, SPLITS=splits, HAS_BIAS=has_bias, BLOCK=512, num_warps=4
        )
        if aligned:
            self.reducer = compiled


_plans: dict[tuple[Any, ...], _Plan] = {}


def _plan(spec: LinearSpec, m: int, chunks: int, offset: torch.dtype, bias: torch.dtype | None, device: torch.device) -> _Plan:
    """The plan of a layer and M, by the identity of the spec: hashing one takes longer than launching a kernel.

    offset, bias: dtypes that a spec leaves open. A plan keeps its spec alive, so that the identity stays its own.
    """
    rows = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else -(-m // 128) * 128
    key = (id(spec), rows, chunks, offset, bias, device)
    plan = _plans.get(key)
    if plan is None:
        nvidia, shared = _machine(device)
        tile = choose_tile(rows, spec.n, chunks, _layout(spec).chunk, spec.act_dtype, spec.zero != "none", nvidia, shared)
        plan = _plans[key] = _Plan(spec, tile, chunks, bias is not None, device)
    return plan


def _fused(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, plan: _Plan) -> Tensor:
    codes, scale, zero, offset, perm = packed
    m, n, tile = x.shape[0], plan.spec.n, plan.tile
    # The interpreter's own rounding to bfloat16 is not to nearest; torch's is.
    y = torch.empty(m, n, dtype=torch.float32 if _interpreted() else x.dtype, device=x.device)
    split = tile.splits > 1
    out = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device) if split else y
    bias_or_x = x if bias is None else bias
    aligned = (x.data_ptr() | bias_or_x.data_ptr()) % 16 == 0
    plan.launch(
        (plan.columns, -(-m // tile.bm), tile.splits), aligned,
        x, codes, scale, zero, offset, perm, bias_or_x, out,
        m, n, plan.spec.k, plan.shift, plan.chunks, scale.shape[0], plan.per_split,
    )  # fmt: skip
    if split:
        plan.reduce(out, bias_or_x, y, bias is not None, aligned)
    return y.to(x.dtype) if y.dtype != x.dtype else y


def _by_panels(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Dequantize as many rows of W as the scratch holds, multiply, and go on with the next."""
    codes, scale, zero, offset, perm = packed
    layout, k, shift = _layout(spec), spec.k, _layout(spec).shift
    if perm.numel():  # packed column order, padding and all: x follows it
        x = torch.nn.functional.pad(x, (0, 1)).index_select(1, perm)
        k, shift = perm.numel(), 0
    rows = max(256, PANEL_ELEMENTS // k // 256 * 256)
    panel = torch.empty(min(rows, spec.n), k, dtype=torch.float32 if _interpreted() else x.dtype, device=x.device)
    y = x.new_empty(x.shape[0], spec.n)
    block = 32
    for r in range(0, spec.n, rows):
        stop = min(r + rows, spec.n)
        _device().dequantize_kernel[(-(-(stop - r) // block), codes.shape[0])](
            codes, scale, zero, offset, panel, spec.n, k, shift, r, stop, scale.shape[0],
            BITS=layout.bits, GROUP=layout.group, SPAN=layout.span, MIDDLE=layout.middle, ADJUST=layout.adjust,
            HAS_ZERO=spec.zero == "int", HAS_OFFSET=spec.zero == "float", BN=block, num_warps=4,
        )  # fmt: skip
        w = panel[: stop - r].to(x.dtype).t()
        if bias is None:
            torch.mm(x, w, out=y[:, r:stop])
        else:
            torch.addmm(bias[r:stop], x, w, out=y[:, r:stop])
    return y
