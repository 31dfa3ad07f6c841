"""The kernel registry: built-in kernels, those registered at run time, and those of installed plug-ins."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bitline.errors import NoKernelError
from bitline.kernels.base import Kernel

log = logging.getLogger("bitline")

# module -> its kernel classes. Modules are imported when the registry is first read; none imports a provider's package.
BUILT_IN: dict[str, tuple[str, ...]] = {
    "bitline.kernels.reference": ("ReferenceLinearKernel", "BatchInvariantLinearKernel"),
    "bitline.kernels.emulation": (
        "EmulationNvFp4LinearKernel",
        "EmulationMxFp4LinearKernel",
        "EmulationMxfp6LinearKernel",
        "EmulationMxfp8LinearKernel",
    ),
    "bitline.kernels.triton.w4a16": ("TritonW4A16LinearKernel",),
    "bitline.kernels.triton.minifloat": ("TritonMinifloatLinearKernel",),
    "bitline.kernels.hopper.linear": ("GluonHopperLinearKernel",),
    "bitline.kernels.hopper.scaled_linear": ("GluonHopperScaledMMLinearKernel",),
    "bitline.kernels.hopper.w4a8_linear": ("GluonHopperW4A8LinearKernel",),
    "bitline.kernels.triton_fake_quant": ("TritonFakeQuantLinearKernel",),
    "bitline.kernels.triton.scaled_mm": ("TritonInt8ScaledMMLinearKernel", "TritonFp8BlockScaledMMKernel"),
    "bitline.kernels.torch.fp8": (
        "PerTensorTorchFP8ScaledMMLinearKernel",
        "ROCmFP8ScaledMMLinearKernel",
        "RowWiseTorchFP8ScaledMMLinearKernel",
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
    ),
    "bitline.kernels.torch.fp8_block": ("BlockWiseTorchFP8ScaledMMLinearKernel",),
    "bitline.kernels.aliases.cutlass": (
        "CutlassInt8ScaledMMLinearKernel",
        "CutlassFP8ScaledMMLinearKernel",
        "CutlassFp8BlockScaledMMKernel",
        "CutlassW4A8LinearKernel",
    ),
    "bitline.kernels.torch.microscaled": ("CutlassNvFp4LinearKernel", "TorchNvFp4LinearKernel", "TorchMxfp8LinearKernel"),
    "bitline.kernels.providers.flashinfer": (
        "FlashInferCutlassNvFp4LinearKernel",
        "FlashInferTrtllmNvFp4LinearKernel",
        "FlashInferCudnnNvFp4LinearKernel",
        "FlashInferB12xNvFp4LinearKernel",
        "FlashInferMxFp4LinearKernel",
        "FlashInferCutlassMxfp8LinearKernel",
    ),
    "bitline.kernels.aliases.marlin": (
        "MarlinNvFp4LinearKernel",
        "MarlinMxFp4LinearKernel",
        "MarlinMxfp8LinearKernel",
        "MarlinFP8ScaledMMLinearKernel",
    ),
    "bitline.kernels.aliases.wna16": (
        "MarlinLinearKernel",
        "MacheteLinearKernel",
        "ExllamaLinearKernel",
        "ConchLinearKernel",
        "RDNAHybridW4A16LinearKernel",
    ),
    "bitline.kernels.aliases.cpu": ("CPUInt8ScaledMMLinearKernel",),
    "bitline.kernels.aliases.rdna3": ("RDNA3W4A16LinearKernel",),
    "bitline.kernels.providers.deep_gemm": (
        "DeepGemmFp8BlockScaledMMKernel",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    ),
    "bitline.kernels.providers.fbgemm": ("FbgemmNvFp4LinearKernel",),
    "bitline.kernels.providers.humming": (
        "HummingLinearKernel",
        "HummingInt8ScaledMMLinearKernel",
        "HummingFP8ScaledMMLinearKernel",
    ),
    "bitline.kernels.providers.aiter": ("AiterInt8ScaledMMLinearKernel",),
    "bitline.kernels.providers.ark": ("ArkWNA16LinearKernel", "ArkInt8WNA16LinearKernel"),
    "bitline.kernels.providers.xpu": ("XPUwNa16LinearKernel", "XPUW4A8IntLinearKernel"),
    "bitline.kernels.providers.xpu_fp8": ("XPUFP8ScaledMMLinearKernel", "XPUMxFp8LinearKernel"),
    "bitline.kernels.cpu.native_linear": ("CPUWNA16LinearKernel", "CPUBatchInvariantLinearKernel"),
    "bitline.kernels.providers.zentorch": ("ZentorchWNA16LinearKernel", "ZentorchInt8ScaledMMLinearKernel"),
    "bitline.kernels.torch.int4_cpu": ("TorchInt4PackLinearKernel",),
    "bitline.kernels.torch.int8_cpu": ("TorchInt8PackLinearKernel",),
    "bitline.kernels.torch.int8_mm": ("TorchInt8ScaledMMLinearKernel",),
}


@dataclass(frozen=True)
class Entry:
    """A registered kernel: its class, the platforms it is offered on, its priority among equal costs, and where it comes from."""

    kernel: type[Kernel]
    platforms: tuple[str, ...]
    priority: int
    source: str = "bitline"

    @property
    def name(self) -> str:
        """The class name, by which kernels are chosen, disabled and looked up."""
        return self.kernel.__name__


_entries: dict[str, Entry] = {}  # copied on write, so that readers need no lock
_loaded = _loading = False
_lock = threading.RLock()
plugin_failures: dict[str, str] = {}
on_change: list[Callable[[], None]] = []  # called when a name is removed or rebound to another kernel


def register_kernel(
    kernel: type[Kernel], platform: str | None = None, priority: int | None = None, *, replace: bool = False
) -> type[Kernel]:
    """Register a kernel class, so that `choose` ranks it.

    Args:
        kernel: The class, found by its name from now on.
        platform: "cpu", "cuda", "rocm" or "xpu" to offer it there alone; None for all platforms that the class names.
        priority: Breaks ties of cost, larger first; None for the class's own.
        replace: Whether it may replace another kernel of the same name.

    Returns:
        The class.

    Raises:
        NoKernelError: For what is no Kernel class, an unknown platform, or a name that is taken.
    """
    if not (isinstance(kernel, type) and issubclass(kernel, Kernel)):
        raise NoKernelError("only subclasses of bitline.Kernel are kernels", found=repr(kernel))
    if platform is not None and platform not in ("cpu", "cuda", "rocm", "xpu"):
        raise NoKernelError("unknown platform for a kernel", found=repr(platform), expected="cpu, cuda, rocm or xpu")
    load()
    return _add(kernel, (platform,) if platform else kernel.platforms, priority, "registered", replace=replace)


def _add(
    kernel: type[Kernel], platforms: tuple[str, ...], priority: int | None, source: str, *, replace: bool = False
) -> type[Kernel]:
    global _entries
    name = kernel.__name__
    with _lock:
        known = name in _entries
        if known and not replace and _entries[name].kernel is not kernel:
            raise NoKernelError(f"a kernel named {name} is registered already", fix="rename it, or pass replace=True")
        entry = Entry(kernel, platforms, kernel.priority if priority is None else priority, source)
        _entries = {**_entries, name: entry}
        if known:
            _changed()
    return kernel


def unregister_kernel(name: str) -> None:
    """Remove a kernel from the registry.

    Args:
        name: The kernel's class name.

    Raises:
        NoKernelError: Where no such kernel is registered.
    """
    global _entries
    with _lock:
        if name not in _entries:
            raise NoKernelError("no kernel of this name is registered", found=name)
        _entries = {k: v for k, v in _entries.items() if k != name}
        _changed()


def _changed() -> None:
    for callback in on_change:
        callback()


def load() -> None:
    """Import the built-in kernels and the plug-ins of the entry point group "bitline.kernels", once.

    A plug-in is a Kernel class, or a function that calls `register_kernel`. One that fails to load is reported in the log and by
    `bitline doctor`, and affects no other kernel.
    """
    global _loaded, _loading
    if _loaded:
        return
    with _lock:
        if _loaded or _loading:  # _loading: a plug-in calls register_kernel while it is loaded
            return
        _loading = True
        try:
            _load_all()
            _loaded = True
        finally:
            _loading = False


def _load_all() -> None:
    for module, names in BUILT_IN.items():
        loaded = importlib.import_module(module)
        for name in names:
            kernel = getattr(loaded, name)
            _add(kernel, kernel.platforms, None, "bitline")
    for point in importlib.metadata.entry_points(group="bitline.kernels"):
        try:
            plugin = point.load()
            if isinstance(plugin, type) and issubclass(plugin, Kernel):
                _add(plugin, plugin.platforms, None, point.name)
            elif isinstance(plugin, type) or not callable(plugin):
                raise TypeError(f"{plugin!r} is neither a Kernel class nor a function that registers some")
            else:
                plugin()
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            plugin_failures[point.name] = f"{type(error).__name__}: {error}"
            log.warning("kernel plug-in %s (%s) failed to load: %s", point.name, point.value, plugin_failures[point.name])


def entries() -> tuple[Entry, ...]:
    """Every registered kernel."""
    load()
    return tuple(_entries.values())


def kernel_by_name(name: str) -> type[Kernel]:
    """The class of a registered kernel. Raises NoKernelError, with the closest names, for an unknown one."""
    load()
    if name not in _entries:
        raise unknown_kernels([name], _entries)
    return _entries[name].kernel


def unknown_kernels(names: Iterable[str], known: Iterable[str]) -> NoKernelError:
    """The error for names that are not registered, with the closest of the known ones."""
    found, known = sorted(names), list(known)
    near = dict.fromkeys(n for name in found for n in difflib.get_close_matches(name, known, n=3, cutoff=0.0))
    return NoKernelError("not registered as a kernel", found=", ".join(found), expected=f"{', '.join(near)}, ...",
                         fix="docs/kernels.md lists them all")  # fmt: skip
