"""A launch, worked out once per layer shape and range of M: grid, compile-time constants, scalar arguments, tensor maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.kernels.hopper import layout, runtime
from bitline.kernels.hopper.config import SmallMConfig, WgmmaConfig
from bitline.kernels.hopper.heuristics import small_m_config, stream_k_partition, wgmma_config
from bitline.kernels.hopper.runtime import Binary, TypedPointer, remember, tensor_map
from bitline.kernels.hopper.scheme import DequantScheme
from bitline.kernels.hopper.traits import (
    gemv_scheme_traits,
    gemv_traits,
    pipelined_scheme_traits,
    pipelined_traits,
    wgmma_scheme_traits,
    wgmma_traits,
)
from bitline.kernels.hopper.workspace import workspace
from bitline.types import LinearSpec


class SmallMPlan:
    """A launch of `gemv_mma` or `small_m_pipelined`: for M up to 4, 8 or 16, or one M up to 32.

    pads_k: x must be padded to whole K blocks; the pipelined kernel takes any K whose rows of x are a multiple of 16 bytes.
    workspace_size: float32 of split-K partials. scalars: the kernel's last arguments before its constants.
    """

    def __init__(
        self, spec: LinearSpec, scheme: DequantScheme, m: int, has_bias: bool, config: SmallMConfig | None = None
    ) -> None:  # fmt: skip
        self.spec = spec  # kept alive, so that its id is not used again
        m8_tiles = -(-m // 8)
        n16_tiles, columns = layout.padded_shape(spec.n, spec.k)
        config = self.config = config or small_m_config(m, n16_tiles, columns // 64, scheme, spec.k % 128 == 0)
        pipelined = config.stages > 0
        self.pads_k = not pipelined
        if pipelined:
            scheme = scheme.pipelined()
        k_tiles = -(-columns // (64 * scheme.k_blocks_per_tile))
        k_tiles_per_iter = config.k_slices * config.k_tiles_per_iter * config.split_k
        iterations = -(-k_tiles // k_tiles_per_iter)
        even = k_tiles == iterations * k_tiles_per_iter
        self.constants: tuple[Any, ...]
        if pipelined:
            even = even and spec.k % (64 * scheme.k_blocks_per_tile) == 0
            traits = pipelined_traits(config, scheme, m8_tiles, even)
            self.constants = (pipelined_scheme_traits(scheme, has_bias, m8_tiles, config.stage_x, even), traits, config.num_warps)
        else:
            traits = gemv_traits(config, m8_tiles, scheme.k_blocks_per_tile, even and n16_tiles % config.n16_per_warp == 0)
            self.constants = (gemv_scheme_traits(scheme, has_bias, m8_tiles, config.stagger_x_loads), traits, config.num_warps)
        self.options = {"num_warps": config.num_warps, "launch_pdl": True}
        if config.max_registers:
            self.options["maxnreg"] = config.max_registers
        self.num_ctas = -(-n16_tiles // config.n16_per_cta) * config.split_k
        self.workspace_size = self.num_ctas * config.n16_per_cta * 128 * m8_tiles if config.split_k > 1 else 0
        self.no_workspace = (0, 0) if pipelined else ()
        self.scalars = (columns // 64 if pipelined else k_tiles, n16_tiles, scheme.scales_per_row, iterations)
        self.tail = (*self.scalars, *self.constants)
        self.empty = runtime.fast_empty()
        self.binary: Binary | None = None

    def find_binary(self, device: int) -> Binary | None:
        """The binary, or None before the first call."""
        if self.binary is None:
            self.binary = runtime.binaries.get((self.constants, self.options.get("maxnreg"), device))
        return self.binary

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y [M, N]; x [M, K] as `launch.run` prepares it."""
        weight, scale, zero, alpha, _ = packed
        m, k = x.shape
        n = self.spec.n
        y = self.empty((m, n), (n, 1), x.dtype) if self.empty else x.new_empty((m, n))
        stream = runtime.raw_stream(x.get_device())
        space: tuple[Any, ...] = workspace(x, self.workspace_size, stream) if self.workspace_size else self.no_workspace
        binary = self.binary or self.find_binary(x.get_device())
        if binary is None:
            self._compile(x, packed, bias, y, space)
            return y
        # Addresses: of a tensor the launcher would ask the driver for its memory type at every call.
        args = (
            x.data_ptr(), weight.data_ptr(), scale.data_ptr(), zero.data_ptr(), 0 if bias is None else bias.data_ptr(),
            alpha.data_ptr(), y.data_ptr(), *space, m, n, k, *self.tail,
        )  # fmt: skip
        binary(self.num_ctas, stream, args)
        return y

    def _compile(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, space: tuple[Any, ...]) -> None:
        """Compile, and run for this call."""
        weight, scale, zero, alpha, _ = packed
        args = (
            x, weight, TypedPointer(scale, "fp32" if scale.dtype == torch.float32 else "i32"), TypedPointer(zero, "i16"),
            x if bias is None else bias, alpha, y,
            *(TypedPointer(*part) for part in zip(space, ("fp32", "i32"), strict=False)),
            x.shape[0], self.spec.n, x.shape[1], *self.scalars,
        )  # fmt: skip
        kernel = runtime.gluon().small_m_pipelined if self.config.stages else runtime.gluon().gemv_mma
        key = (self.constants, self.options.get("maxnreg"), x.get_device())
        runtime.binaries[key] = runtime.compile_and_run(kernel, self.num_ctas, args, self.constants, self.options)

    def x_args(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for x."""
        return (address,)

    def y_args(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for y."""
        return (address,)


class WgmmaPlan:
    """A launch of `wgmma_persistent`: for one M > 16.

    store_rows: rows of x per TMA store, of tile_m and of tile_m_extra. workspace_size: float32 of stream-K partials.
    weight_boxes: TMA boxes of the weight's tensors: rows, and columns of packed int32, scales and zero points. y_shape: with rows
    padded to 16 bytes.
    """

    pads_k = False

    def __init__(
        self, spec: LinearSpec, scheme: DequantScheme, m: int, has_bias: bool, sms: int, config: WgmmaConfig | None = None
    ) -> None:  # fmt: skip
        c = self.config = (config or wgmma_config(m, spec.n, spec.k, sms)).fit_stages(scheme)
        self.spec, self.scheme = spec, scheme
        stages_per_tile = -(-layout.padded_shape(spec.n, spec.k)[1] // (64 * c.k_blocks_per_stage))
        tiles_m, tiles_n = -(-m // c.cta_m), -(-spec.n // (64 * c.n64_per_cta))
        num_ctas, whole_tiles, stream_k_stages = stream_k_partition(tiles_m * tiles_n, stages_per_tile, c.num_ctas)
        self.num_ctas = num_ctas
        self.scalars = (spec.n, stages_per_tile, tiles_m, tiles_n, num_ctas, whole_tiles, stream_k_stages)
        self.workspace_size = num_ctas * c.n64_per_cta * 64 * c.cta_m if stream_k_stages else 0
        reduce_slices = 0
        if c.split_reduce and stream_k_stages and num_ctas * stages_per_tile % stream_k_stages == 0:
            reduce_slices = 4 if num_ctas * stages_per_tile // stream_k_stages % 4 == 0 else 2
        self.store_rows = (c.tile_m // max(reduce_slices, 1), c.tile_m_extra // max(reduce_slices, 1))
        self.constants = (wgmma_scheme_traits(scheme, has_bias), wgmma_traits(c, reduce_slices))
        launch_registers = c.registers[0]
        self.options = {"num_warps": 4, "launch_pdl": c.pdl, **({"maxnreg": launch_registers} if launch_registers else {})}
        per_k_block = scheme.scales_per_k_block
        scale_columns = (16 if scheme.fp32_scales else 8) * per_k_block
        self.weight_boxes = (c.n64_per_cta * 4, 128 * scheme.bits // 4, scale_columns, 8 * per_k_block)
        self.y_shape = (m, -(-spec.n // 8) * 8)
        self.y_strides = (self.y_shape[1], 1)
        self.x_columns = -(-spec.k // 64) * 64 if spec.k % 8 else spec.k
        self.maps_per_matrix = 2 if c.tile_m_extra > 0 else 1  # of x and y
        self.tail = (*self.scalars, *self.constants)
        self.x_maps: dict[int, tuple[Any, ...]] = {}
        self.y_maps: dict[int, tuple[Any, ...]] = {}
        self.empty = runtime.fast_empty()
        self.binary: Binary | None = None

    def find_binary(self, device: int) -> Binary | None:
        """The binary, or None before the first call."""
        if self.binary is None:
            self.binary = runtime.binaries.get((self.constants, device))
        return self.binary

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y [M, N]; x [M, K] as `launch.run` prepares it."""
        weight, scale, zero, alpha, _ = packed
        y = self.empty(self.y_shape, self.y_strides, x.dtype) if self.empty else x.new_empty(self.y_shape)
        stream = runtime.raw_stream(x.get_device())
        partials, flags = workspace(x, self.workspace_size, stream) if self.workspace_size else (0, 0)
        binary = self.binary or self.find_binary(x.get_device())
        if binary is None:
            self._compile(x, packed, bias, y, partials, flags)
        else:
            maps = (*self.x_args(x.data_ptr()), *self.weight_args(weight, scale, zero), *self.y_args(y.data_ptr()))
            pointers = (partials, flags, 0 if bias is None else bias.data_ptr(), alpha.data_ptr())
            binary(self.num_ctas, stream, (*maps, *pointers, *self.tail))
        return y if self.y_shape[1] == self.spec.n else y[:, : self.spec.n].contiguous()

    # Tensor maps hold addresses, shapes and formats alone, and no memory: with the plan, an address identifies one.

    def x_args(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for x."""
        found = self.x_maps.get(address)
        if found is None:
            assert self.binary is not None
            formats = self.binary.map_formats[: self.maps_per_matrix]
            found = remember(self.x_maps, address, self._activation_args(address, self.x_columns, formats))
        return found

    def y_args(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for y."""
        found = self.y_maps.get(address)
        if found is None:
            assert self.binary is not None
            formats = self.binary.map_formats[-self.maps_per_matrix :]
            found = remember(self.y_maps, address, self._activation_args(address, self.y_shape[1], formats))
        return found

    def weight_args(self, weight: Tensor, scale: Tensor, zero: Tensor) -> tuple[Any, ...]:
        """The launcher's arguments for packed weights, scales and zero points."""
        assert self.binary is not None
        maps = self.binary.weight_maps
        key = (weight.data_ptr(), scale.data_ptr(), zero.data_ptr(), self.spec.n, self.spec.k)
        return maps.get(key) or remember(maps, key, self._weight_args(weight, scale, zero))

    def _weight_args(self, weight: Tensor, scale: Tensor, zero: Tensor) -> tuple[Any, ...]:
        assert self.binary is not None
        formats, n16_tiles = self.binary.map_formats[self.maps_per_matrix :], weight.shape[0]
        args = (
            *tensor_map(weight.data_ptr(), n16_tiles, weight.shape[1] * weight.shape[2] * 128, formats[0]),
            *tensor_map(scale.data_ptr(), n16_tiles, scale.shape[1] * (16 if self.scheme.fp32_scales else 8), formats[1]),
        )
        zeros = tensor_map(zero.data_ptr(), n16_tiles, zero.shape[1] * 8, formats[2]) if self.scheme.zero_points else (0,)
        return (*args, *zeros)

    def _activation_args(self, address: int, columns: int, formats: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """The map for tile_m, and that for tile_m_extra."""
        m = self.y_shape[0]
        extra = tensor_map(address, m, columns, formats[1]) if self.maps_per_matrix == 2 else (0,)
        return (*tensor_map(address, m, columns, formats[0]), *extra)

    def _compile(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, partials: Any, flags: Any) -> None:
        """Compile, and run for this call."""
        gluon, s, (box_rows, weight_columns, scale_columns, zero_columns) = runtime.gluon(), self.scheme, self.weight_boxes
        descriptor = gluon.TensorDescriptor.from_tensor
        weight, n16_tiles, extra = packed[0], packed[0].shape[0], self.config.tile_m_extra
        scale = packed[1] if s.fp32_scales else packed[1].view(torch.int32)
        zero = packed[2].view(torch.int16) if s.zero_points else weight
        args = (
            descriptor(x, [self.config.tile_m, 64], gluon.swizzle128),
            descriptor(x, [extra, 64], gluon.swizzle128) if extra else weight,
            descriptor(weight.view(n16_tiles, -1), [box_rows, weight_columns], gluon.plain32),
            descriptor(scale.view(n16_tiles, -1), [box_rows, scale_columns], gluon.plain32),
            descriptor(zero.view(n16_tiles, -1), [box_rows, zero_columns], gluon.plain16) if s.zero_points else weight,
            descriptor(y, [self.store_rows[0], 64], gluon.swizzle128),
            descriptor(y, [self.store_rows[1], 64], gluon.swizzle128) if extra else weight,
            TypedPointer(partials, "fp32"), TypedPointer(flags, "i32"), x if bias is None else bias, packed[3], *self.scalars,
        )  # fmt: skip
        key = (self.constants, x.get_device())
        runtime.binaries[key] = runtime.compile_and_run(gluon.wgmma_persistent, self.num_ctas, args, self.constants, self.options)
