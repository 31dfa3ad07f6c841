"""Launches of the kernels of experts, worked out once per projection: grid, compile-time constants, scalars, tensor maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.expert_gate import ExpertGate
from bitline.kernels.hopper import layout, runtime
from bitline.kernels.hopper.config import SmallMConfig, WgmmaConfig
from bitline.kernels.hopper.experts_traits import ExpertsTraits
from bitline.kernels.hopper.runtime import Binary, TypedPointer, remember, tensor_map
from bitline.kernels.hopper.scheme import DequantScheme
from bitline.kernels.hopper.traits import pipelined_scheme_traits, pipelined_traits, wgmma_scheme_traits, wgmma_traits
from bitline.types import LinearSpec

_address = Tensor.data_ptr  # without a look-up for each tensor
UNIT = 256  # bytes: experts of a stack start at multiples of it
_POINTERS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


class Routes(NamedTuple):
    """Tensors of the routing: each pair's expert, and those of `experts_sort`. Unsorted, each pair is a block."""

    experts: Tensor
    in_order: Tensor
    blocks: Tensor
    num_blocks: int


class Launch:
    """A kernel with its compile-time arguments. The first call compiles it; later ones pass addresses to Triton's launcher.

    Each tensor starts at a multiple of 16 bytes and keeps its dtype from call to call. read_as: the dtypes that the kernel reads
    tensors as, by their positions, where these are not their own.
    """

    def __init__(
        self, kernel: Any, constants: tuple[Any, ...], options: dict[str, Any], read_as: Mapping[int, torch.dtype] | None = None
    ) -> None:  # fmt: skip
        self.kernel, self.constants, self.options, self.read_as = kernel, constants, options, read_as or {}
        self.binary: Binary | None = None

    def __call__(self, num_ctas: int, stream: int, tensors: Sequence[Tensor], scalars: tuple[Any, ...]) -> None:
        """Run it."""
        if self.binary is None:
            types = tuple(_POINTERS[self.read_as.get(i, t.dtype)] for i, t in enumerate(tensors))
            key = (self.kernel.__name__, self.constants, types, tensors[0].get_device())
            self.binary = runtime.binaries.get(key)
            if self.binary is None:
                typed = tuple(TypedPointer(t, name) for t, name in zip(tensors, types, strict=True))
                self.binary = runtime.binaries[key] = runtime.compile_and_run(
                    self.kernel, num_ctas, (*typed, *scalars), self.constants, self.options
                )
                return
        self.binary(num_ctas, stream, (*map(_address, tensors), *scalars, *self.constants))


def _units(stack: Tensor) -> int:
    """UNITs from one expert to the next."""
    return stack.stride(0) * stack.element_size() // UNIT if stack.numel() else 0


def _typed(packed: Sequence[Tensor], scheme: DequantScheme) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, scales, zero points and alpha of a stack as the device code sees them; without zero points the weight again."""
    weight, scale, zero, alpha = packed[:4]
    scale = scale if scheme.fp32_scales else scale.view(torch.int32)
    return weight, scale, zero.view(torch.int16) if scheme.zero_points else weight, alpha


class SmallProjection:
    """A launch of `experts_small_m`."""

    def __init__(
        self, spec: LinearSpec, scheme: DequantScheme, gate: ExpertGate | None, has_bias: bool, config: SmallMConfig, tile: int,
        *, is_sorted: bool, waits_first: bool,
    ) -> None:  # fmt: skip
        self.spec, self.config, scheme = spec, config, scheme.pipelined()
        self.scheme, m8_tiles = scheme, tile // 8
        n16_tiles, columns = layout.padded_shape(spec.n, spec.k)
        k_tile = 64 * scheme.k_blocks_per_tile
        iterations = -(-columns // (k_tile * config.k_slices))
        even = columns == iterations * config.k_slices * k_tile and spec.k % k_tile == 0
        experts = ExpertsTraits.of(gate, is_sorted=is_sorted, waits_first=waits_first)
        halves = 2 if experts.gated else 1
        self.constants = (
            pipelined_scheme_traits(scheme, has_bias, m8_tiles, True, even), pipelined_traits(config, scheme, m8_tiles, even),
            experts, config.num_warps,
        )  # fmt: skip
        self.options = {"num_warps": config.num_warps, "launch_pdl": True}
        self.tiles_n = -(-(n16_tiles // halves) // (config.n16_per_cta // halves))
        self.sizes: tuple[int, ...] = (spec.n, spec.k, columns // 64, n16_tiles, scheme.scales_per_row, iterations)
        self.launch: Launch | None = None

    def run(
        self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, out: Tensor, routes: Routes, num_experts: int,
        pairs_per_x: int, stream: int,
    ) -> None:  # fmt: skip
        """out[pair] from rows of x by pair."""
        if self.launch is None:
            typed = _typed(packed, self.scheme)
            self.sizes = (*map(_units, typed), *self.sizes)  # the same for all stacks of one spec
            read_as = {1 + i: t.dtype for i, t in enumerate(typed[:3])}
            self.launch = Launch(runtime.experts().small_m, self.constants, self.options, read_as)
        numbers, in_order, blocks, num_blocks = routes
        tensors = (
            x, packed[0], packed[1], packed[2], x if bias is None else bias, packed[3], out, numbers, in_order, blocks
        )  # fmt: skip
        scalars = (*self.sizes, num_blocks, num_experts, pairs_per_x, self.tiles_n)
        self.launch(self.tiles_n * num_blocks, stream, tensors, scalars)


class PersistentProjection:
    """A launch of `experts_persistent`, of rows sorted by expert."""

    def __init__(
        self, spec: LinearSpec, scheme: DequantScheme, gate: ExpertGate | None, has_bias: bool, config: WgmmaConfig,
    ) -> None:  # fmt: skip
        self.spec, self.scheme, self.config = spec, scheme, config
        experts = ExpertsTraits.of(gate, is_sorted=True, waits_first=True)
        self.constants = (wgmma_scheme_traits(scheme, has_bias), wgmma_traits(config, 0), experts)
        launch_registers = config.registers[0]
        self.options = {"num_warps": 4, "launch_pdl": True, **({"maxnreg": launch_registers} if launch_registers else {})}
        self.num_n16, columns = layout.padded_shape(spec.n, spec.k)
        self.width = spec.n // 2 if experts.gated else spec.n
        channels = 64 * config.n64_per_cta // (2 if experts.gated else 1)
        self.sizes = (spec.n, -(-columns // (64 * config.k_blocks_per_stage)), -(-self.width // channels), self.num_n16)
        per_block = scheme.scales_per_k_block
        self.box_rows = 4 * config.n64_per_cta // (2 if experts.gated else 1)  # a multiple of 128 bytes, as TMA needs
        self.columns = (128 * scheme.bits // 4, (16 if scheme.fp32_scales else 8) * per_block, 8 * per_block)
        self.maps: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self.binary: Binary | None = None

    def run(
        self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, routes: Routes, num_experts: int, stream: int
    ) -> None:  # fmt: skip
        """y [rows, N or I] from x [rows, K], rows by expert."""
        alpha = packed[3]
        scalars = (_units(alpha), *self.sizes, routes.num_blocks, num_experts, self.config.num_ctas)
        if self.binary is None and not self._find_binary(x, packed, bias, y, routes, scalars):
            return
        assert self.binary is not None
        x_format, *weight_formats, y_format = self.binary.map_formats
        maps = (
            *self._map(x, x_format), *self._weight_maps(packed, num_experts, weight_formats), *self._map(y, y_format),
        )  # fmt: skip
        pointers = (0 if bias is None else bias.data_ptr(), alpha.data_ptr(), routes.blocks.data_ptr())
        self.binary(self.config.num_ctas, stream, (*maps, *pointers, *scalars, *self.constants))

    def _map(self, rows: Tensor, map_format: tuple[Any, ...]) -> tuple[Any, ...]:
        """The launcher's arguments for x or y."""
        height, width = rows.shape
        key = (rows.data_ptr(), height, width)
        return self.maps.get(key) or remember(self.maps, key, tensor_map(*key, map_format))

    def _matrices(self, packed: Sequence[Tensor], num_experts: int) -> list[tuple[Tensor, int, int]]:
        """(stack, rows, columns) of weights, scales and zero points, all experts below each other."""
        weight, scale, zero, _ = _typed(packed, self.scheme)
        parts = (weight, scale, zero) if self.scheme.zero_points else (weight, scale)
        entries = 8 if not self.scheme.fp32_scales else 16
        widths = (weight[0].numel() // self.num_n16, self.scheme.scales_per_row * entries, self.scheme.scales_per_row * 8)
        return [(part, num_experts * self.num_n16, width) for part, width in zip(parts, widths, strict=False)]

    def _weight_maps(self, packed: Sequence[Tensor], num_experts: int, formats: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """The launcher's arguments for a stack."""
        assert self.binary is not None
        key = (packed[0].data_ptr(), packed[1].data_ptr(), packed[2].data_ptr(), num_experts, self.spec.n, self.spec.k)
        found = self.binary.weight_maps.get(key)
        if found is None:
            made: list[Any] = []
            for (part, rows, columns), map_format in zip(self._matrices(packed, num_experts), formats, strict=True):
                made += tensor_map(part.data_ptr(), rows, columns, map_format)
            found = remember(self.binary.weight_maps, key, (*made, *(() if self.scheme.zero_points else (0,))))
        return found

    def _find_binary(
        self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, routes: Routes, scalars: tuple[Any, ...]
    ) -> bool:  # fmt: skip
        """Whether the kernel was compiled before; else compile it, and run it for this call."""
        key = (self.constants, self.box_rows, x.get_device())
        self.binary = runtime.binaries.get(key)
        if self.binary is not None:
            return True
        gluon, tile = runtime.gluon(), self.config.tile_m
        descriptor = gluon.TensorDescriptor.from_tensor
        layouts = (gluon.plain32, gluon.plain32, gluon.plain16)
        parts = []
        for i, (part, *shape) in enumerate(self._matrices(packed, scalars[-2])):
            matrix = part.as_strided(shape, (shape[1], 1))
            parts.append(descriptor(matrix, [self.box_rows, self.columns[i]], layouts[i]))
        args = (
            descriptor(x, [tile, 64], gluon.swizzle128), *parts, *(() if self.scheme.zero_points else (packed[0],)),
            descriptor(y, [tile, 64], gluon.swizzle128), x if bias is None else bias, packed[3], routes.blocks, *scalars,
        )  # fmt: skip
        self.binary = runtime.binaries[key] = runtime.compile_and_run(
            runtime.experts().persistent, self.config.num_ctas, args, self.constants, self.options
        )
        return False
