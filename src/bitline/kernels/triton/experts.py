"""Launching the experts of a mixture-of-experts layer: sort, projection and gate, projection, weighted sum.

Launch sizes depend on shapes alone and nothing waits for the GPU, so a captured CUDA graph replays with other routings. Tiles for
Hopper are the fastest of some 30 for each projection of four layers (W4A16 in groups of 128, 8 to 256 experts, 1 to 4096 tokens)
on an H200; those of other GPUs are those of plain layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.expert_counts import active_experts
from bitline.expert_gate import ExpertGate
from bitline.kernels.triton.heuristics import DeviceTraits, GemmConfig, choose_gemm_config, fit_to_device
from bitline.kernels.triton.launch import device_traits, gemm_constants, interpreted
from bitline.kernels.triton.layout import layout_of
from bitline.types import LinearSpec

RowFunction = Callable[[Tensor], Tensor]
MAX_UNSORTED = 64  # pairs up to which each may be a block of its own, which saves the launches of the sort
SORT_BYTES = 18e6  # of weights, read in the time of those launches
SCRATCH_ELEMENTS = 1 << 26  # of each of the two scratch tensors of a launch: 256 MiB in float32; more tokens take more launches
SORT_BLOCK, MAP_BLOCK, SUM_BLOCK = 1024, 32, 512


@functools.cache
def _device_code() -> Any:
    """The device code's kernels by name; importing it imports Triton."""
    from bitline.kernels.triton.device import experts, experts_sort

    return SimpleNamespace(
        sort=experts_sort.sort_kernel, blocks=experts_sort.blocks_kernel, gemm=experts.experts_gemm_kernel,
        weighted_sum=experts.weighted_sum_kernel,
    )  # fmt: skip


class Launch:
    """A kernel with its compile-time arguments, for tensors of the same dtypes and strides at each call."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.constant_args = [constants[name] for name in kernel.arg_names if name in constants]
        self.compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Run it; after the first call without Triton's argument inspection, where all pointers are multiples of 16."""
        aligned = all(a.data_ptr() % 16 == 0 for a in arguments if isinstance(a, Tensor))
        if self.compiled is not None and aligned:
            self.compiled[grid](*arguments, *self.constant_args)
            return
        compiled = self.kernel[grid](*arguments, **self.constants)
        if aligned:
            self.compiled = compiled


class Projection:
    """One projection of all experts: [rows, K] gathered by pair to [pairs, N], or [pairs, N / 2] after a gate."""

    def __init__(self, spec: LinearSpec, constants: dict[str, Any]) -> None:
        self.spec, self.k_offset = spec, layout_of(spec).k_offset
        halves = 2 if constants["GATED"] else 1
        self.tiles_n = -(-(spec.n // halves) // (constants["BLOCK_SIZE_N"] // halves))
        self.launch = Launch(_device_code().gemm, constants)

    def run(
        self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, out: Tensor, routes: tuple[Tensor, Tensor, Tensor],
        num_blocks: int, pairs_per_x: int,
    ) -> None:  # fmt: skip
        """routes: index [pairs], pairs sorted by expert, and their blocks; see `device.experts.experts_gemm_kernel`."""
        codes, scale = packed[:2]
        self.launch(
            (self.tiles_n * num_blocks, 1, 1), x, *packed, x if bias is None else bias, out, *routes,
            *(t.stride(0) for t in packed), self.spec.n, self.spec.k, self.k_offset, codes.shape[1], scale.shape[1], num_blocks,
            codes.shape[0], pairs_per_x, self.tiles_n,
        )  # fmt: skip


def projection_constants(
    spec: LinearSpec, gate: ExpertGate | None, config: GemmConfig, k_blocks: int, has_bias: bool, is_sorted: bool,
    has_bf16x2: bool, no_mma: bool,
) -> dict[str, Any]:  # fmt: skip
    """The compile-time arguments of `experts_gemm_kernel`; gate: what follows the projection, None for nothing."""
    constants = gemm_constants(spec, has_bias, config, k_blocks, has_bf16x2, no_mma)
    gate = gate or ExpertGate("", False)
    own = {"ACTIVATION": gate.activation, "GATED": gate.gated, "ALPHA": gate.alpha, "LIMIT": gate.limit, "SORTED": is_sorted}
    return {**own, **{name: value for name, value in constants.items() if name != "IS_SPLIT_K"}}


# For wgmma. With as few blocks as FEW_PROGRAMS tiles of 128 rows, warps share the columns of narrower tiles.
_HOPPER = {
    8: GemmConfig(1, 128, 8, 4, 3), 16: GemmConfig(1, 128, 16, 4, 3), 32: GemmConfig(1, 128, 32, 4, 3),
    64: GemmConfig(1, 128, 64, 4, 3), 128: GemmConfig(1, 128, 128, 8, 3),
}  # fmt: skip
_HOPPER_FEW, FEW_PROGRAMS = GemmConfig(4, 32, 8, 4, 3), 300


class Load(NamedTuple):
    """What a number of pairs means for the launches.

    tile_m: 8, 16, 32, 64 or 128. few: for each projection, whether the device is not filled by tiles of 128 rows.
    """

    tile_m: int
    is_sorted: bool
    few: tuple[bool, bool]


def tile_for(pairs_per_expert: float) -> int:
    """The tile of pairs for experts that have so many each on average: a last tile is half padding."""
    return next((tile for tile, most in ((8, 6), (16, 28), (32, 48), (64, 200)) if pairs_per_expert <= most), 128)


def sorting_pays(pairs: int, num_experts: int, expert_bytes: int) -> bool:
    """Whether pairs are sorted by expert. expert_bytes: of one expert's weights, which unsorted pairs of it read again each."""
    return pairs > MAX_UNSORTED or (pairs - active_experts(num_experts, 1, pairs)) * expert_bytes > SORT_BYTES


def load_of(pairs: int, num_experts: int, rows: tuple[int, int], expert_bytes: int) -> Load:
    """rows: N of both projections. expert_bytes: as in `sorting_pays`."""
    active = active_experts(num_experts, 1, pairs)
    is_sorted = sorting_pays(pairs, num_experts, expert_bytes)
    tile = tile_for(pairs / active) if is_sorted else 8
    blocks = active * max(1.0, pairs / active / tile) if is_sorted else pairs
    up, down = (tile == 8 and blocks * n / 128 <= FEW_PROGRAMS for n in rows)
    return Load(tile, is_sorted, (up, down))


def most_blocks(pairs: int, num_experts: int, tile: int) -> int:
    """Blocks of `tile` pairs of one expert that any routing of so many pairs takes at most."""
    return (pairs + min(num_experts, pairs) * (tile - 1)) // tile


def gemm_configs(
    specs: tuple[LinearSpec, LinearSpec], k_blocks: tuple[int, int], load: Load, traits: DeviceTraits
) -> tuple[GemmConfig, GemmConfig]:
    """Configurations of both projections, with one tile_m.

    Gathered rows of x take more registers than those of a plain layer: with a column order, with waves of 32, or where a warp has
    its own MMA, tiles are smaller, as compiling without running shows.
    """
    m, needs_x_sums = load.tile_m, any(spec.zero != "none" for spec in specs)
    scattered = any(spec.act_order or not layout_of(spec).aligned for spec in specs)
    if traits.warp_level_mma:
        m = min(m, 32 if needs_x_sums else 64)
    if traits.wave32 or scattered:
        m = min(m, 32)
    if needs_x_sums:
        m = min(m, 64)
    if traits.is_nvidia and not (traits.warp_level_mma or traits.no_mma or scattered) and specs[0].act_dtype != torch.float32:
        up, down = (_hopper_config(m, spec, few, traits) for spec, few in zip(specs, load.few, strict=True))
    else:
        up, down = (
            choose_gemm_config(m, spec.n, blocks, layout_of(spec), spec.act_dtype, needs_x_sums, traits)
            for spec, blocks in zip(specs, k_blocks, strict=True)
        )
        if traits.is_nvidia and min(up.tile_m, down.tile_m) >= (32 if traits.warp_level_mma else 64):
            up, down = up._replace(num_warps=8), down._replace(num_warps=8)
    tile_m = min(up.tile_m, down.tile_m)
    if traits.wave32 and specs[0].act_dtype == torch.float32:
        up, down = up._replace(num_stages=1), down._replace(num_stages=1)
    return up._replace(tile_m=tile_m, split_k=1), down._replace(tile_m=tile_m, split_k=1)


def _hopper_config(m: int, spec: LinearSpec, few: bool, traits: DeviceTraits) -> GemmConfig:
    config = _HOPPER_FEW if few and m == 8 else _HOPPER[m]
    if m <= 16 and config.tile_n == 128 and spec.n % 128:
        config = config._replace(tile_n=64, num_warps=2 if m == 8 else 4, num_stages=4)
    layout = layout_of(spec)
    if m == 64 and (spec.zero != "none" or layout.low_bits + layout.high_bits != 4 or layout.lut):
        config = config._replace(num_warps=8)  # more accumulators or more arithmetic on codes: 4 warps lack registers
    return fit_to_device(config, layout, spec.act_dtype, spec.zero != "none", traits)


def map_sizes(num_experts: int) -> tuple[int, int]:
    """MAX_EXPERTS and BLOCK_SIZE of `blocks_kernel`, which compares so many blocks with so many experts in registers."""
    largest = 1 << (num_experts - 1).bit_length()
    return largest, max(1, min(MAP_BLOCK, (1 << 14) // largest))


class ExpertsPlan:
    """Everything about the launches that depends only on the layer, the number of experts and the bucket of pairs."""

    def __init__(
        self, specs: tuple[LinearSpec, LinearSpec], gate: ExpertGate, num_experts: int, k_blocks: tuple[int, int],
        has_bias: tuple[bool, bool], load: Load, device: torch.device,
    ) -> None:  # fmt: skip
        self.specs = specs  # kept alive: plans are keyed by their id
        self.num_experts, self.is_sorted = num_experts, load.is_sorted
        traits = device_traits(device)
        has_bf16x2 = device.type == "cuda" and not torch.version.hip
        configs = gemm_configs(specs, k_blocks, load, traits)
        self.tile_m = configs[0].tile_m
        self.up, self.down = (
            Projection(spec, projection_constants(spec, f, config, blocks, bias, load.is_sorted, has_bf16x2, traits.no_mma))
            for spec, f, config, blocks, bias in zip(specs, (gate, None), configs, k_blocks, has_bias, strict=True)
        )
        code = _device_code()
        self.sort = Launch(code.sort, {"BLOCK_SIZE": SORT_BLOCK, "num_warps": 4})
        largest, self.map_block = map_sizes(num_experts)
        self.blocks = Launch(code.blocks, {"BLOCK_SIZE_M": self.tile_m, "MAX_EXPERTS": largest, "BLOCK_SIZE": self.map_block,
                                           "num_warps": 4})  # fmt: skip
        self.weighted_sum = Launch(
            code.weighted_sum, {"N": specs[1].n, "HAS_ROWS": False, "BLOCK_SIZE": SUM_BLOCK, "num_warps": 4}
        )

    def routes(self, index: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """(index, pairs sorted by expert, their blocks) and the number of blocks, the most that any routing takes."""
        pairs, experts = index.numel(), self.num_experts
        if not self.is_sorted:
            return (index, index, index), pairs
        num_blocks = most_blocks(pairs, experts, self.tile_m)
        in_order, ranges, blocks = (
            torch.empty(size, dtype=torch.int32, device=index.device) for size in (pairs, 2 * experts, 3 * num_blocks + 1)
        )
        self.sort((experts, 1, 1), index, in_order, ranges, pairs, experts)
        self.blocks((-(-num_blocks // self.map_block), 1, 1), ranges, blocks, num_blocks, experts)
        return (index, in_order, blocks), num_blocks

    def run(
        self, x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
        down_bias: Tensor | None, y: Tensor, between: RowFunction | None = None,
    ) -> None:  # fmt: skip
        """x [T, K], index and weights [T, k], contiguous, to y [T, N]."""
        (tokens, top_k), down_spec = index.shape, self.specs[1]
        routes, num_blocks = self.routes(index)
        # The interpreter does not round bfloat16 to nearest, torch does.
        hidden = x.new_empty(index.numel(), down_spec.k, dtype=torch.float32 if interpreted() else x.dtype)
        self.up.run(x, up, up_bias, hidden, routes, num_blocks, top_k)
        results = x.new_empty(index.numel(), down_spec.n, dtype=torch.float32)
        hidden = hidden.to(x.dtype)
        self.down.run(hidden if between is None else between(hidden), down, down_bias, results, routes, num_blocks, 1)
        tiles_n = -(-down_spec.n // SUM_BLOCK)
        self.weighted_sum((tokens * tiles_n, 1, 1), results, index, weights, index, y, self.num_experts, top_k, tiles_n)


_plans: dict[tuple[Any, ...], ExpertsPlan] = {}
_plans_of_pairs: dict[tuple[Any, ...], ExpertsPlan] = {}  # those of each number of pairs, to save `load_of`


def experts_plan(
    specs: tuple[LinearSpec, LinearSpec], gate: ExpertGate, up: Sequence[Tensor], down: Sequence[Tensor],
    biases: tuple[Tensor | None, Tensor | None], index: Tensor, weights: Tensor,
) -> ExpertsPlan:  # fmt: skip
    """The plan of a layer and a number of pairs, cached by the identity of the specs as `launch.launch_plan` does."""
    pairs, num_experts = index.numel(), up[0].shape[0]
    has_bias = (biases[0] is not None, biases[1] is not None)
    dtypes = (up[3].dtype, down[3].dtype, index.dtype, weights.dtype)  # those that the specs leave open
    key = (id(specs[0]), id(specs[1]), gate, num_experts, has_bias, dtypes, index.device)
    plan = _plans_of_pairs.get((pairs, *key))
    if plan is None:
        load = load_of(pairs, num_experts, (specs[0].n, specs[1].n), specs[0].weight_bytes() + specs[1].weight_bytes())
        plan = _plans.get((load, *key))
        if plan is None:
            k_blocks = (up[0].shape[1], down[0].shape[1])
            plan = _plans[load, *key] = ExpertsPlan(specs, gate, num_experts, k_blocks, has_bias, load, index.device)
        if len(_plans_of_pairs) > 4096:
            _plans_of_pairs.clear()
        _plans_of_pairs[pairs, *key] = plan
    return plan


def run_experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
    down_bias: Tensor | None, up_spec: LinearSpec, down_spec: LinearSpec, gate: ExpertGate, between: RowFunction | None = None,
) -> Tensor:  # fmt: skip
    """See Kernel.apply_experts. A number out of range is an InputError on a CPU, and means no expert on a GPU.

    between: [rows, I] to [rows, I], row by row, of the second projection's input; rows of pairs without an expert are undefined.
    """
    (tokens, top_k), num_experts = index.shape, up[0].shape[0]
    if index.device.type == "cpu":
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high > num_experts:
            raise InputError("an expert's number is out of range", found=f"{low}..{high}", expected=f"0..{num_experts - 1}")
    index, weights = index.contiguous(), weights.contiguous()
    y = x.new_empty(tokens, down_spec.n, dtype=torch.float32 if interpreted() else x.dtype)
    step = max(1, SCRATCH_ELEMENTS // (top_k * max(down_spec.k, down_spec.n)))
    for t in range(0, tokens, step):
        part = slice(t, t + step)
        plan = experts_plan((up_spec, down_spec), gate, up, down, (up_bias, down_bias), index[part], weights)
        plan.run(x[part], index[part], weights[part], up, up_bias, down, down_bias, y[part], between)
    return y.to(x.dtype)
