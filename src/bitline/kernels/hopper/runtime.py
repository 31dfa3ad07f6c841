"""Triton's side of a launch: the device code, compiled binaries and their launcher, tensor maps, and the current stream."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@functools.cache
def gluon() -> Any:
    """The kernels, and what of Triton a launch takes."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    from bitline.kernels.hopper.device.gemv_mma import gemv_mma
    from bitline.kernels.hopper.device.quantize import quantize_x
    from bitline.kernels.hopper.device.scaled_large_m import scaled_large_m
    from bitline.kernels.hopper.device.scaled_persistent import scaled_persistent
    from bitline.kernels.hopper.device.scaled_small_m import scaled_small_m
    from bitline.kernels.hopper.device.small_m_pipelined import small_m_pipelined
    from bitline.kernels.hopper.device.wgmma_persistent import wgmma_persistent

    def shared_layout(swizzle: int, width: int) -> Any:
        return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=width, rank=2)

    utils = driver.active.utils
    return SimpleNamespace(
        gemv_mma=gemv_mma, small_m_pipelined=small_m_pipelined, wgmma_persistent=wgmma_persistent,
        quantize_x=quantize_x, scaled_small_m=scaled_small_m, scaled_persistent=scaled_persistent,
        scaled_large_m=scaled_large_m,
        TensorDescriptor=TensorDescriptor, swizzle128_bytes=shared_layout(128, 8),
        swizzle128=shared_layout(128, 16), plain32=shared_layout(0, 32), plain16=shared_layout(0, 16),
        fill_tensor_map=getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor,  # renamed in Triton 3.7
        tma_dtypes=TMA_DTYPE_DEVICE_TO_HOST,
    )  # fmt: skip


@functools.cache
def experts() -> Any:
    """The kernels of experts."""
    from bitline.kernels.hopper.device.experts_persistent import experts_persistent
    from bitline.kernels.hopper.device.experts_small_m import experts_small_m
    from bitline.kernels.triton.device.experts import weighted_sum_kernel
    from bitline.kernels.triton.device.experts_sort import blocks_kernel, gather_kernel, sort_kernel

    return SimpleNamespace(
        small_m=experts_small_m, persistent=experts_persistent, sort=sort_kernel, blocks=blocks_kernel, gather=gather_kernel,
        weighted_sum=weighted_sum_kernel,
    )  # fmt: skip


@functools.cache
def prepare() -> None:
    """Do what Triton does once per process, 0.4 s: its import, and hashes of its library and of the device code.

    Called when a layer is packed, so that the first forward does not pay for it.
    """
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    found = gluon()
    triton_key()  # hashes its library, 400 MB
    make_backend(driver.active.get_current_target()).hash()  # asks ptxas for its version
    for kernel in (
        found.gemv_mma,
        found.small_m_pipelined,
        found.wgmma_persistent,
        found.scaled_small_m,
        found.scaled_persistent,
        found.scaled_large_m,
    ):
        kernel.cache_key  # noqa: B018  # hashes the source of the functions that it calls


raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def fast_empty() -> Any:
    """(shape, strides, dtype) -> uninitialized tensor on the current GPU, without torch's dispatcher (1 us per call); None with
    several GPUs."""
    return getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if torch.cuda.device_count() == 1 else None


class TypedPointer:
    """An address with a dtype, as an argument of Triton's compiler."""

    __slots__ = ("address", "dtype")

    def __init__(self, tensor: Tensor | int, dtype: str) -> None:
        self.address, self.dtype = tensor if isinstance(tensor, int) else tensor.data_ptr(), dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class Binary(NamedTuple):
    """A compiled kernel.

    launch: Triton's C launcher. head: its arguments between the stream and the kernel's own. packs_args: the kernel's arguments
    are one tuple. map_formats: of each tensor map swizzle, element size, dtype and box. weight_maps: a cache of launcher
    arguments by weight, shared by all M.
    """

    launch: Any
    head: tuple[Any, ...]
    packs_args: bool
    map_formats: tuple[tuple[Any, ...], ...]
    weight_maps: dict[tuple[int, ...], tuple[Any, ...]]

    def __call__(self, num_ctas: int, stream: int, args: tuple[Any, ...]) -> None:
        """Launch."""
        if self.packs_args:
            self.launch(num_ctas, 1, 1, stream, *self.head, args)
        else:
            self.launch(num_ctas, 1, 1, stream, *self.head, *args)


binaries: dict[tuple[Any, ...], Binary] = {}


def compile_and_run(
    kernel: Any, num_ctas: int, args: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
) -> Binary:
    """Compile a kernel and run it once through Triton's own launch path.

    No argument is specialized on its value and every pointer is 16-byte aligned, so that the binary serves all calls with the
    same constants.
    """
    names = kernel.arg_names[len(args) :]
    compiled = kernel[(num_ctas,)](*args, **{**dict(zip(names, constants, strict=True)), **options})
    run = compiled.run
    launch = run.launch
    if launch.__class__.__name__ == "function":  # a wrapper that makes tensor maps from descriptors at every call
        launch = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents
    first, none = (compiled.function, run.launch_cooperative_grid, run.launch_pdl), (None, None)
    metadata = compiled.packed_metadata
    packs_args = hasattr(run, "kernel_signature")  # since Triton 3.7 one launcher serves all kernels
    head: tuple[Any, ...]
    if packs_args:
        head = (*first, metadata, None, *none, *none, run.arg_annotations, run.kernel_signature)
    else:
        head = (*first, *none, metadata, None, *none)
    formats = tuple(map(_map_format, getattr(compiled.metadata, "tensordesc_meta", None) or ()))
    return Binary(launch, head, packs_args, formats, {})


def _map_format(meta: dict[str, Any]) -> tuple[Any, ...]:
    return (meta["swizzle"], meta["elem_size"], gluon().tma_dtypes[meta["elem_type"]], *meta["block_size"])


def tensor_map(address: int, rows: int, columns: int, map_format: tuple[Any, ...]) -> tuple[Any, ...]:
    """A TMA tensor map of a row-major matrix, and the launcher's arguments beside it."""
    swizzle, size, dtype, *box = map_format
    made = gluon().fill_tensor_map(address, swizzle, size, dtype, box, (rows, columns), (columns, 1), 0)
    return (made, rows, columns, columns, 1)


def remember(cache: dict[Any, tuple[Any, ...]], key: Any, value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add to a cache of up to 4096 entries, which is emptied when full."""
    if len(cache) >= 4096:
        cache.clear()
    cache[key] = value
    return value
