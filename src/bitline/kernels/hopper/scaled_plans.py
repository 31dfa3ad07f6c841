"""Launches of the kernels with quantized activations, worked out once per layer and range of M."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.kernels.hopper import runtime
from bitline.kernels.hopper.config import LargeMConfig, PersistentConfig, WgmmaConfig
from bitline.kernels.hopper.heuristics import stream_k_partition
from bitline.kernels.hopper.quantized_x import QuantizedX
from bitline.kernels.hopper.runtime import Binary, TypedPointer, remember, tensor_map
from bitline.kernels.hopper.scaled_config import (
    WHOLE_ROW,
    ScaledSmallMConfig,
    fit_scaled_stages,
    scaled_small_m_config,
)
from bitline.kernels.hopper.scaled_heuristics import scaled_persistent_config
from bitline.kernels.hopper.scaled_scheme import K_BLOCK, ScaledScheme
from bitline.kernels.hopper.traits import wgmma_traits
from bitline.kernels.hopper.workspace import workspace
from bitline.types import LinearSpec

Maps = tuple[Any, ...]


class Space:
    """Where quantized x lies: offsets in bytes of codes [rows, columns], scales float32 [groups, stride], zero points int32."""

    def __init__(self, scheme: ScaledScheme, rows: int, min_stride: int, copies: int = 1) -> None:
        self.rows, self.groups, self.stride = rows * copies, scheme.groups * copies, max(min_stride, -(-rows // 16) * 16)
        self.scale = -(-self.rows * scheme.columns // 128) * 128
        self.zero = self.scale + -(-self.groups * self.stride * 4 // 128) * 128
        self.bytes = self.zero + copies * self.stride * 4

    def of(self, scheme: ScaledScheme, memory: Tensor) -> QuantizedX:
        """The tensors that lie in `memory`, for the call that compiles."""
        dtype = torch.float8_e4m3fn if scheme.act.fp8 else torch.int8
        scales, zeros = memory[self.scale : self.zero].view(torch.float32), memory[self.zero : self.bytes].view(torch.int32)
        return QuantizedX(
            memory[: self.rows * scheme.columns].view(dtype).view(self.rows, scheme.columns),
            scales[: self.groups * self.stride].view(self.groups, self.stride), zeros,
        )  # fmt: skip


class LaunchPlan:
    """What the kernels with 8-bit activations share: the binary, y, and tensor maps by address."""

    kernel_name: str
    scheme_of_x: ScaledScheme
    space: Space
    fragment_order = False  # of the scales of x, see `device.quantize.scale_position`

    def __init__(self, spec: LinearSpec, traits: Any, num_k_blocks: int) -> None:
        self.spec = spec  # kept alive, so that its id is not used again
        self.traits, self.num_k_blocks = traits, num_k_blocks
        self.k8 = -(-spec.k // 8)
        self.empty = runtime.fast_empty()
        self.binary: Binary | None = None
        self.constants: tuple[Any, ...] = ()
        self.options = {"num_warps": 4, "launch_pdl": True}
        self.maps: dict[Any, Maps] = {}

    def find_binary(self, device: int) -> Binary | None:
        """The binary, or None before the first call."""
        if self.binary is None:
            self.binary = runtime.binaries.get((self.kernel_name, self.constants, device))
        return self.binary

    def new_y(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An uninitialized y."""
        dtype = self.spec.act_dtype
        y: Tensor = self.empty(shape, (shape[1], 1), dtype) if self.empty else x.new_empty(shape, dtype=dtype)
        return y

    def prepare(self, m: int, packed: Sequence[Tensor], bias: Tensor | None) -> tuple[Any, ...]:
        """The arguments of a launch that depend on neither x, y nor the workspace."""
        raise NotImplementedError

    def run(self, x: Tensor, prepared: tuple[Any, ...], y: Tensor, stream: int) -> None:
        """Launch."""
        raise NotImplementedError

    def multiply(self, x: QuantizedX, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y [M, N] of an x that is quantized already, with the scales in groups `space.stride` apart."""
        raise NotImplementedError


class OneLaunchPlan(LaunchPlan):
    """A launch that quantizes x itself, in a workspace. `prepare` gives the maps of W, and all arguments after the flags."""

    workspace_size: int
    num_ctas: int

    def x_maps(self, codes: int, scales: int, rows: int) -> Maps:
        """The launcher's arguments for what is loaded of the codes [rows, …] and scales of x at two addresses."""
        raise NotImplementedError

    def prepare(self, m: int, packed: Sequence[Tensor], bias: Tensor | None, quantizes: bool = True) -> tuple[Any, ...]:
        """See LaunchPlan. quantizes: whether the launch quantizes x."""
        raise NotImplementedError

    def _compile(
        self, x: Tensor, quantized: QuantizedX | None, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, stream: int
    ) -> None:
        """Compile, and run for this call. x: any tensor of its dtype where it is `quantized` already."""
        raise NotImplementedError

    def new_x(self, x: Tensor) -> QuantizedX:
        """Memory for the quantized x, for the call that compiles."""
        return self.space.of(self.scheme_of_x, x.new_empty(self.space.bytes, dtype=torch.uint8))

    def run(self, x: Tensor, prepared: tuple[Any, ...], y: Tensor, stream: int) -> None:
        """Launch."""
        weight_map, tail = prepared
        space, flags = workspace(x, self.workspace_size, stream)
        base = space if isinstance(space, int) else space.data_ptr()
        binary, at = self.binary, self.space
        assert binary is not None
        x_maps = self.x_maps(base, base + at.scale, at.rows)
        pointers = (base, base + at.scale, base + at.zero, flags)
        binary(self.num_ctas, stream, (*x_maps, *weight_map, x.data_ptr(), y.data_ptr(), *pointers, *tail))

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y [M, N]; x [M, 8 * k8], aligned to 16 bytes."""
        m = x.shape[0]
        y = self.new_y(x, (m, self.spec.n))
        stream = runtime.raw_stream(x.get_device())
        if self.find_binary(x.get_device()) is None:
            self._compile(x, None, packed, bias, y, stream)
        else:
            self.run(x, self.prepare(m, packed, bias), y, stream)
        return y

    def multiply(self, x: QuantizedX, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """See LaunchPlan: the same kernel with no units to quantize, so that it loads the codes at once."""
        m, device = x.codes.shape[0], x.codes.get_device()
        y = self.new_y(x.codes, (m, self.spec.n))
        stream = runtime.raw_stream(device)
        if self.find_binary(device) is None:
            self._compile(y, x, packed, bias, y, stream)
            return y
        weight_map, tail = self.prepare(m, packed, bias, quantizes=False)
        codes, scales, zeros = x.addresses()
        flags = workspace(x.codes, 0, stream)[1]
        binary, unread = self.binary, y.data_ptr()  # x
        assert binary is not None
        pointers = (unread, y.data_ptr(), codes, scales, zeros, flags)
        binary(self.num_ctas, stream, (*self.x_maps(codes, scales, m), *weight_map, *pointers, *tail))
        return y


class QuantizedFirstPlan(LaunchPlan):
    """Launches of `quantize_x` and a persistent kernel, for one M."""

    quantize: QuantizePlan
    workspace_size: int
    y_shape: tuple[int, int]

    def _compile(
        self, x: QuantizedX, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, partials: Any, flags: Any
    ) -> None:
        """Compile, and run for this call."""
        raise NotImplementedError

    def run_quantized(
        self, addresses: tuple[int, int, int], x: Tensor, prepared: tuple[Any, ...], y: Tensor, stream: int
    ) -> None:
        """Launch the persistent kernel. addresses: of codes, scales and zero points. x: any tensor on the GPU."""
        raise NotImplementedError

    def find_binary(self, device: int) -> Binary | None:
        """The binary, or None before both kernels are compiled."""
        quantize = self.quantize.binary or self.quantize.find_binary(self.spec.act_dtype, device)
        return super().find_binary(device) if quantize else None

    def new_space(self, x: Tensor) -> Tensor:
        """Memory for the quantized x."""
        size = self.space.bytes
        space: Tensor = self.empty((size,), (1,), torch.uint8) if self.empty else x.new_empty(size, dtype=torch.uint8)
        return space

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y [M, N]; x [M, 8 * k8], aligned to 16 bytes."""
        y = self.new_y(x, self.y_shape)
        stream = runtime.raw_stream(x.get_device())
        if self.find_binary(x.get_device()) is None:
            space = self.new_space(x)
            static_scale, static_zero = packed[-2:]
            self.quantize(x, space.data_ptr(), static_scale, static_zero, stream)
            partials, flags = workspace(x, self.workspace_size, stream) if self.workspace_size else (0, 0)
            self._compile(self.space.of(self.scheme_of_x, space), packed, bias, y, partials, flags)
        else:
            self.run(x, self.prepare(x.shape[0], packed, bias), y, stream)
        return y if self.y_shape[1] == self.spec.n else y[:, : self.spec.n].contiguous()

    def run(self, x: Tensor, prepared: tuple[Any, ...], y: Tensor, stream: int) -> None:
        """Launch both kernels. prepared: the arguments of `quantize_x` come last."""
        space, at = self.new_space(x), self.space
        base = space.data_ptr()
        self.quantize.run(x.data_ptr(), base, prepared[-1], stream)
        self.run_quantized((base, base + at.scale, base + at.zero), x, prepared, y, stream)

    def multiply(self, x: QuantizedX, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """See LaunchPlan: the persistent kernel alone."""
        m, device = x.codes.shape[0], x.codes.get_device()
        y = self.new_y(x.codes, self.y_shape)
        stream = runtime.raw_stream(device)
        if LaunchPlan.find_binary(self, device) is None:
            partials, flags = workspace(x.codes, self.workspace_size, stream) if self.workspace_size else (0, 0)
            self._compile(x, packed, bias, y, partials, flags)
        else:
            self.run_quantized(x.addresses(), x.codes, self.prepare(m, packed, bias), y, stream)
        return y if self.y_shape[1] == self.spec.n else y[:, : self.spec.n].contiguous()


class _ScaledPlan(LaunchPlan):
    """What the kernels with 8-bit weights share."""

    def __init__(self, spec: LinearSpec, scheme: ScaledScheme, has_bias: bool) -> None:
        super().__init__(spec, scheme.with_bias(has_bias), -(-scheme.columns // K_BLOCK))
        self.scheme = self.scheme_of_x = scheme
        self.scale_columns = spec.grid[1]

    def weight_map(self, weight: Tensor, map_format: tuple[Any, ...]) -> Maps:
        """The launcher's arguments for W, shared by all M."""
        assert self.binary is not None
        maps, key = self.binary.weight_maps, (weight.data_ptr(), weight.shape[0])
        return maps.get(key) or remember(maps, key, tensor_map(*key, K_BLOCK, map_format))


class ScaledSmallMPlan(OneLaunchPlan, _ScaledPlan):
    """A launch of `scaled_small_m`, for M of 1, or up to 8, 16, 32 or 64."""

    kernel_name = "scaled_small_m"

    def __init__(
        self, spec: LinearSpec, scheme: ScaledScheme, m: int, has_bias: bool, sms: int, config: ScaledSmallMConfig | None = None
    ) -> None:
        super().__init__(spec, scheme, has_bias)
        c = self.config = config or scaled_small_m_config(m, spec.n, spec.k, sms)
        self.num_tiles = -(-spec.n // c.rows)
        self.num_ctas = min(sms, self.num_tiles)
        self.space = Space(scheme, c.tile_m, c.scale_box, self.num_ctas if c.private else 1)
        self.workspace_size = -(-self.space.bytes // 4)
        self.act = scheme.act._replace(columns=scheme.act.at_once) if c.private else scheme.act
        self.constants = (self.traits, self.act, c)

    def sizes(self, m: int, quantizes: bool = True) -> tuple[Any, ...]:
        """The scalar arguments of x [m, K]. quantizes: whether the launch quantizes x."""
        s = self.scheme
        parts = s.parts(m, 1 if self.config.private else self.num_ctas, self.act.columns)
        units = m * parts if quantizes else 0
        return (
            m, self.spec.n, self.k8, s.columns // 16, self.num_k_blocks, self.num_tiles, self.num_ctas, min(units, self.num_ctas),
            units, parts, s.groups, s.limit, self.space.stride, s.block_rows, s.row_offset, self.scale_columns,
        )  # fmt: skip

    def x_maps(self, codes: int, scales: int, rows: int) -> Maps:
        """See OneLaunchPlan."""
        key = (codes, scales, rows)
        found = self.maps.get(key)
        if found is None:
            assert self.binary is not None
            space, s = self.space, self.scheme
            found = tensor_map(codes, rows, s.columns, self.binary.map_formats[0])
            if self.traits.scaled_in_groups:
                found = (*found, *tensor_map(scales, space.groups, space.stride, self.binary.map_formats[1]))
            else:
                found = (*found, 0)
            found = remember(self.maps, key, found)
        return found

    def prepare(self, m: int, packed: Sequence[Tensor], bias: Tensor | None, quantizes: bool = True) -> tuple[Any, ...]:
        """The arguments of a launch that depend on neither x, y nor the workspace: the weight's map, and all after the flags."""
        weight, scale, colsum, static_scale, static_zero = packed
        assert self.binary is not None
        pointers = (
            static_scale.data_ptr(), static_zero.data_ptr(), scale.data_ptr(), colsum.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )  # fmt: skip
        sizes = self.sizes(m, quantizes)
        return self.weight_map(weight, self.binary.map_formats[-1]), (*pointers, *sizes, *self.constants)

    def _compile(
        self, x: Tensor, quantized: QuantizedX | None, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, stream: int
    ) -> None:
        """See OneLaunchPlan."""
        gluon, c = runtime.gluon(), self.config
        codes, x_scales, x_zeros = quantized or self.new_x(x)
        flags = workspace(x, self.workspace_size, stream)[1]
        weight, scale, colsum, static_scale, static_zero = packed
        descriptor = gluon.TensorDescriptor.from_tensor
        args = (
            descriptor(codes, [c.tile_m, 128], gluon.swizzle128_bytes),
            descriptor(x_scales, [1, c.scale_box], gluon.plain32) if self.traits.scaled_in_groups else colsum,
            descriptor(weight, [c.box_rows, 128], gluon.swizzle128_bytes), x, y, TypedPointer(codes, "i8"), x_scales,
            TypedPointer(0 if x_zeros is None else x_zeros, "i32"), TypedPointer(flags, "i32"), static_scale,
            TypedPointer(static_zero, "i32"), scale, TypedPointer(colsum, "i32"), x if bias is None else bias,
            *self.sizes(x.shape[0], quantized is None),
        )  # fmt: skip
        key = (self.kernel_name, self.constants, x.get_device())
        runtime.binaries[key] = runtime.compile_and_run(
            gluon.scaled_small_m, self.num_ctas, args, self.constants, self.options
        )  # fmt: skip


class QuantizePlan:
    """A launch of `quantize_x`, for one M."""

    def __init__(self, scheme: ScaledScheme, m: int, k8: int, space: Space, fragment_order: bool = True) -> None:
        parts = scheme.parts(m, 1)
        self.scheme, self.space, self.units = scheme, space, m * parts
        self.sizes = (parts, k8, scheme.columns // 16, space.stride, scheme.limit)
        token = scheme.act.granularity == "token"
        columns = scheme.act.at_once if token else scheme.act.columns
        self.constants = (scheme.act._replace(columns=columns, fragment_order=fragment_order),)
        self.binary: Binary | None = None

    def find_binary(self, dtype: torch.dtype, device: int) -> Binary | None:
        """The binary, or None before the first call."""
        if self.binary is None:
            self.binary = runtime.binaries.get(("quantize_x", self.constants, dtype, device))
        return self.binary

    def prepare(self, static_scale: Tensor, static_zero: Tensor) -> tuple[Any, ...]:
        """The arguments after those that `run` fills in."""
        return (static_scale.data_ptr(), static_zero.data_ptr(), *self.sizes, *self.constants)

    def run(self, x_address: int, base: int, prepared: tuple[Any, ...], stream: int) -> None:
        """Quantize x into the space at an address."""
        binary, at = self.binary, self.space
        assert binary is not None
        binary(self.units, stream, (x_address, base, base + at.scale, base + at.zero, *prepared))

    def compile(self, x: Tensor, base: int, static_scale: Tensor, static_zero: Tensor) -> None:
        """Compile, and run for this call."""
        at = self.space
        args = (
            x, TypedPointer(base, "i8"), TypedPointer(base + at.scale, "fp32"), TypedPointer(base + at.zero, "i32"),
            static_scale, TypedPointer(static_zero, "i32"), *self.sizes,
        )  # fmt: skip
        runtime.binaries["quantize_x", self.constants, x.dtype, x.get_device()] = runtime.compile_and_run(
            runtime.gluon().quantize_x, self.units, args, self.constants, {"num_warps": 4, "launch_pdl": True}
        )

    def __call__(self, x: Tensor, base: int, static_scale: Tensor, static_zero: Tensor, stream: int) -> None:
        """Quantize x into the space at an address."""
        if self.find_binary(x.dtype, x.get_device()) is None:
            self.compile(x, base, static_scale, static_zero)
        else:
            self.run(x.data_ptr(), base, self.prepare(static_scale, static_zero), stream)


class _ScaledQuantizedFirstPlan(QuantizedFirstPlan, _ScaledPlan):
    """What both persistent kernels share."""

    def __init__(self, spec: LinearSpec, scheme: ScaledScheme, m: int, has_bias: bool, c: PersistentConfig, traits: Any) -> None:
        super().__init__(spec, scheme, has_bias)
        self.space = Space(scheme, m, 16)
        self.quantize = QuantizePlan(scheme, m, self.k8, self.space, self.fragment_order)
        tiles_m, tiles_n = -(-m // c.cta_m), -(-spec.n // (64 * c.n64_per_cta))
        ctas, whole_tiles, stream_k_stages = stream_k_partition(tiles_m * tiles_n, self.num_k_blocks, c.num_ctas)
        self.num_ctas = ctas
        self.workspace_size = ctas * c.n64_per_cta * 64 * c.cta_m if stream_k_stages else 0
        self.sizes = (
            m, spec.n, scheme.block_rows, scheme.row_offset, self.scale_columns, self.num_k_blocks, tiles_m, tiles_n, ctas,
            whole_tiles, stream_k_stages,
        )  # fmt: skip
        self.constants = (self.traits, traits)
        self.tail = (*self.sizes, *self.constants)
        self.y_shape = (m, -(-spec.n // 8) * 8)

    def new_x_maps(self, codes: int, scales: int) -> Maps:
        """The launcher's arguments for codes and scales of x at two addresses."""
        raise NotImplementedError

    def new_y_maps(self, address: int) -> Maps:
        """The launcher's arguments for y at an address."""
        raise NotImplementedError

    def weight_format(self) -> tuple[Any, ...]:
        """The format of the weight's tensor map."""
        raise NotImplementedError

    def descriptors(self, codes: Tensor, x_scales: Tensor, weight: Tensor, y: Tensor, absent: Tensor) -> tuple[Any, ...]:
        """The kernel's first arguments, for the call that compiles. absent: for what a config lacks."""
        raise NotImplementedError

    def prepare(self, _m: int, packed: Sequence[Tensor], bias: Tensor | None) -> tuple[Any, ...]:
        """The arguments of the launches that depend on neither x, y nor the workspace."""
        weight, scale, colsum, static_scale, static_zero = packed
        pointers = (scale.data_ptr(), colsum.data_ptr(), 0 if bias is None else bias.data_ptr())
        weight_map = self.weight_map(weight, self.weight_format())
        return weight_map, (*pointers, *self.tail), self.quantize.prepare(static_scale, static_zero)

    def run_quantized(
        self, addresses: tuple[int, int, int], x: Tensor, prepared: tuple[Any, ...], y: Tensor, stream: int
    ) -> None:
        """See QuantizedFirstPlan."""
        weight_map, tail, _quantize_tail = prepared
        codes, scales, zeros = addresses
        y_address = y.data_ptr()
        partials, flags = workspace(x, self.workspace_size, stream) if self.workspace_size else (0, 0)
        binary, maps = self.binary, self.maps
        assert binary is not None
        x_maps = maps.get((codes, scales)) or remember(maps, (codes, scales), self.new_x_maps(codes, scales))
        y_maps = maps.get(y_address) or remember(maps, y_address, self.new_y_maps(y_address))
        pointers = (partials, flags, scales, zeros)
        binary(self.num_ctas, stream, (*x_maps, *weight_map, *y_maps, *pointers, *tail))

    def _compile(
        self, x: QuantizedX, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, partials: Any, flags: Any
    ) -> None:
        """Compile, and run for this call."""
        weight, scale, colsum, _static_scale, _static_zero = packed
        _codes_address, scales_address, zeros_address = x.addresses()
        args = (
            *self.descriptors(x.codes, x.scales, weight, y, scale),
            TypedPointer(partials, "fp32"), TypedPointer(flags, "i32"), TypedPointer(scales_address, "fp32"),
            TypedPointer(zeros_address, "i32"), scale, TypedPointer(colsum, "i32"), y if bias is None else bias, *self.sizes,
        )  # fmt: skip
        key = (self.kernel_name, self.constants, y.get_device())
        kernel = getattr(runtime.gluon(), self.kernel_name)
        runtime.binaries[key] = runtime.compile_and_run(kernel, self.num_ctas, args, self.constants, self.options)


class ScaledPersistentPlan(_ScaledQuantizedFirstPlan):
    """`scaled_persistent`, for one M."""

    kernel_name = "scaled_persistent"
    fragment_order = True

    def __init__(self, spec: LinearSpec, scheme: ScaledScheme, m: int, has_bias: bool, config: WgmmaConfig) -> None:
        self.config = fit_scaled_stages(config, scheme.traits.scaled_in_groups)
        super().__init__(spec, scheme, m, has_bias, self.config, wgmma_traits(self.config, 0))

    def new_x_maps(self, codes: int, scales: int) -> Maps:
        """See `_ScaledQuantizedFirstPlan`."""
        assert self.binary is not None
        formats, space, s, extra = list(self.binary.map_formats), self.space, self.scheme, self.config.tile_m_extra
        parts: list[Any] = []
        for present in (True, extra > 0):
            parts += tensor_map(codes, space.rows, s.columns, formats.pop(0)) if present else (0,)
        for present in (self.traits.scaled_in_groups, self.traits.scaled_in_groups and extra > 0):
            parts += tensor_map(scales, space.groups, space.stride, formats.pop(0)) if present else (0,)
        return tuple(parts)

    def new_y_maps(self, address: int) -> Maps:
        """See `_ScaledQuantizedFirstPlan`."""
        assert self.binary is not None
        extra = self.config.tile_m_extra
        formats = self.binary.map_formats[-2:] if extra else self.binary.map_formats[-1:]
        return (
            *tensor_map(address, *self.y_shape, formats[0]),
            *(tensor_map(address, *self.y_shape, formats[1]) if extra else (0,)),
        )

    def weight_format(self) -> tuple[Any, ...]:
        """See `_ScaledQuantizedFirstPlan`."""
        assert self.binary is not None
        return self.binary.map_formats[-3 if self.config.tile_m_extra else -2]

    def descriptors(self, codes: Tensor, x_scales: Tensor, weight: Tensor, y: Tensor, absent: Tensor) -> tuple[Any, ...]:
        """See `_ScaledQuantizedFirstPlan`."""
        gluon, c = runtime.gluon(), self.config
        descriptor, extra, grouped = gluon.TensorDescriptor.from_tensor, c.tile_m_extra, self.traits.scaled_in_groups
        return (
            descriptor(codes, [c.tile_m, 128], gluon.swizzle128_bytes),
            descriptor(codes, [extra, 128], gluon.swizzle128_bytes) if extra else absent,
            descriptor(x_scales, [1, c.tile_m], gluon.plain32) if grouped else absent,
            descriptor(x_scales, [1, extra], gluon.plain32) if grouped and extra else absent,
            descriptor(weight, [64, 128], gluon.swizzle128_bytes),
            descriptor(y, [c.tile_m, 64], gluon.swizzle128),
            descriptor(y, [extra, 64], gluon.swizzle128) if extra else absent,
        )


class ScaledLargeMPlan(_ScaledQuantizedFirstPlan):
    """`scaled_large_m`, for one M."""

    kernel_name = "scaled_large_m"
    fragment_order = False

    def __init__(self, spec: LinearSpec, scheme: ScaledScheme, m: int, has_bias: bool, config: LargeMConfig) -> None:
        traits = scheme.traits
        columns = has_bias or traits.k_blocks_per_weight_scale == WHOLE_ROW
        self.config = config.fit_stages(traits.scaled_in_groups, columns)
        super().__init__(spec, scheme, m, has_bias, self.config, self.config._replace(num_ctas=0))

    def new_x_maps(self, codes: int, scales: int) -> Maps:
        """See `_ScaledQuantizedFirstPlan`."""
        assert self.binary is not None
        formats, space = self.binary.map_formats, self.space
        of_codes = tensor_map(codes, space.rows, self.scheme.columns, formats[0])
        if not self.traits.scaled_in_groups:
            return (*of_codes, 0)
        return (*of_codes, *tensor_map(scales, space.groups, space.stride, formats[1]))

    def new_y_maps(self, address: int) -> Maps:
        """See `_ScaledQuantizedFirstPlan`."""
        assert self.binary is not None
        return tensor_map(address, *self.y_shape, self.binary.map_formats[-1])

    def weight_format(self) -> tuple[Any, ...]:
        """See `_ScaledQuantizedFirstPlan`."""
        assert self.binary is not None
        return self.binary.map_formats[-2]

    def descriptors(self, codes: Tensor, x_scales: Tensor, weight: Tensor, y: Tensor, absent: Tensor) -> tuple[Any, ...]:
        """See `_ScaledQuantizedFirstPlan`."""
        gluon = runtime.gluon()
        descriptor = gluon.TensorDescriptor.from_tensor
        return (
            descriptor(codes, [64, 128], gluon.swizzle128_bytes),
            descriptor(x_scales, [1, 128], gluon.plain32) if self.traits.scaled_in_groups else absent,
            descriptor(weight, [64, 128], gluon.swizzle128_bytes),
            descriptor(y, [64, 128], gluon.swizzle128),
        )


def persistent_plan(
    spec: LinearSpec, scheme: ScaledScheme, m: int, has_bias: bool, sms: int, config: PersistentConfig | None = None
) -> ScaledPersistentPlan | ScaledLargeMPlan:
    """The plan of a layer for an M above SCALED_SMALL_M; config: the cheapest by default."""
    config = config or scaled_persistent_config(m, spec.n, spec.k, scheme, sms)
    kind: Any = ScaledLargeMPlan if isinstance(config, LargeMConfig) else ScaledPersistentPlan
    plan: ScaledPersistentPlan | ScaledLargeMPlan = kind(spec, scheme, m, has_bias, config)
    return plan
