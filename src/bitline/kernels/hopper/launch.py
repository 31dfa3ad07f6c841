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
from bitline.kernels.hopper.tiles import Decode, Wide, decode_tile, wide_tile
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
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from bitline.kernels.hopper import decode_device, wide_device

    def shared(swizzle: int, width: int) -> Any:
        return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=width, rank=2)

    return SimpleNamespace(
        decode=decode_device.decode, wide=wide_device.wide, Descriptor=TensorDescriptor,
        swizzled=shared(128, 16), plain32=shared(0, 32), plain16=shared(0, 16),
    )  # fmt: skip


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any, programs: int, device: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Run a kernel: past its first call without Triton's inspection of arguments, which costs more than the kernel.

    No argument is specialised on its value, and every pointer is a multiple of 16, so a binary fits all calls with the
    same constants. `constants` is in the order of the kernel's parameters, `options` a part of it by name.
    """
    key = (kernel, device, constants, options.get("maxnreg", 0))
    found = _compiled.get(key)
    if found is None:
        names = kernel.arg_names[len(arguments) :]
        binary = kernel[(programs,)](*arguments, **{**dict(zip(names, constants, strict=True)), **options})
        _compiled[key] = (binary.run, binary.function, binary.packed_metadata)
        return
    run, function, metadata = found
    run(programs, 1, 1, _raw_stream(device), function, metadata, None, None, None, *arguments, *constants)


class _DecodePlan:
    """A launch for up to 8 or 16 rows."""

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

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        words, scale, zero, alpha, _ = packed
        m, k = x.shape
        n = self.spec.n
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        _launch(
            _triton().decode, self.programs, x.device.index,
            (x, words, _Pointer(scale, "fp32" if scale.dtype == torch.float32 else "i32"), _Pointer(zero, "i16"),
             x if bias is None else bias, alpha, y, m, n, k, *self.numbers),
            self.constants, self.options,
        )  # fmt: skip
        return y


class _Pointer:
    """A tensor's address under another dtype, as Triton takes it."""

    __slots__ = ("address", "dtype")

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.address, self.dtype = tensor.data_ptr(), dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class _WidePlan:
    """A launch for one number of rows above 16."""

    def __init__(self, spec: LinearSpec, scheme: Scheme, m: int, bias: bool, sms: int, tile: Wide | None = None) -> None:
        t = tile or wide_tile(m, spec.n, spec.k, sms)
        self.spec, self.scheme, self.tile = spec, scheme, t
        nt = t.nb * t.mr
        stages = -(-layout.padded(spec.n, spec.k)[1] // (64 * t.h))
        tm, tn = -(-m // t.bm), -(-spec.n // (64 * nt))
        total = tm * tn
        self.programs = p = min(t.p, total * stages)
        whole = total // p
        rest = (total - whole * p) * stages
        self.numbers = (spec.n, stages, tm, tn, p, whole, rest)
        self.scratch = p * nt * 64 * t.bm if rest else 0
        self.constants = (code_of(scheme, bias), Geometry(t.bm, t.h, t.stages, t.nb, t.mr, t.gn, t.pdl, t.sb))
        self.options = {"num_warps": 4, "launch_pdl": t.pdl}
        self.boxes = (nt * 4, 128 * scheme.width // 4, (16 if scheme.wide else 8) * scheme.fine, 8 * scheme.fine)
        self.columns = -(-spec.n // 8) * 8

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        words, _, _, alpha, _ = packed
        n = self.columns
        y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
        wd, sd, zd = _described(packed, self.scheme, self.boxes)
        device = x.device.index
        parts, flags = words, words
        if self.scratch:
            parts = torch.empty(self.scratch, dtype=torch.float32, device=x.device)
            flags = flags_of(x.device)
        _launch(
            _triton().wide, self.programs, device,
            (_rows(x, self.tile.bm), wd, sd, zd, _rows(y, self.tile.bm), _Pointer(parts, "fp32"), _Pointer(flags, "i32"),
             x if bias is None else bias, alpha, *self.numbers),
            self.constants, self.options,
        )  # fmt: skip
        return y if n == self.spec.n else y[:, : self.spec.n].contiguous()


def _descriptor(base: Any, shape: list[int], block: list[int], shared: Any) -> Any:
    """A TensorDescriptor without its constructor's checks, which take longer than a small kernel."""
    d = object.__new__(_triton().Descriptor)
    d.base, d.shape, d.strides, d.block_shape, d.layout, d.padding = base, shape, [shape[1], 1], block, shared, "zero"
    return d


def _rows(x: Tensor, rows: int) -> Any:
    return _descriptor(x, list(x.shape), [rows, 64], _triton().swizzled)


_descriptors: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}


def _described(packed: Sequence[Tensor], scheme: Scheme, boxes: tuple[int, int, int, int]) -> tuple[Any, Any, Any]:
    """Descriptors of words, scales and zero points, made once: they hold addresses, no tensors."""
    words, scale, zero = packed[0], packed[1], packed[2]
    key = (words.data_ptr(), scale.data_ptr(), words.shape, scheme, boxes)
    found = _descriptors.get(key)
    if found is None:
        if len(_descriptors) > 1 << 16:
            _descriptors.clear()
        g, tiles, rows = _triton(), words.shape[0], boxes[0]
        wd = _descriptor(_Pointer(words, "i32"), [tiles, words[0].numel()], [rows, boxes[1]], g.plain32)
        entries = scale[0].numel() if scheme.wide else scale[0].numel() // 2
        sd = _descriptor(_Pointer(scale, "fp32" if scheme.wide else "i32"), [tiles, entries], [rows, boxes[2]], g.plain32)
        zd: Any = _Pointer(words, "i32")
        if scheme.zero:
            zd = _descriptor(_Pointer(zero, "i16"), [tiles, zero[0].numel() // 2], [rows, boxes[3]], g.plain16)
        found = _descriptors[key] = (wd, sd, zd)
    return found


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
    rows = 8 if m <= 8 else 16 if m <= DECODE_ROWS else m
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
