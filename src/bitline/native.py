"""The native core: the C++ functions of `csrc/` behind a C interface, loaded when the first of them is needed.

It is one shared library inside the package, built at installation where there is a C++ compiler. Without it every caller has a
torch implementation with the same results, bit for bit. `$BITLINE_NO_NATIVE=1` hides it, `$BITLINE_CPU_ISA` selects a lower ISA
level. Its functions run on torch's own threads and never allocate a tensor. docs/cpu-design.md describes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitline import env
from bitline.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

ABI = 10  # bitline_abi() in csrc/isa.cpp
LEVELS = ("portable", "avx2", "avx512", "amx", "avx_vnni", "neon", "neon_i8mm")
THREADS = (
    "none: torch's threads were not found",
    "spawned for each call: torch has no OpenMP runtime with GCC's interface",
    "torch's own",
)

# Exported functions: result type, then argument types. p: pointer, l: int64, i: int, u: uint32, d: double, s: bytes, v: void.
SIGNATURES = {
    "bitline_abi": "i", "bitline_isa": "i", "bitline_isa_supported": "i", "bitline_set_isa": "ii",
    "bitline_bind_torch_threads": "is", "bitline_num_threads": "i", "bitline_empty_parallel_regions": "vll",
    "bitline_pool_loops": "llli", "bitline_awake_team_loops": "lll",
    "bitline_adapt_threads": "vi", "bitline_pretend_contended": "vl",
    "bitline_prefault_pages": "vpl", "bitline_all_finite": "ipliu",
    "bitline_unpack_codes": "vplllip", "bitline_pack_codes": "vplllip", "bitline_take_columns": "ipllliplp",
    "bitline_repack_gptq": "vplllpl", "bitline_repack_gptq_permuted": "iplplilpl", "bitline_repack_awq": "vplllpl",
    "bitline_transpose": "iplllip", "bitline_unpack_zero_points": "ipllliuiip", "bitline_repack_gguf_blocks": "iplllllpliip",
    "bitline_unpack_gguf_scales": "vpllllpppp",
    "bitline_int4pack_codes": "vpllliiipillpp", "bitline_int4pack_scales": "ippplllllpldiip",
    "bitline_gemm_pack_codes": "ipliipp", "bitline_gemm_pack_scales": "vplilllpllp",
    "bitline_gemm_unpack": "ippi",
    "bitline_gemm": "iplpppi", "bitline_fused_gemv": "iplpppppppi", "bitline_register_torch_op": "is",
    "bitline_experts": "ipdd", "bitline_route": "ippllliipp",
    "bitline_rms_norm": "vppplld", "bitline_silu_and_mul": "vpppl", "bitline_gemv_bf16": "ipppll",
    "bitline_decode_attention": "ippppppllllld", "bitline_decode_layer": "ipdddd",
    "bitline_decode_layers": "ipplppppl",
    "bitline_ranks_gather": "ipplp", "bitline_ranks_sum": "ipplipi",
}  # fmt: skip
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "u": ctypes.c_uint32, "d": ctypes.c_double,
    "s": ctypes.c_char_p, "v": None,
}  # fmt: skip
# The first bit pattern, without the sign, that is not finite.
_NOT_FINITE = {"torch.float16": 0x7C00, "torch.bfloat16": 0x7F80, "torch.float32": 0x7F800000,
               "torch.float8_e4m3fn": 0x7F, "torch.float8_e5m2": 0x7C}  # fmt: skip


class Core:
    """A loaded library: the functions of SIGNATURES as attributes, without their prefix. threads_from: an index of THREADS."""

    def __init__(self, path: Path) -> None:
        """Load a file. OSError: it is not a library, or one of another version of Bitline."""
        import torch

        self.path = path
        library = ctypes.CDLL(str(path))
        missing = [name for name in SIGNATURES if not hasattr(library, name)]
        if missing or library.bitline_abi() != ABI:
            reason = f"it lacks {missing[0]}" if missing else f"its ABI number is {library.bitline_abi()}, not {ABI}"
            raise OSError(f"{path} was built from other sources ({reason}): install Bitline again")
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = _TYPES[types[0]], [_TYPES[t] for t in types[1:]]
            setattr(self, name.removeprefix("bitline_"), function)
        suffix = "dylib" if sys.platform == "darwin" else "so"
        in_package = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
        self.torch_library = str(in_package if in_package.exists() else in_package.name).encode()
        self.threads_from: int = self.bind_torch_threads(self.torch_library)

    def __getattr__(self, name: str) -> Any:  # the functions of SIGNATURES, for type checkers
        raise AttributeError(name)


_lock = threading.Lock()
_core: Core | None = None
_reason: str | None = None  # why there is none, once loading was tried


def core() -> Core | None:
    """The library, loaded by the first call; None where there is none, for the reason that `why_not` returns.

    InputError: $BITLINE_CPU_ISA is not an ISA level of this machine.
    """
    if _core is None and _reason is None:
        _load()
    return _core


def why_not() -> str | None:
    """Why there is no native core; None where there is one."""
    core()
    return _reason


def _load() -> None:
    global _core, _reason
    with _lock:
        if _core is not None or _reason is not None:
            return
        if env.no_native():
            _reason = "hidden by BITLINE_NO_NATIVE"
            return
        path = find()
        if path is None:
            _reason = "not built: install Bitline again where there is a C++ compiler"
            return
        try:
            found = Core(path)
        except OSError as error:
            _reason = str(error)
            return
        level = env.cpu_isa()
        if level:
            _set_isa(found, level)
        _core = found


def find() -> Path | None:
    """The library file: $BITLINE_NATIVE_LIBRARY, else the one in the package; None where it was not built."""
    named = env.native_library()
    if named is not None:
        return named
    suffix = "dylib" if sys.platform == "darwin" else "so"
    for folder in sys.modules["bitline"].__path__:  # an editable installation has two: sources and build results
        path = Path(folder) / "_native" / f"libbitline_native.{suffix}"
        if path.is_file():
            return path
    return None


def isa() -> str | None:
    """The ISA level in use, of LEVELS; None without the library."""
    found = core()
    return None if found is None else LEVELS[found.isa()]


def isas() -> tuple[str, ...]:
    """The ISA levels that this machine and this build support, in LEVELS' order."""
    found = core()
    return () if found is None else _supported(found)


def _supported(found: Core) -> tuple[str, ...]:
    mask = found.isa_supported()
    return tuple(level for i, level in enumerate(LEVELS) if mask >> i & 1)


def use_isa(level: str) -> None:
    """Use the kernels of one ISA level, or of the next lower one that has them. InputError: this machine lacks the level."""
    found = core()
    if found is None:
        raise InputError("there is no native core", found=_reason, expected="a native core that is built and not hidden")
    _set_isa(found, level)


def _set_isa(found: Core, level: str) -> None:
    if level not in LEVELS or found.set_isa(LEVELS.index(level)):
        raise InputError("this machine or build lacks the ISA level", found=repr(level), expected=", ".join(_supported(found)),
                         fix="set BITLINE_CPU_ISA to one of them, or not at all")  # fmt: skip


def core_for(*tensors: Tensor) -> Core | None:
    """The core, where its functions can take all of these: plain CPU tensors with contiguous rows, outside of torch.compile."""
    import torch

    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or (tensor.dim() and tensor.stride(-1) != 1):
            return None
    return None if torch.compiler.is_compiling() else core()


@contextlib.contextmanager
def adapted_threads() -> Iterator[None]:
    """A scope of calls of a model. While other processes hold up torch's threads, its operations run on the calling thread alone
    and the core's loops on threads of its own; `torch.get_num_threads()` is 1 meanwhile, and as before behind the scope."""
    found = core()
    if found is None:
        yield
        return
    found.adapt_threads(1)
    try:
        yield
    finally:
        found.adapt_threads(0)


def all_finite(x: Tensor) -> bool | None:
    """Whether no number is NaN or infinite; None where the core cannot check this tensor."""
    found = core_for(x)
    first = _NOT_FINITE.get(str(x.dtype))
    if found is None or first is None or not x.is_contiguous():
        return None
    return bool(found.all_finite(x.data_ptr(), x.numel(), x.itemsize, first))


def transposed(x: Tensor) -> Tensor:
    """A contiguous transpose [C, R] of a matrix [R, C]: `x.t().contiguous()`, natively for elements of 1, 2 and 4 bytes."""
    import torch

    found = core_for(x) if x.itemsize in (1, 2, 4) else None
    if found is None:
        return x.t().contiguous()
    out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype)
    if found.transpose(x.data_ptr(), x.stride(0), *x.shape, x.itemsize, out.data_ptr()):
        raise MemoryError("no memory to transpose a matrix")
    return out


def report() -> dict[str, Any]:
    """The core's entry in the report of `bitline doctor`."""
    found = core()
    if found is None:
        return {"built": find() is not None, "available": False, "reason": _reason}
    return {"built": True, "available": True, "path": str(found.path), "isa": isa(), "isas": list(isas()),
            "threads": found.num_threads(), "threads_from": THREADS[found.threads_from]}  # fmt: skip
