"""Launches of the kernels with 4-bit weights and 8-bit activations, worked out once per layer and range of M."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from bitline.kernels.hopper import runtime
from bitline.kernels.hopper.config import WgmmaConfig
from bitline.kernels.hopper.heuristics import stream_k_partition
from bitline.kernels.hopper.quantized_x import QuantizedX
from bitline.kernels.hopper.runtime import TypedPointer, remember, tensor_map
from bitline.kernels.hopper.scaled_plans import LaunchPlan, Maps, OneLaunchPlan, QuantizedFirstPlan, QuantizePlan, Space
from bitline.kernels.hopper.traits import wgmma_traits
from bitline.kernels.hopper.w4a8_config import W4A8SmallMConfig, fit_persistent_stages, w4a8_small_m_config
from bitline.kernels.hopper.w4a8_heuristics import w4a8_persistent_config
from bitline.kernels.hopper.w4a8_scheme import W4A8Scheme
from bitline.kernels.hopper.workspace import workspace
from bitline.types import LinearSpec


@functools.cache
def prepare_device_code() -> None:
    """What `runtime.prepare` does, for these kernels."""
    for kernel in vars(kernels()).values():
        kernel.cache_key  # noqa: B018  # hashes the source of the functions that it calls


@functools.cache
def kernels() -> Any:
    """The device code."""
    from bitline.kernels.hopper.device.w4a8_persistent import w4a8_persistent
    from bitline.kernels.hopper.device.w4a8_small_m import w4a8_small_m

    return SimpleNamespace(w4a8_persistent=w4a8_persistent, w4a8_small_m=w4a8_small_m)


class _W4A8Plan(LaunchPlan):
    """What both kernels share."""

    def __init__(self, spec: LinearSpec, scheme: W4A8Scheme, has_bias: bool) -> None:
        super().__init__(spec, scheme.with_bias(has_bias), -(-spec.k // 128))
        self.scheme, self.scheme_of_x, self.num_n16 = scheme, scheme.x, -(-spec.n // 16)

    def matrix(self, weight: Tensor) -> tuple[int, int]:
        """Shape of a packed tensor as its tensor map sees it."""
        raise NotImplementedError

    def weight_maps(self, weight: Tensor, scale: Tensor, formats: Sequence[tuple[Any, ...]]) -> Maps:
        """The launcher's arguments for W and its scales, shared by all M with the same kernel."""
        assert self.binary is not None
        maps, key = self.binary.weight_maps, (weight.data_ptr(), scale.data_ptr(), weight.shape[0], weight.shape[1])
        found = maps.get(key)
        if found is None:
            scales = tensor_map(scale.data_ptr(), *self.matrix(scale), formats[1]) if self.traits.scaled_in_groups else (0,)
            found = remember(maps, key, (*tensor_map(weight.data_ptr(), *self.matrix(weight), formats[0]), *scales))
        return found


class W4A8SmallMPlan(OneLaunchPlan, _W4A8Plan):
    """A launch of `w4a8_small_m`, for M of 1, or up to 8, 16 or 32."""

    kernel_name = "w4a8_small_m"

    def __init__(
        self, spec: LinearSpec, scheme: W4A8Scheme, m: int, has_bias: bool, sms: int, config: W4A8SmallMConfig | None = None
    ) -> None:
        super().__init__(spec, scheme, has_bias)
        c = self.config = config or w4a8_small_m_config(m, spec.n, spec.k, scheme, sms)
        self.num_tiles = -(-self.num_n16 // c.n16)
        self.num_ctas = min(sms, self.num_tiles)
        self.space = Space(scheme.x, c.tile_m, 16)
        self.workspace_size = -(-self.space.bytes // 4)
        self.constants = (scheme.small_m_traits(has_bias), scheme.x.act, c)

    def matrix(self, weight: Tensor) -> tuple[int, int]:
        """See `_W4A8Plan`: 16-row tiles one after the other."""
        return weight.shape[0] * weight.shape[1], weight.shape[2]

    def sizes(self, m: int, quantizes: bool = True) -> tuple[Any, ...]:
        """The scalar arguments of x [m, K]. quantizes: whether the launch quantizes x."""
        s = self.scheme.x
        parts = s.parts(m, self.num_ctas)
        units = m * parts if quantizes else 0
        return (
            m, self.spec.n, self.k8, s.columns // 16, self.num_k_blocks, self.num_tiles, self.num_ctas, min(units, self.num_ctas),
            units, parts, s.limit, self.space.stride, self.num_n16, self.scheme.groups,
        )  # fmt: skip

    def x_maps(self, codes: int, scales: int, rows: int) -> Maps:
        """See OneLaunchPlan."""
        key = (codes, rows)
        found = self.maps.get(key)
        if found is None:
            assert self.binary is not None
            found = tensor_map(codes, rows, self.scheme.x.columns, self.binary.map_formats[0])
            found = remember(self.maps, key, found)
        return found

    def prepare(self, m: int, packed: Sequence[Tensor], bias: Tensor | None, quantizes: bool = True) -> tuple[Any, ...]:
        """The arguments of a launch that depend on neither x, y nor the workspace: maps of W, and all after the flags."""
        weight, scale, static_scale, static_zero = packed
        assert self.binary is not None
        pointers = (static_scale.data_ptr(), static_zero.data_ptr(), scale.data_ptr(), 0 if bias is None else bias.data_ptr())
        maps = self.weight_maps(weight, scale, self.binary.map_formats[1:])
        return maps, (*pointers, *self.sizes(m, quantizes), *self.constants)

    def _compile(
        self, x: Tensor, quantized: QuantizedX | None, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, stream: int
    ) -> None:
        """See OneLaunchPlan."""
        gluon, c = runtime.gluon(), self.config
        codes, x_scales, x_zeros = quantized or self.new_x(x)
        flags = workspace(x, self.workspace_size, stream)[1]
        weight, scale, static_scale, static_zero = packed
        descriptor, grouped = gluon.TensorDescriptor.from_tensor, self.traits.scaled_in_groups
        args = (
            descriptor(codes, [c.tile_m, 128], gluon.swizzle128_bytes),
            descriptor(weight.view(self.matrix(weight)), [c.k_blocks, 256], gluon.plain32),
            descriptor(scale.view(self.matrix(scale)), [c.scale_entries, 16], gluon.plain32) if grouped else scale, x, y,
            TypedPointer(codes, "i8"), x_scales, TypedPointer(0 if x_zeros is None else x_zeros, "i32"),
            TypedPointer(flags, "i32"), static_scale, TypedPointer(static_zero, "i32"), scale, x if bias is None else bias,
            *self.sizes(x.shape[0], quantized is None),
        )  # fmt: skip
        key = (self.kernel_name, self.constants, x.get_device())
        runtime.binaries[key] = runtime.compile_and_run(kernels().w4a8_small_m, self.num_ctas, args, self.constants, self.options)


class W4A8PersistentPlan(QuantizedFirstPlan, _W4A8Plan):
    """Launches of `quantize_x` and `w4a8_persistent`, for one M."""

    kernel_name = "w4a8_persistent"

    def __init__(
        self, spec: LinearSpec, scheme: W4A8Scheme, m: int, has_bias: bool, sms: int, config: WgmmaConfig | None = None
    ) -> None:
        super().__init__(spec, scheme, has_bias)
        c = self.config = fit_persistent_stages(config or w4a8_persistent_config(m, spec.n, spec.k, scheme, sms), scheme)
        self.space = Space(scheme.x, m, 16)
        self.quantize = QuantizePlan(scheme.x, m, self.k8, self.space, False)
        tiles_m, tiles_n = -(-m // c.cta_m), -(-spec.n // 128)
        ctas, whole_tiles, stream_k_stages = stream_k_partition(tiles_m * tiles_n, self.num_k_blocks, c.num_ctas)
        self.num_ctas = ctas
        self.workspace_size = ctas * 128 * c.cta_m if stream_k_stages else 0
        self.sizes = (m, spec.n, self.num_k_blocks, tiles_m, tiles_n, ctas, whole_tiles, stream_k_stages)
        self.constants = (self.traits, wgmma_traits(c, 0))
        self.tail = (*self.sizes, *self.constants)
        self.y_shape = (m, -(-spec.n // 8) * 8)

    def matrix(self, weight: Tensor) -> tuple[int, int]:
        """See `_W4A8Plan`: 16-row tiles below each other."""
        return weight.shape[0], weight.shape[1] * weight.shape[2]

    def formats(self) -> tuple[Any, Any, Any]:
        """Formats of the tensor maps of x, of W and of y."""
        assert self.binary is not None
        found, each = list(self.binary.map_formats), 2 if self.config.tile_m_extra else 1
        return found[:each], found[each:-each], found[-each:]

    def activation_maps(self, key: int, address: int, shape: tuple[int, int], formats: Any) -> Maps:
        """The launcher's arguments for x or y at an address."""
        found = self.maps.get(key)
        if found is None:
            extra = tensor_map(address, *shape, formats[1]) if self.config.tile_m_extra else (0,)
            found = remember(self.maps, key, (*tensor_map(address, *shape, formats[0]), *extra))
        return found

    def prepare(self, _m: int, packed: Sequence[Tensor], bias: Tensor | None) -> tuple[Any, ...]:
        """The arguments of the launches that depend on neither x, y nor the workspace."""
        weight, scale, static_scale, static_zero = packed
        maps = self.weight_maps(weight, scale, self.formats()[1])
        tail = (scale.data_ptr(), 0 if bias is None else bias.data_ptr(), *self.tail)
        return maps, tail, self.formats(), self.quantize.prepare(static_scale, static_zero)

    def run_quantized(
        self, addresses: tuple[int, int, int], x: Tensor, prepared: tuple[Any, ...], y: Tensor, stream: int
    ) -> None:
        """See QuantizedFirstPlan."""
        weight_maps, tail, (x_formats, _, y_formats), _quantize_tail = prepared
        codes, scales, _zeros = addresses
        y_address = y.data_ptr()
        partials, flags = workspace(x, self.workspace_size, stream) if self.workspace_size else (0, 0)
        assert self.binary is not None
        x_maps = self.activation_maps(codes, codes, (self.space.rows, self.scheme.x.columns), x_formats)
        y_maps = self.activation_maps(-y_address, y_address, self.y_shape, y_formats)
        self.binary(self.num_ctas, stream, (*x_maps, *weight_maps, *y_maps, partials, flags, scales, *tail))

    def _compile(
        self, x: QuantizedX, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, partials: Any, flags: Any
    ) -> None:
        """Compile, and run for this call."""
        gluon, c, s, codes = runtime.gluon(), self.config, self.scheme, x.codes
        weight, scale, _static_scale, _static_zero = packed
        descriptor, extra, grouped = gluon.TensorDescriptor.from_tensor, c.tile_m_extra, s.traits.scaled_in_groups
        scale_box = [8, 16 * s.traits.groups_per_k_block]
        args = (
            descriptor(codes, [c.tile_m, 128], gluon.swizzle128_bytes),
            descriptor(codes, [extra, 128], gluon.swizzle128_bytes) if extra else scale,
            descriptor(weight.view(self.matrix(weight)), [8, 256], gluon.plain32),
            descriptor(scale.view(self.matrix(scale)), scale_box, gluon.plain32) if grouped else scale,
            descriptor(y, [c.tile_m, 64], gluon.swizzle128), descriptor(y, [extra, 64], gluon.swizzle128) if extra else scale,
            TypedPointer(partials, "fp32"), TypedPointer(flags, "i32"), TypedPointer(x.scales, "fp32"), scale,
            y if bias is None else bias, *self.sizes,
        )  # fmt: skip
        key = (self.kernel_name, self.constants, y.get_device())
        runtime.binaries[key] = runtime.compile_and_run(
            kernels().w4a8_persistent, self.num_ctas, args, self.constants, self.options
        )
