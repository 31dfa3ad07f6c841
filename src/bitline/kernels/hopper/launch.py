"""Host side of the Hopper kernels: what a call needs is worked out once for a layer and a range of rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.kernels.hopper import layout, ptx
from bitline.kernels.hopper.scheme import Scheme, scheme_of
from bitline.kernels.hopper.tiles import Decode, Wide, decode_tile, shares, wide_tile
from bitline.types import LinearSpec

DECODE_ROWS = 16


class Code(NamedTuple):
    """What the device code is compiled for of a scheme (`scheme.Scheme`), and the assembly of it (`ptx`)."""

    format: str
    half: bool
    wide: bool
    fine: int
    per: int
    zero: bool
    planes: int
    bias: bool
    alpha: bool
    duplicate: tuple[str, str]
    fragment: tuple[str, str]
    unit: tuple[str, str] = ("", "")
    words: tuple[str, str] = ("", "")
    x: tuple[str, str] = ("", "")


class Lanes(NamedTuple):
    """The compile-time part of `tiles.Decode`, and what of the shape matters: mt, 8-row tiles of x; even: no remainders."""

    r: int
    c: int
    mt: int
    blocks: int
    even: bool
    pdl: bool = True


class Geometry(NamedTuple):
    """The compile-time part of `tiles.Wide`."""

    bm: int
    h: int
    stages: int
    nb: int
    mr: int
    gn: int
    pdl: bool
    sb: bool
    bm2: int = 0


@functools.lru_cache(maxsize=4096)
def code_of(scheme: Scheme, bias: bool, mt: int = 0) -> Code:
    """The device code of a scheme for 8*mt rows, or for more than 16 with mt = 0."""
    s, blocks = scheme, scheme.blocks
    common = (s.zero, s.width // 4, bias, s.alpha, ptx.duplicate(s.half, s.wide))
    if mt == 0:
        return Code(s.format, s.half, s.wide, s.fine, s.per, *common, ptx.fragment(s.format, s.half))
    per = 1 if s.fine > 1 else s.per // blocks
    return Code(
        s.format, s.half, s.wide, s.fine, per, *common, ("", ""), ptx.mma_unit(s.format, s.half, blocks, mt, s.fine > 1),
        ptx.load_words(blocks * s.width // 4), ptx.load_x(blocks),
    )  # fmt: skip


@functools.cache
def _triton() -> Any:
    """The device code and what launching takes: the only imports of Triton."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    from bitline.kernels.hopper import decode_device, wide_device

    def shared(swizzle: int, width: int) -> Any:
        return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=width, rank=2)

    return SimpleNamespace(
        decode=decode_device.decode, wide=wide_device.wide, Descriptor=TensorDescriptor,
        swizzled=shared(128, 16), plain32=shared(0, 32), plain16=shared(0, 16),
        fill=driver.active.utils.fill_tma_descriptor, dtypes=TMA_DTYPE_DEVICE_TO_HOST,
    )  # fmt: skip


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Typed:
    """A tensor's address under another dtype, as Triton's compiler takes it."""

    __slots__ = ("address", "dtype")

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.address, self.dtype = tensor.data_ptr(), dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class _Binary(NamedTuple):
    """A compiled kernel: Triton's C launcher, the arguments that it takes before the kernel's own, and of each tensor map the
    swizzle, element size, type and box."""

    launch: Any
    head: tuple[Any, ...]
    middle: tuple[Any, ...]
    maps: tuple[tuple[Any, ...], ...]


_binaries: dict[tuple[Any, ...], _Binary] = {}


def _compile(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
) -> _Binary:
    """Compile and run once, by Triton's own path. No argument is specialised on its value and every pointer is a multiple
    of 16, so that the binary fits all calls with the same constants."""
    names = kernel.arg_names[len(arguments) :]
    binary = kernel[(programs,)](*arguments, **{**dict(zip(names, constants, strict=True)), **options})
    run = binary.run
    launch = run.launch
    if launch.__class__.__name__ == "function":  # the wrapper that makes tensor maps from descriptors at every call
        launch = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents
    head = (binary.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
    return _Binary(
        launch,
        head,
        (binary.packed_metadata, None, None, None),
        tuple(map(_form, getattr(binary.metadata, "tensordesc_meta", None) or ())),
    )


class _DecodePlan:
    """A launch for up to 4, 8 or 16 rows."""

    def __init__(self, spec: LinearSpec, scheme: Scheme, m: int, bias: bool, tile: Decode | None = None) -> None:
        self.spec = spec  # kept alive, so that its identity stays its own
        mt = 1 if m <= 8 else 2
        tiles, columns = layout.padded(spec.n, spec.k)
        units = columns // (64 * scheme.blocks)
        tile = tile or decode_tile(m, tiles, units, scheme)
        step = tile.warps * tile.c
        steps = -(-units // step)
        even = units == steps * step and tiles % tile.r == 0
        self.constants = (code_of(scheme, bias, mt), Lanes(tile.r, tile.c, mt, scheme.blocks, even), tile.warps)
        self.options = {"num_warps": tile.warps, "launch_pdl": True, **({"maxnreg": tile.registers} if tile.registers else {})}
        self.programs = -(-tiles // tile.r)
        self.numbers = (units, tiles, scheme.groups, steps)
        self.binary: _Binary | None = None

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        words, scale, zero, alpha, _ = packed
        m, k = x.shape
        n = self.spec.n
        y = x.new_empty((m, n))
        index = x.device.index
        binary = self.binary
        if binary is None:
            key = (self.constants, self.options.get("maxnreg"), index)
            binary = _binaries.get(key)
            if binary is None:
                typed = (
                    x, words, _Typed(scale, "fp32" if scale.dtype == torch.float32 else "i32"), _Typed(zero, "i16"),
                    x if bias is None else bias, alpha, y, m, n, k, *self.numbers,
                )  # fmt: skip
                binary = _binaries[key] = _compile(_triton().decode, self.programs, typed, self.constants, self.options)
                self.binary = binary
                return y
            self.binary = binary
        binary.launch(
            self.programs, 1, 1, _raw_stream(index), *binary.head, *binary.middle,
            x, words, scale, zero, x if bias is None else bias, alpha, y, m, n, k, *self.numbers, *self.constants,
        )  # fmt: skip
        return y


class _WidePlan:
    """A launch for one number of rows above 16."""

    def __init__(self, spec: LinearSpec, scheme: Scheme, m: int, bias: bool, sms: int, tile: Wide | None = None) -> None:
        t = (tile or wide_tile(m, spec.n, spec.k, sms)).fitted(scheme)
        self.spec, self.scheme, self.tile = spec, scheme, t
        nt = t.nb * t.mr
        stages = -(-layout.padded(spec.n, spec.k)[1] // (64 * t.h))
        tm, tn = -(-m // (t.bm + t.bm2)), -(-spec.n // (64 * nt))
        self.programs, whole, rest = shares(tm * tn, stages, t.p)
        p = self.programs
        self.numbers = (spec.n, stages, tm, tn, p, whole, rest)
        self.scratch = p * nt * 64 * (t.bm + t.bm2) if rest else 0
        self.constants = (code_of(scheme, bias), Geometry(t.bm, t.h, t.stages, t.nb, t.mr, t.gn, t.pdl, t.sb, t.bm2))
        self.options = {"num_warps": 4, "launch_pdl": t.pdl}
        self.boxes = (nt * 4, 128 * scheme.width // 4, (16 if scheme.wide else 8) * scheme.fine, 8 * scheme.fine)
        self.columns = -(-spec.n // 8) * 8
        self.binary: _Binary | None = None

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        words, scale, zero, alpha, _ = packed
        m, k = x.shape
        n = self.columns
        y = x.new_empty((m, n))
        index = x.device.index
        parts, flags = words, words
        if self.scratch:
            parts = torch.empty(self.scratch, dtype=torch.float32, device=x.device)
            flags = flags_of(x.device)
        binary = self.binary
        if binary is None:
            key = (self.constants, index)
            binary = _binaries.get(key)
            if binary is None:
                self._compile(key, x, packed, bias, y, parts, flags)
                return y if n == self.spec.n else y[:, : self.spec.n].contiguous()
            self.binary = binary
        maps, two = binary.maps, self.tile.bm2 > 0
        weights = _weight_maps(words, scale, zero, self.scheme, maps[1 + two :])
        binary.launch(
            self.programs, 1, 1, _raw_stream(index), *binary.head, *binary.middle,
            *_map(x.data_ptr(), m, k, *maps[0]), *(_map(x.data_ptr(), m, k, *maps[1]) if two else (words,)), *weights,
            *_map(y.data_ptr(), m, n, *maps[-1 - two]), *(_map(y.data_ptr(), m, n, *maps[-1]) if two else (words,)),
            parts, flags, x if bias is None else bias, alpha, *self.numbers, *self.constants,
        )  # fmt: skip
        return y if n == self.spec.n else y[:, : self.spec.n].contiguous()

    def _compile(
        self, key: Any, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, parts: Tensor, flags: Tensor
    ) -> None:
        g, s, (rows, words, entries, zeros) = _triton(), self.scheme, self.boxes
        bm, bm2 = self.tile.bm, self.tile.bm2
        tiles = packed[0].shape[0]
        scale = packed[1] if s.wide else packed[1].view(torch.int32)
        zero = packed[2].view(torch.int16) if s.zero else packed[0]
        typed = (
            g.Descriptor.from_tensor(x, [bm, 64], g.swizzled),
            g.Descriptor.from_tensor(x, [bm2, 64], g.swizzled) if bm2 else packed[0],
            g.Descriptor.from_tensor(packed[0].view(tiles, -1), [rows, words], g.plain32),
            g.Descriptor.from_tensor(scale.view(tiles, -1), [rows, entries], g.plain32),
            g.Descriptor.from_tensor(zero.view(tiles, -1), [rows, zeros], g.plain16) if s.zero else packed[0],
            g.Descriptor.from_tensor(y, [bm, 64], g.swizzled),
            g.Descriptor.from_tensor(y, [bm2, 64], g.swizzled) if bm2 else packed[0],
            _Typed(parts, "fp32"), _Typed(flags, "i32"), x if bias is None else bias, packed[3], *self.numbers,
        )  # fmt: skip
        _binaries[key] = _compile(g.wide, self.programs, typed, self.constants, self.options)


# Tensor maps (128-byte descriptors of the copy engine) by address and shape; they hold no memory, only say where it is.
@functools.lru_cache(maxsize=16384)
def _map(address: int, rows: int, columns: int, *form: Any) -> tuple[Any, ...]:
    swizzle, size, dtype, *block = form
    made = _triton().fill(address, swizzle, size, dtype, block, (rows, columns), (columns, 1), 0)
    return (made, rows, columns, columns, 1)


def _form(meta: dict[str, Any]) -> tuple[Any, ...]:
    return (meta["swizzle"], meta["elem_size"], _triton().dtypes[meta["elem_type"]], *meta["block_size"])


def _weight_maps(words: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme, metas: Any) -> tuple[Any, ...]:
    """The launcher's arguments for words, scales and zero points."""
    tiles = words.shape[0]
    width = words.shape[1] * words.shape[2] * 128
    entries = scale.shape[1] * (16 if scheme.wide else 8)
    found = (
        *_map(words.data_ptr(), tiles, width, *metas[0]),
        *_map(scale.data_ptr(), tiles, entries, *metas[1]),
    )
    if scheme.zero:
        return (*found, *_map(zero.data_ptr(), tiles, zero.shape[1] * 8, *metas[2]))
    return (*found, words)


_SLOT, _SLOTS, _STREAMS = 1024, 8192, 256  # int32 flags of one launch; launches, and how many are for streams
_flags: dict[torch.device, Tensor] = {}
_streams: dict[tuple[torch.device, int], int] = {}
_captured: dict[torch.device, Iterator[int]] = {}


def flags_of(device: torch.device) -> Tensor:
    """Zeroed flags that no other launch uses at the same time; every launch leaves them zero.

    A stream has its own, since its launches follow each other; so has every captured launch, since graphs may run side by
    side. Where there are none left, or nothing is prepared at a capture, fresh ones are cleared in the graph itself.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    pool = _flags.get(device)
    if pool is None:
        if capturing:
            return torch.zeros(_SLOT, dtype=torch.int32, device=device)
        pool = _flags[device] = torch.zeros(_SLOTS, _SLOT, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # before another stream uses it
    if capturing:  # from the end, while streams count from the start
        at = _SLOTS - 1 - next(_captured.setdefault(device, itertools.count()))
    else:
        at = _streams.setdefault((device, _raw_stream(device.index)), len(_streams))
    if not (at >= _STREAMS if capturing else at < _STREAMS):
        return torch.zeros(_SLOT, dtype=torch.int32, device=device)
    return pool[at]


_plans: dict[tuple[Any, ...], Any] = {}


@functools.cache
def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _plan(spec: LinearSpec, m: int, bias: bool, device: torch.device) -> _DecodePlan | _WidePlan:
    rows = m if m > DECODE_ROWS else 4 if m <= 4 else 8 if m <= 8 else 16
    key = (id(spec), rows, bias, device)
    plan = _plans.get(key)
    if plan is None:
        scheme = scheme_of(spec)
        assert isinstance(scheme, Scheme)
        if len(_plans) > 1 << 16:
            _plans.clear()
        plan = _DecodePlan(spec, scheme, m, bias) if m <= DECODE_ROWS else _WidePlan(spec, scheme, m, bias, _sms(device))
        _plans[key] = plan
    return plan


def run(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """y [M, N]; x [M, K] contiguous."""
    perm, k = packed[4], spec.k
    if perm.numel():
        x = x.index_select(1, perm)
    if k % 64 and (x.shape[0] <= DECODE_ROWS or k % 8):
        x = torch.nn.functional.pad(x, (0, -k % 64))
    elif x.data_ptr() % 16:
        x = x.clone()
    if bias is not None and bias.data_ptr() % 16:
        bias = bias.clone()
    return _plan(spec, x.shape[0], bias is not None, x.device)(x, packed, bias)
