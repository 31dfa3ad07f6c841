"""The native core: C++ functions of `csrc/` behind a plain C interface, loaded when the first of them is asked for.

It is one shared library inside the package, built by the installation where there is a C++ compiler. Without it every
caller has a path in torch that gives the same bits. `$BITLINE_NO_NATIVE=1` hides it, `$BITLINE_CPU_ISA` forces a lower
level of CPU features. Its functions run on torch's own threads and never allocate a tensor.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitline import env
from bitline.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

ABI = 1  # of bitline_abi() in csrc/isa.cpp
LEVELS = ("portable", "avx2", "avx512", "amx")
THREADS = ("none: torch's threads were not found", "started for each call: torch has no OpenMP of GCC's interface", "torch's own")

# Every function: its result and its arguments. p: pointer, l: int64, i: int, u: uint32, d: double, s: bytes, v: nothing.
SIGNATURES = {
    "bitline_abi": "i", "bitline_isa": "i", "bitline_isa_highest": "i", "bitline_set_isa": "ii",
    "bitline_init": "is", "bitline_threads": "i", "bitline_empty_regions": "vll",
    "bitline_all_finite": "ipliu",
    "bitline_transpose_words": "vplllpl", "bitline_awq_codes": "vplllpl", "bitline_ordered_words": "iplplilpl",
    "bitline_unpack": "vplllip", "bitline_pack": "vplllip", "bitline_take": "ipllliplp",
    "bitline_transpose": "iplllip", "bitline_zero_points": "ipllliuiip", "bitline_prepare": "vpl",
    "bitline_block_codes": "iplllllpliip",
    "bitline_int4pack": "vpllliiipillpp", "bitline_int4pack_scales": "ippplllllpldiip",
    "bitline_gemm": "iplpppi", "bitline_bind": "is",
    "bitline_gemm_row": "iplpppppppi",
    "bitline_step_norm": "vppplld", "bitline_step_gate": "vpppl", "bitline_step_rows": "ipppll",
    "bitline_step_attention": "ippppppllllld", "bitline_step_layer": "ipdddd",
    "bitline_gemm_pack_rows": "ipliipp", "bitline_gemm_pack_scales": "vplilllpllp",
}  # fmt: skip
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "u": ctypes.c_uint32, "d": ctypes.c_double,
    "s": ctypes.c_char_p, "v": None,
}  # fmt: skip
# The first bits, without the sign, of a number that is not finite.
_NOT_FINITE = {"torch.float16": 0x7C00, "torch.bfloat16": 0x7F80, "torch.float32": 0x7F800000,
               "torch.float8_e4m3fn": 0x7F, "torch.float8_e5m2": 0x7C}  # fmt: skip


class Core:
    """A loaded library: its functions, ready to be called, and how their tasks get threads (an index of THREADS)."""

    def __init__(self, path: Path) -> None:
        """Load a file. An OSError says that it is no library, or of another version of Bitline."""
        import torch

        self.path = path
        library = ctypes.CDLL(str(path))
        absent = [name for name in SIGNATURES if not hasattr(library, name)]
        if absent or library.bitline_abi() != ABI:
            why = f"it lacks {absent[0]}" if absent else f"its interface is number {library.bitline_abi()}, not {ABI}"
            raise OSError(f"{path} was built from other sources ({why}): install Bitline again")
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = _TYPES[types[0]], [_TYPES[t] for t in types[1:]]
            setattr(self, name.removeprefix("bitline_"), function)
        suffix = "dylib" if sys.platform == "darwin" else "so"
        beside = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
        self.torch_library = str(beside if beside.exists() else beside.name).encode()
        self.threads_from: int = self.init(self.torch_library)

    def __getattr__(self, name: str) -> Any:  # the functions of SIGNATURES, for type checkers
        raise AttributeError(name)


_lock = threading.Lock()
_core: Core | None = None
_reason: str | None = None  # why there is none, once that is known


def core() -> Core | None:
    """The library, loaded by the first call; None where there is none, and `why_not` says why.

    An InputError where $BITLINE_CPU_ISA is not a level of this machine.
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
        wanted = env.cpu_isa()
        if wanted:
            _set(found, wanted)
        _core = found


def find() -> Path | None:
    """The library file: $BITLINE_NATIVE_LIBRARY, else the one in the package; None where it was not built."""
    named = env.native_library()
    if named is not None:
        return named
    suffix = "dylib" if sys.platform == "darwin" else "so"
    for folder in sys.modules["bitline"].__path__:  # an editable installation has two: sources, and what was built from them
        path = Path(folder) / "_native" / f"libbitline_native.{suffix}"
        if path.is_file():
            return path
    return None


def isa() -> str | None:
    """The level of CPU features in use, of LEVELS; None without the library."""
    found = core()
    return None if found is None else LEVELS[found.isa()]


def isas() -> tuple[str, ...]:
    """The levels that this machine and this build have, lowest first."""
    found = core()
    return () if found is None else LEVELS[: found.isa_highest() + 1]


def use_isa(level: str) -> None:
    """Use the variants of one level, or of lower ones where it has none. An InputError where this machine lacks it."""
    found = core()
    if found is None:
        raise InputError("there is no native core", found=_reason, expected="one that is built and not hidden")
    _set(found, level)


def _set(found: Core, level: str) -> None:
    if level not in LEVELS or found.set_isa(LEVELS.index(level)):
        have = ", ".join(LEVELS[: found.isa_highest() + 1])
        raise InputError("no such level of CPU features here", found=repr(level), expected=have,
                         fix="set BITLINE_CPU_ISA to one of them, or not at all")  # fmt: skip


def usable(*tensors: Tensor) -> Core | None:
    """The core, where its functions can be given all of these: plain CPU tensors whose rows lie in one piece each."""
    import torch

    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or (tensor.dim() and tensor.stride(-1) != 1):
            return None
    return None if torch.compiler.is_compiling() else core()


def all_finite(x: Tensor) -> bool | None:
    """Whether no number is NaN or infinite; None where the core cannot tell."""
    found = usable(x)
    first = _NOT_FINITE.get(str(x.dtype))
    if found is None or first is None or not x.is_contiguous():
        return None
    return bool(found.all_finite(x.data_ptr(), x.numel(), x.itemsize, first))


def transposed(x: Tensor) -> Tensor:
    """A matrix [R, C] of numbers of up to 4 bytes as a contiguous [C, R]: `x.t().contiguous()`."""
    import torch

    found = usable(x) if x.itemsize in (1, 2, 4) else None
    if found is None:
        return x.t().contiguous()
    out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype)
    if found.transpose(x.data_ptr(), x.stride(0), *x.shape, x.itemsize, out.data_ptr()):
        raise MemoryError("no memory to transpose in")
    return out


def report() -> dict[str, Any]:
    """What `bitline doctor` says of the core."""
    found = core()
    if found is None:
        return {"built": find() is not None, "available": False, "reason": _reason}
    return {"built": True, "available": True, "path": str(found.path), "isa": isa(), "isas": list(isas()),
            "threads": found.threads(), "threads_from": THREADS[found.threads_from]}  # fmt: skip
