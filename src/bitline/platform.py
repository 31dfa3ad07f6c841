"""Hardware platforms as kernel selection sees them: vendor, architecture, CPU features, packages and peak rates.

`Platform.detect()` describes this machine. `Platform.parse("cuda:sm90")` describes any machine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform as host
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from bitline.errors import PlatformError

Vendor = Literal["cpu", "cuda", "rocm", "xpu"]


@dataclass(frozen=True)
class Package:
    """An optional package that some kernels need: its distribution name, what it adds, and how to install it."""

    distribution: str
    adds: str
    install: str


# import name -> package
PACKAGES = {
    "triton": Package("triton", "portable GPU kernels", "pip install triton (comes with a GPU build of torch)"),
    "zentorch": Package("zentorch", "AMD Zen CPU kernels", "pip install zentorch, in the version for this torch"),
    "auto_round_kernel": Package("auto-round-lib", "AutoRound's CPU and XPU kernels", "pip install auto-round-lib"),
    "flashinfer": Package(
        "flashinfer-python", "FP4 and FP8 kernels for NVIDIA Hopper and Blackwell", "pip install flashinfer-python"
    ),
    "deep_gemm": Package(
        "deep-gemm", "block FP8 for NVIDIA Hopper",
        "pip install git+https://github.com/deepseek-ai/DeepGEMM (PyPI's deep-gemm is an early version)",
    ),
    "mslk": Package(
        "mslk-cuda", "NVFP4 kernels of FBGEMM's successor for NVIDIA Blackwell",
        "pip install mslk-cuda, in the version for this torch (PyPI's mslk is an empty placeholder)",
    ),
    "fbgemm_gpu": Package(
        "fbgemm-gpu-genai", "NVFP4 kernels of FBGEMM for NVIDIA Blackwell",
        "pip install fbgemm-gpu-genai, in the version for this torch",
    ),
    "aiter": Package(
        "amd-aiter", "int8 kernels for AMD Instinct", "pip install amd-aiter, or build it from AITER's repository, for your ROCm"
    ),
    "humming": Package("humming-kernels", "weight-only, FP8 and int8 kernels for NVIDIA GPUs", "pip install humming-kernels"),
    "vllm_xpu_kernels": Package("vllm-xpu-kernels", "int4, FP8 and MXFP8 kernels for Intel GPUs", "pip install vllm-xpu-kernels"),
}  # fmt: skip

CPU_FEATURES = (
    "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_vbmi", "amx", "zen", "neon", "dotprod", "i8mm", "bf16", "sve",
)  # fmt: skip
_IMPLIED = {
    "amx": ("avx512_vnni", "avx512_bf16", "avx512_vbmi"), "avx512_bf16": ("avx512_vnni",), "avx512_vbmi": ("avx512",),
    "avx512_vnni": ("avx512",), "avx512": ("avx2",),
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Peak rates of one device, for rooflines: memory bandwidth in bytes/s, dense MMA rates in op/s (a multiply-add is two)."""

    bandwidth: float
    bf16: float
    fp32: float
    int8: float
    fp8: float = 0.0
    launch: float = 3e-6  # seconds of an empty call

    def of(self, kind: str) -> float:
        """The rate of "bf16", "fp16", "fp32", "int8" or "fp8" in op/s; bf16's for a format without MMA units."""
        rate: float = getattr(self, "bf16" if kind == "fp16" else kind)
        return rate or self.bf16


# Dense rates from the vendors' datasheets; sm90's are measured on an H200.
_GPU_RATES = {
    "sm70": Rates(0.9e12, 112e12, 14e12, 62e12), "sm75": Rates(0.32e12, 65e12, 8e12, 130e12),
    "sm80": Rates(2.0e12, 312e12, 19e12, 624e12), "sm86": Rates(0.94e12, 71e12, 35e12, 284e12),
    "sm89": Rates(0.86e12, 181e12, 90e12, 724e12, 362e12), "sm90": Rates(4.35e12, 790e12, 60e12, 1500e12, 1550e12),
    "sm100": Rates(8.0e12, 2250e12, 80e12, 4500e12, 4500e12), "sm103": Rates(8.0e12, 2500e12, 80e12, 300e12, 5000e12),
    "sm120": Rates(1.8e12, 210e12, 105e12, 838e12, 838e12), "sm121": Rates(0.27e12, 62e12, 31e12, 250e12, 250e12),
    "gfx90a": Rates(3.2e12, 383e12, 48e12, 383e12), "gfx942": Rates(5.3e12, 1300e12, 163e12, 2600e12, 2600e12),
    "gfx950": Rates(8.0e12, 2300e12, 157e12, 4600e12, 4600e12), "gfx1030": Rates(0.51e12, 46e12, 23e12, 92e12),
    "gfx1100": Rates(0.96e12, 123e12, 61e12, 123e12), "gfx1151": Rates(0.25e12, 59e12, 29e12, 59e12),
    "gfx1200": Rates(0.32e12, 97e12, 25e12, 195e12, 195e12), "gfx1201": Rates(0.64e12, 195e12, 49e12, 389e12, 389e12),
}  # fmt: skip
_XPU_RATES = Rates(0.56e12, 98e12, 12e12, 197e12)


def _cpu_rates(features: frozenset[str], cores: int) -> Rates:
    """Rates measured per core with torch 2.13 on two-core machines (docs/performance.md), times the core count."""
    bandwidth = min(17e9 * cores, 300e9)
    fp32 = 24e9 * cores
    if "amx" in features:  # 16 virtual cores of an Emerald Rapids Xeon
        return Rates(min(10e9 * cores, 115e9), 230e9 * cores, 45e9 * cores, 400e9 * cores, launch=2e-6)
    if "avx512_bf16" in features:
        return Rates(bandwidth, 440e9 * cores, 90e9 * cores, 740e9 * cores, launch=2e-6)
    if "avx512" in features:
        return Rates(bandwidth, fp32 * 2, 90e9 * cores, 400e9 * cores, launch=2e-6)
    if "avx2" in features:  # two virtual cores of an EPYC that hides AVX-512; torch has no fast bfloat16 and int8 GEMM there
        return Rates(bandwidth, 15e9 * cores, 40e9 * cores, 2.6e9 * cores, launch=2e-6)
    return Rates(bandwidth, fp32, 40e9 * cores, 60e9 * cores, launch=2e-6)


@dataclass(frozen=True)
class Platform:
    """A hardware platform. Hashable and without device handles, so that `choose` works for machines that are not here.

    Attributes:
        vendor: "cpu", "cuda", "rocm" or "xpu".
        arch: "x86_64", "aarch64", "sm90", "gfx942", or "" for an XPU.
        features: CPU features out of `CPU_FEATURES`.
        packages: Import names of the optional packages that are installed, or assumed to be.
        cores: CPU threads that torch uses.
        interpreted: Whether Triton runs its interpreter, not its compiler.
        native: Whether Bitline's native core (C++) is available; it is built at installation where there is a compiler.
        device: Name of the torch device that `detect` described; "" for a platform that need not be here. Not compared.
    """

    vendor: Vendor
    arch: str = ""
    features: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    cores: int = 2
    interpreted: bool = False
    native: bool = True
    device: str = field(default="", compare=False, repr=False)

    @staticmethod
    def parse(text: str) -> Platform:
        """Parse a platform's text form: `cpu`, `cpu:avx512,amx,cores=8`, `cuda:sm90,humming`, `rocm:gfx942`, `xpu`.

        A GPU platform includes Triton, as torch's GPU builds do. Other packages have to be named.

        Args:
            text: The vendor, then after a colon any of, comma-separated: an architecture, CPU features, packages, `cores=N`,
                and for a CPU `no_native`.

        Raises:
            PlatformError: For an unknown vendor or word, and for a GPU without an architecture.
        """
        name, _, rest = text.strip().lower().partition(":")
        words = [w.strip() for w in rest.split(",") if w.strip()]
        if name not in get_args(Vendor):
            raise PlatformError(
                "unknown platform", found=repr(text), expected="cpu[:features], cuda:smNN, rocm:gfxNNN or xpu",
                fix="name the vendor first, for example cuda:sm90",
            )  # fmt: skip
        vendor: Vendor = name  # type: ignore[assignment]
        gpu_arch = {"cuda": r"sm_?\d{2,3}a?", "rocm": r"gfx[0-9a-f]{3,4}"}.get(vendor, r"(?!)")
        arch, cores, native = "", 2, True
        features: set[str] = set()
        packages: set[str] = set()
        for word in words:
            if re.fullmatch(r"cores=[1-9][0-9]{0,4}", word):
                cores = int(word[6:])
            elif vendor == "cpu" and word == "no_native":
                native = False
            elif word in PACKAGES:
                packages.add(word)
            elif vendor == "cpu" and word in CPU_FEATURES:
                features |= {word, *_implied_features(word)}
            elif vendor == "cpu" and word in ("x86_64", "aarch64"):
                arch = word
            elif re.fullmatch(gpu_arch, word):
                arch = word.replace("_", "").removesuffix("a") if vendor == "cuda" else word
            else:
                raise PlatformError(
                    f"unknown word {word!r} in platform {text!r}",
                    expected=f"an architecture, cores=N or no_native (CPUs), a CPU feature ({', '.join(CPU_FEATURES)}) "
                    f"or a package ({', '.join(PACKAGES)})",
                )
        if vendor in ("cuda", "rocm") and not arch:
            raise PlatformError(f"platform {text!r} names no architecture", expected="cuda:sm90 or rocm:gfx942, for example")
        if vendor == "cpu" and not arch:
            arch = "aarch64" if features & {"neon", "dotprod", "i8mm", "sve", "bf16"} else "x86_64"
        if arch == "aarch64":
            features.add("neon")  # part of the base architecture
        if vendor != "cpu":
            packages.add("triton")
        return Platform(vendor, arch, frozenset(features), frozenset(packages), cores, native=native)

    @staticmethod
    def detect(device: torch.device | str | None = None) -> Platform:
        """The platform of a torch device of this machine. Creates no GPU context for a CPU.

        Args:
            device: A torch device or its name; the CPU by default.

        Raises:
            PlatformError: Where torch does not see such a device.
        """
        target = as_device(device or "cpu")
        packages = frozenset(installed_packages())
        if target.type == "cpu":
            from bitline import env, native

            return Platform(
                "cpu", _machine(), cpu_features(), packages, torch.get_num_threads(), env.triton_interpret(),
                native.core() is not None, str(target),
            )  # fmt: skip
        if target.type == "cuda":
            if not torch.cuda.is_available():
                raise PlatformError("no CUDA or ROCm device is available", found=str(target), expected="a GPU that torch sees",
                                    fix="pass device='cpu', or install a torch build for this GPU")  # fmt: skip
            if torch.version.hip:
                arch = torch.cuda.get_device_properties(target).gcnArchName.split(":")[0]
                return Platform("rocm", arch, packages=packages, device=str(target))
            major, minor = torch.cuda.get_device_capability(target)
            return Platform("cuda", f"sm{major}{minor}", packages=packages, device=str(target))
        if target.type == "xpu" and not torch.xpu.is_available():
            raise PlatformError("no XPU is available", found=str(target), expected="an Intel GPU that torch sees",
                                fix="pass device='cpu', or install a torch build for this GPU")  # fmt: skip
        if target.type == "xpu":
            return Platform("xpu", packages=packages, device=str(target))
        raise PlatformError("Bitline has no platform for this device", found=str(target), expected="cpu, cuda or xpu")

    @property
    def device_type(self) -> str:
        """The torch device type: "cpu", "cuda" (also for ROCm) or "xpu"."""
        return "cuda" if self.vendor == "rocm" else self.vendor

    @property
    def capability(self) -> int:
        """CUDA compute capability times ten (90 for sm90), 0 on other vendors' hardware."""
        return int(self.arch[2:]) if self.vendor == "cuda" else 0

    @property
    def rates(self) -> Rates:
        """Peak rates for cost estimates; those of the nearest older architecture where this one has no entry."""
        if self.vendor == "cpu":
            return _cpu_rates(self.features, self.cores)
        if self.vendor == "xpu":
            return _XPU_RATES
        return _GPU_RATES[self._rated_arch]

    @property
    def rates_note(self) -> str:
        """That another architecture's rates stand in for this one's, which makes all times guesses; "" where it has its own."""
        if self.vendor in ("cpu", "xpu") or self._rated_arch == self.arch:
            return ""
        return f"no rates are known for {self.arch}: those of {self._rated_arch} stand in, so times are guesses"

    @property
    def _rated_arch(self) -> str:
        """The GPU architecture whose rates apply: this one, the nearest older one, or the oldest."""
        if self.arch in _GPU_RATES:
            return self.arch
        prefix, number = re.fullmatch(r"([a-z]+)([0-9a-f]+)", self.arch).groups()  # type: ignore[union-attr]
        family = [a for a in _GPU_RATES if a.startswith(prefix)]
        older = [a for a in family if int(a[len(prefix) :], 16) <= int(number, 16)]
        return max(older or family[:1], key=lambda a: int(a[len(prefix) :], 16))

    def __str__(self) -> str:
        words = [self.arch] if self.arch else []
        words += sorted(self.features) + sorted(self.packages)
        if self.vendor == "cpu":
            words += [f"cores={self.cores}"] + ([] if self.native else ["no_native"])
        return self.vendor + (":" + ",".join(words) if words else "")


def as_device(device: torch.device | str) -> torch.device:
    """A torch device. Raises PlatformError for what is not one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlatformError("not a device", found=repr(device), expected="cpu, cuda, cuda:1 or xpu") from error


def _implied_features(feature: str) -> Iterable[str]:
    """The CPU features that one feature implies, transitively."""
    for implied in _IMPLIED.get(feature, ()):
        yield implied
        yield from _implied_features(implied)


def _machine() -> str:
    name = host.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def installed_packages() -> dict[str, str]:
    """Optional packages that are installed, import name -> version. None of them is imported."""
    found = {}
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(name) is not None:
            try:
                found[name] = importlib.metadata.version(package.distribution)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "unknown version"
    return found


@functools.cache
def cpu_features() -> frozenset[str]:
    """The features of this CPU, out of CPU_FEATURES."""
    flags = _torch_cpu_flags() or _proc_cpu_flags()
    names = {  # torch's and the kernel's names of a flag -> ours
        "avx2": "avx2", "avx512_f": "avx512", "avx512f": "avx512", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16",
        "avx512_vbmi": "avx512_vbmi", "avx512vbmi": "avx512_vbmi", "amx_bf16": "amx", "neon": "neon", "asimd": "neon",
        "dotprod": "dotprod", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve",
    }  # fmt: skip
    found = {names[f] for f in flags if f in names}
    if _machine() == "aarch64":
        found.add("neon")
    elif _is_zen():
        found.add("zen")
    return frozenset(found)


def device_name(device: str) -> str:
    """The model name of a torch device of this machine."""
    kind = as_device(device).type
    return cpu_name() if kind == "cpu" else str(getattr(torch, kind).get_device_name(device))


def cpu_name() -> str:
    """The CPU's model name, or its architecture."""
    return _cpuinfo("model name") or host.processor() or host.machine()


def _torch_cpu_flags() -> set[str]:
    query = getattr(torch.cpu, "get_capabilities", None)  # absent before torch 2.12
    return {name for name, value in query().items() if value is True} if query else set()


def _proc_cpu_flags() -> set[str]:
    return set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())


def _is_zen() -> bool:
    return "AMD" in _cpuinfo("vendor_id") and _cpuinfo("cpu family").isdigit() and int(_cpuinfo("cpu family")) >= 0x17


@functools.cache
def _cpuinfo(field: str) -> str:
    """The first value of a field of /proc/cpuinfo, "" where there is no such field."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == field:
                    return value.strip()
    except OSError:
        pass
    return ""
