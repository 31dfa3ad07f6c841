"""Running the weight-only device code: the fused kernel up to `fused_limit` rows, dequantized panels above."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline import env
from bitline.kernels.triton.heuristics import PANEL_ELEMENTS, Machine, Tile, choose_tile, fused_limit
from bitline.kernels.triton.layout import exponent_bias, layout_of
from bitline.types import LinearSpec


class Format(NamedTuple):
    """What the device code is compiled for, as to codes (`decode_device`).

    bits, high, table, middle, adjust, fine, power: see `Layout`. mantissa: bits of a minifloat's mantissa, 0 for integers.
    brain: minifloats are decoded through bfloat16, else through float16. wide: with float32 arithmetic. unit, scale_unit: what
    makes up for the difference of exponents' biases, of weights and of fine scales.
    """

    bits: int
    high: int
    table: bool
    middle: int
    adjust: int
    fine: int
    power: bool
    mantissa: int
    brain: bool
    wide: bool
    unit: float
    scale_unit: float


def format_of(spec: LinearSpec, *, packed_bfloat: bool, panel: bool = False) -> Format:
    """The device code's format of a spec. packed_bfloat: the device has 16-bit arithmetic of bfloat16. panel: for float32."""
    layout = layout_of(spec)
    code, half, bfloat = layout.code, spec.act_dtype == torch.float16, spec.act_dtype == torch.bfloat16
    fields = (layout.bits, layout.high, layout.table, layout.middle, layout.adjust, layout.fine, layout.power)
    if code.kind != "float":
        wide = panel or not (half or (bfloat and packed_bfloat and code.bits <= 7 and not interpreted()))
        return Format(*fields, 0, False, wide, 1.0, 1.0)
    brain = bfloat and packed_bfloat and not panel
    wide = panel or not (half or brain) or (brain and interpreted())  # the interpreter cannot multiply bfloat16
    bias = 127 if brain else 15
    # E8M0 under a float16 input is a float16's exponent, 112 less than that of the same float32.
    scale_unit = (2.0**112 if half else 1.0) if layout.power else 2.0 ** (bias - 7)
    unit = 2.0 ** (bias - exponent_bias(code))
    return Format(*fields, code.mantissa, brain, wide, unit, scale_unit)


@functools.cache
def device_code() -> Any:
    """The device code's module: the only import of Triton."""
    from bitline.kernels.triton.device import gemm

    return gemm


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a compiler."""
    return env.triton_interpret()


@functools.cache
def machine(device: torch.device) -> Machine:
    """What tiles depend on."""
    if device.type != "cuda":
        return Machine(device.type == "cpu", False, 64 * 1024)
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Machine(False, getattr(properties, "warp_size", 64) == 32, 64 * 1024)
    return Machine(True, False, int(properties.shared_memory_per_block_optin), properties.major < 8)


@functools.lru_cache(maxsize=4096)
def constants_of(spec: LinearSpec, bias: bool, tile: Tile, chunks: int, packed_bfloat: bool, fma: bool = False) -> dict[str, Any]:
    """The compile-time arguments of `gemm_kernel`; looked up once per layer, bias and tile. fma: see Machine; the fewest columns
    are multiplied at a time then, whose factors fit the registers."""
    layout = layout_of(spec)
    even = layout.regular and not spec.act_order and layout.shift == 0 and spec.k == chunks * layout.chunk
    even = even and chunks % (tile.slices * tile.splits) == 0
    return {
        "F": format_of(spec, packed_bfloat=packed_bfloat), "GROUP": layout.group, "SPAN": 32 if fma else layout.span,
        "HAS_ZERO": spec.zero == "int", "HAS_OFFSET": spec.zero == "float",
        "HAS_PERM": spec.act_order or not layout.regular, "HAS_BIAS": bias, "EVEN": even, "SPLIT": tile.splits > 1,
        "UPCAST": spec.act_dtype == torch.bfloat16 and interpreted(), "S": tile.slices, "BN": tile.bn, "BM": tile.bm,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


class Plan:
    """Everything about a launch that depends on the layer and the bucket of M only."""

    def __init__(self, spec: LinearSpec, tile: Tile, chunks: int, bias: bool, packed_bfloat: bool, fma: bool = False) -> None:
        self.spec, self.tile, self.chunks = spec, tile, chunks
        self.constants = constants_of(spec, bias, tile, chunks, packed_bfloat, fma)
        self.shift = layout_of(spec).shift
        self.per_split = -(-chunks // (tile.splits * tile.slices)) * tile.slices
        self.columns = -(-spec.n // tile.bn)
        self.values = [self.constants[name] for name in device_code().gemm_kernel.arg_names if name in self.constants]
        self.compiled: Any = None
        self.reducer: Any = None

    def launch(self, grid: tuple[int, int, int], aligned: bool, *arguments: Any) -> None:
        """Run `gemm_kernel`: past the first call without Triton's argument inspection, which costs more than the kernel.

        What Triton compiled depends on what a plan is looked up by, and on the pointers being multiples of 16.
        """
        if self.compiled is not None and aligned:
            self.compiled[grid](*arguments, *self.values)
            return
        compiled = device_code().gemm_kernel[grid](*arguments, **self.constants)
        if aligned:
            self.compiled = compiled

    def reduce(self, parts: Tensor, bias_or_x: Tensor, y: Tensor, has_bias: bool, aligned: bool) -> None:
        """Add the splits' sums [splits, M, N] in their order, and the bias, into y; launched as in `launch`."""
        size, n, splits = y.numel(), self.spec.n, self.tile.splits
        grid = (-(-size // 512), 1, 1)
        if self.reducer is not None and aligned:
            self.reducer[grid](parts, bias_or_x, y, size, n, splits, has_bias, 512)
            return
        compiled = device_code().reduce_kernel[grid](
            parts, bias_or_x, y, size, n, SPLITS=splits, HAS_BIAS=has_bias, BLOCK=512, num_warps=4
        )
        if aligned:
            self.reducer = compiled


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_of(spec: LinearSpec, m: int, packed: Sequence[Tensor], bias: torch.dtype | None, device: torch.device) -> Plan:
    """The plan of a layer and M, by the identity of the spec: hashing one takes longer than launching a kernel.

    bias: its dtype, which a spec leaves open, as it does that of offsets. A plan keeps its spec alive, so that the identity
    stays its own.
    """
    rows = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else -(-m // 128) * 128
    chunks = packed[0].shape[0]
    key = (id(spec), rows, chunks, packed[3].dtype, bias, device)
    plan = _plans.get(key)
    if plan is None:
        tile = choose_tile(rows, spec.n, chunks, layout_of(spec), spec.act_dtype, spec.zero != "none", machine(device))
        # AMD and Intel have no packed bfloat16 arithmetic to speak of.
        packed_bfloat = device.type == "cuda" and not torch.version.hip
        plan = _plans[key] = Plan(spec, tile, chunks, bias is not None, packed_bfloat, machine(device).fma)
    return plan


def run(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """x [M, K] times the packed weight, bias added: [M, N] in x's dtype."""
    m = x.shape[0]
    if m == 0:
        return x.new_empty(0, spec.n)
    if m > fused_limit(x.dtype, layout_of(spec), machine(x.device).fma):
        return by_panels(x, packed, bias, spec)
    return fused(x, packed, bias, plan_of(spec, m, packed, None if bias is None else bias.dtype, x.device))


def fused(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, plan: Plan) -> Tensor:
    """One kernel, and one that adds up where K is split over programs."""
    codes, scale, zero, offset, side, perm = packed
    m, n, tile = x.shape[0], plan.spec.n, plan.tile
    # The interpreter's own rounding to bfloat16 is not to nearest; torch's is.
    y = torch.empty(m, n, dtype=torch.float32 if interpreted() else x.dtype, device=x.device)
    split = tile.splits > 1
    out = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device) if split else y
    bias_or_x = x if bias is None else bias
    aligned = (x.data_ptr() | bias_or_x.data_ptr()) % 16 == 0
    plan.launch(
        (plan.columns, -(-m // tile.bm), tile.splits), aligned,
        x, codes, scale, zero, offset, side, perm, bias_or_x, out,
        m, n, plan.spec.k, plan.shift, plan.chunks, scale.shape[0], plan.per_split,
    )  # fmt: skip
    if split:
        plan.reduce(out, bias_or_x, y, bias is not None, aligned)
    return y.to(x.dtype) if y.dtype != x.dtype else y


def by_panels(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Dequantize as many rows of W as the scratch holds, multiply, and go on with the next."""
    codes, scale, zero, offset, side, perm = packed
    layout = layout_of(spec)
    k, shift = spec.k, layout.shift
    if perm.numel():  # packed column order, padding and all: x follows it
        x = torch.nn.functional.pad(x, (0, 1)).index_select(1, perm)
        k, shift = perm.numel(), 0
    rows = max(256, PANEL_ELEMENTS // k // 256 * 256)
    panel = torch.empty(min(rows, spec.n), k, dtype=torch.float32 if interpreted() else x.dtype, device=x.device)
    y = x.new_empty(x.shape[0], spec.n)
    block = 32
    for r in range(0, spec.n, rows):
        stop = min(r + rows, spec.n)
        device_code().dequantize_kernel[(-(-(stop - r) // block), codes.shape[0])](
            codes, scale, zero, offset, side, panel, spec.n, k, shift, r, stop, scale.shape[0],
            F=format_of(spec, packed_bfloat=False, panel=True), GROUP=layout.group, SPAN=layout.span,
            HAS_ZERO=spec.zero == "int", HAS_OFFSET=spec.zero == "float", BN=block, num_warps=4,
        )  # fmt: skip
        w = panel[: stop - r].to(x.dtype).t()
        if bias is None:
            torch.mm(x, w, out=y[:, r:stop])
        else:
            torch.addmm(bias[r:stop], x, w, out=y[:, r:stop])
    return y
