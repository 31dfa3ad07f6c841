"""The experts of a mixture-of-experts layer on Hopper: sort, projection and gate, projection, weighted sum.

Launch sizes depend on shapes alone and nothing waits for the GPU, so that a captured CUDA graph replays with other routings.
`experts_small_m` has blocks of up to 16 pairs and gathers rows of x itself; for `experts_persistent` they are copied into the
experts' order first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.expert_counts import active_experts
from bitline.expert_gate import ExpertGate
from bitline.kernels.hopper import layout, runtime
from bitline.kernels.hopper.experts_config import LARGEST_BLOCK, persistent_config, small_m_config, tile_for
from bitline.kernels.hopper.experts_plans import UNIT, Launch, PersistentProjection, Routes, SmallProjection
from bitline.kernels.hopper.launch import num_sms
from bitline.kernels.hopper.scheme import DequantScheme, dequant_scheme
from bitline.kernels.triton import experts as portable
from bitline.types import LinearSpec

RowFunction = Callable[[Tensor], Tensor]
SCRATCH_ELEMENTS = 1 << 28  # of each scratch tensor of a launch: 512 MiB; more tokens take more launches
COPY_BLOCK = 1024  # columns that `gather_kernel` copies at a time
_INDEX, _WEIGHTS = (torch.int32, torch.int64), (torch.float32, torch.bfloat16, torch.float16)


def fuses_experts(spec: LinearSpec) -> bool:
    """Whether a projection of experts can be one of these: rows of x and y in multiples of 16 bytes, whole tiles of W, and tables
    of the experts' scales without gaps."""
    scheme = dequant_scheme(spec)
    if not isinstance(scheme, DequantScheme) or spec.act_order or spec.n % 32 or spec.k % 8:
        return False
    n16_tiles, _ = layout.padded_shape(spec.n, spec.k)
    table = n16_tiles * scheme.scales_per_row * 16  # entries of an expert
    return table * (4 if scheme.fp32_scales else 2) % UNIT == 0 and (not scheme.zero_points or table % UNIT == 0)


class ExpertsPlan:
    """Everything about the launches that depends only on the layer, the number of experts and the bucket of pairs."""

    def __init__(
        self, specs: tuple[LinearSpec, LinearSpec], gate: ExpertGate, num_experts: int, has_bias: tuple[bool, bool], pairs: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.specs, self.num_experts = specs, num_experts  # specs are kept alive: plans are keyed by their id
        sms = num_sms(device.index or 0)
        self.tile, self.is_sorted, blocks = load_of(specs, num_experts, pairs)
        self.projections: list[SmallProjection | PersistentProjection] = []
        for i, (spec, bias) in enumerate(zip(specs, has_bias, strict=True)):
            scheme, own_gate = dequant_scheme(spec), gate if i == 0 else None
            assert isinstance(scheme, DequantScheme)
            gated = own_gate is not None and own_gate.gated
            small = small_m_config(spec, scheme, self.tile, blocks, gated, sms) if self.tile <= LARGEST_BLOCK else None
            if self.tile <= LARGEST_BLOCK and small is None:
                raise InputError("experts too narrow for GluonHopperLinearKernel", found=f"{spec.n} rows of W")
            self.projections.append(
                SmallProjection(spec, scheme, own_gate, bias, small, self.tile, is_sorted=self.is_sorted, waits_first=i == 0)
                if small is not None
                else PersistentProjection(
                    spec, scheme, own_gate, bias, persistent_config(spec, scheme, self.tile, blocks, gated, sms)
                )
            )
        code, (largest, self.map_block) = runtime.experts(), portable.map_sizes(num_experts)
        warps = {"num_warps": 4}
        n, k = specs[1].n, specs[0].k
        self.sort = Launch(code.sort, (portable.SORT_BLOCK,), warps)
        self.blocks = Launch(code.blocks, (self.tile, largest, self.map_block), warps)
        self.gather = Launch(code.gather, (k, self.tile, min(COPY_BLOCK, 1 << (k - 1).bit_length())), warps)
        self.weighted_sum = Launch(code.weighted_sum, (n, self.tile > LARGEST_BLOCK, portable.SUM_BLOCK), warps)
        self.sum_tiles = -(-n // portable.SUM_BLOCK)
        self.empty = runtime.fast_empty()

    def new(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """An uninitialized [rows, columns] of x's dtype on its GPU."""
        if self.empty is None:
            return x.new_empty(rows, columns)
        made: Tensor = self.empty((rows, columns), (columns, 1), x.dtype)
        return made

    def routes(self, index: Tensor, stream: int) -> Routes:
        """Pairs sorted by expert, and their blocks: as many as any routing takes."""
        pairs, experts = index.numel(), self.num_experts
        if not self.is_sorted:
            return Routes(index, index, index, pairs)
        num_blocks = portable.most_blocks(pairs, experts, self.tile)
        sizes = (pairs, 2 * experts, 3 * num_blocks + 1)
        in_order, ranges, blocks = (torch.empty(size, dtype=torch.int32, device=index.device) for size in sizes)
        self.sort(experts, stream, (index, in_order, ranges), (pairs, experts))
        self.blocks(-(-num_blocks // self.map_block), stream, (ranges, blocks), (num_blocks, experts))
        return Routes(index, in_order, blocks, num_blocks)

    def run(
        self, x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
        down_bias: Tensor | None, y: Tensor, between: RowFunction | None,
    ) -> None:  # fmt: skip
        """x [T, K], index and weights [T, k] to y [T, N]; all contiguous, at multiples of 16 bytes."""
        (tokens, top_k), experts, stream = index.shape, self.num_experts, runtime.raw_stream(x.get_device())
        routes = self.routes(index, stream)
        first, second = self.projections
        rows = index
        if isinstance(first, SmallProjection) and isinstance(second, SmallProjection):
            hidden, results = self.new(x, index.numel(), self.specs[1].k), self.new(x, index.numel(), self.specs[1].n)
            first.run(x, up, up_bias, hidden, routes, experts, top_k, stream)
            hidden = hidden if between is None else between(hidden)
            second.run(hidden, down, down_bias, results, routes, experts, 1, stream)
        else:
            assert isinstance(first, PersistentProjection) and isinstance(second, PersistentProjection)
            padded = routes.num_blocks * self.tile
            in_order, hidden, results = (self.new(x, padded, n) for n in (x.shape[1], self.specs[1].k, self.specs[1].n))
            rows = torch.empty(index.numel(), dtype=torch.int32, device=x.device)
            tensors = (x, routes.in_order, routes.blocks, in_order, rows)
            self.gather(padded, stream, tensors, (top_k, routes.num_blocks, experts))
            first.run(in_order, up, up_bias, hidden, routes, experts, stream)
            hidden = hidden if between is None else between(hidden)
            second.run(hidden, down, down_bias, results, routes, experts, stream)
        tensors = (results, index, weights, rows, y)
        self.weighted_sum(tokens * self.sum_tiles, stream, tensors, (experts, top_k, self.sum_tiles))


def load_of(specs: tuple[LinearSpec, LinearSpec], num_experts: int, pairs: int) -> tuple[int, bool, float]:
    """(tile of pairs, whether they are sorted, expected number of blocks)."""
    if not portable.sorting_pays(pairs, num_experts, specs[0].weight_bytes() + specs[1].weight_bytes()):
        return 8, False, pairs
    active = active_experts(num_experts, 1, pairs)
    tile = tile_for(pairs / active)
    return tile, True, active * max(1.0, pairs / active / tile)


_plans: dict[tuple[Any, ...], ExpertsPlan] = {}


def experts_plan(
    specs: tuple[LinearSpec, LinearSpec], gate: ExpertGate, num_experts: int, has_bias: tuple[bool, bool],
    dtypes: tuple[Any, ...], pairs: int, device: torch.device,
) -> ExpertsPlan:  # fmt: skip
    """The plan of a layer and a number of pairs; specs are identified by their ids. dtypes: of index and weights."""
    key = (id(specs[0]), id(specs[1]), gate, num_experts, has_bias, dtypes, pairs, device)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= 4096:
            _plans.clear()
        plan = _plans[key] = ExpertsPlan(specs, gate, num_experts, has_bias, pairs, device)
    return plan


def run_experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
    down_bias: Tensor | None, up_spec: LinearSpec, down_spec: LinearSpec, gate: ExpertGate, between: RowFunction | None = None,
) -> Tensor:  # fmt: skip
    """See Kernel.apply_experts and `kernels.triton.experts.run_experts`. InputError where x is not on the weights' GPU."""
    device = x.get_device()
    if device < 0 or any(t.get_device() != device for t in (index, weights, up[0], down[0])):  # the launcher takes any address
        raise InputError("experts of this kernel, their input and its routing are on one GPU",
                         found=f"{x.device}, {index.device}, {weights.device}, weights on {up[0].device}",
                         fix="move them, or choose a kernel for the weight's device")  # fmt: skip
    index = _aligned(index if index.dtype in _INDEX else index.to(torch.int64))
    weights, x = _aligned(weights if weights.dtype in _WEIGHTS else weights.float()), _aligned(x)
    (tokens, top_k), num_experts, specs = index.shape, up[0].shape[0], (up_spec, down_spec)
    biases = (None if up_bias is None else _aligned(up_bias), None if down_bias is None else _aligned(down_bias))
    has_bias, dtypes = (up_bias is not None, down_bias is not None), (index.dtype, weights.dtype)
    step = max(8, SCRATCH_ELEMENTS // (top_k * max(up_spec.k, down_spec.k, down_spec.n)) // 8 * 8)
    if tokens <= step:
        plan = experts_plan(specs, gate, num_experts, has_bias, dtypes, tokens * top_k, x.device)
        y = plan.new(x, tokens, down_spec.n)
        plan.run(x, index, weights, up, biases[0], down, biases[1], y, between)
        return y
    y = x.new_empty(tokens, down_spec.n)
    for t in range(0, tokens, step):
        part = slice(t, t + step)
        pairs = index[part].numel()
        plan = experts_plan(specs, gate, num_experts, has_bias, dtypes, pairs, x.device)
        plan.run(x[part], index[part], weights[part], up, biases[0], down, biases[1], y[part], between)
    return y


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
