"""Host side of the Hopper kernels: what a call needs is worked out once for a layer and a range of rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.kernels.hopper import layout, ptx
from bitline.kernels.hopper.heuristics import (
    FLAGS,
    Decode,
    Wide,
    decode_tile,
    few_tile,
    shares,
    wide_tile,
)
from bitline.kernels.hopper.scheme import Scheme, scheme_of
from bitline.types import LinearSpec

DECODE_ROWS, RING_ROWS = 16, 32  # that always, and that may take the kernels for few rows


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
    folded: bool
    duplicate: tuple[str, str]
    fragment: tuple[str, str]
    unit: tuple[str, str] = ("", "")
    words: tuple[str, str] = ("", "")
    x: tuple[str, str] = ("", "")
    copy: tuple[str, str] = ("", "")
    few: tuple[str, str] = ("", "")
    piece: tuple[str, str] = ("", "")


class Lanes(NamedTuple):
    """The compile-time part of `tiles.Decode`, and what of the shape matters: mt, 8-row tiles of x; even: no remainders.

    wait, sync: the instructions that wait for a step's copies, and for the warps of a share of K.
    """

    r: int
    c: int
    mt: int
    blocks: int
    even: bool
    pdl: bool = True
    depth: int = 0
    groups: int = 1
    ring_x: bool = False
    swap: bool = False
    early: bool = False
    cut: int = 1
    wait: str = ""
    sync: str = ""


class Geometry(NamedTuple):
    """The compile-time part of `tiles.Wide`."""

    bm: int
    h: int
    stages: int
    nb: int
    mr: int
    gn: int
    pdl: bool
    bm2: int
    registers: int
    left: int
    turns: bool
    split: int


@functools.lru_cache(maxsize=4096)
def code_of(scheme: Scheme, bias: bool, mt: int = 0, x: str = "") -> Code:
    """The device code of a scheme for 8*mt rows, or for more than 16 with mt = 0.

    x: "" for words in registers, or "swap" with the halves of x swapped in every other row; else words in a ring, with x from
    the cache ("even", or "odd" where K is no multiple of the columns of a unit) or from the ring as well ("ring").
    """
    s, blocks = scheme, scheme.blocks
    if mt == 0:
        pairs = ptx.scaled(s.format, s.wide) if s.unit else ptx.duplicate(s.half, s.wide)
        alpha, decode = s.alpha or s.unit > 0, ptx.fragment(s.format, s.half)
        return Code(s.format, s.half, s.wide, s.fine, s.per, s.zero, s.width // 4, bias, alpha, s.unit > 0, pairs, decode)
    common = (s.zero, s.width // 4, bias, s.alpha, False, ptx.duplicate(s.half, s.wide))
    per = 1 if s.fine > 1 else s.per // blocks
    if x in ("even", "odd", "ring"):
        loads = {"even": ptx.load_x(blocks), "odd": ptx.load_x_masked(blocks), "ring": ptx.ring_x(blocks, mt)}[x]
        unit = ptx.mma_unit(s.format, s.half, blocks, mt, s.fine > 1, True)
        return Code(
            s.format, s.half, s.wide, s.fine, per, *common, ("", ""), unit, ("", ""), loads,
            ptx.copy_words(blocks, s.width // 4), ptx.copy_few(), ptx.copy_piece(),
        )  # fmt: skip
    return Code(
        s.format, s.half, s.wide, s.fine, per, *common, ("", ""), ptx.mma_unit(s.format, s.half, blocks, mt, s.fine > 1),
        ptx.load_words(blocks * s.width // 4), ptx.swap_x(blocks) if x else ptx.load_x(blocks),
    )  # fmt: skip


@functools.cache
def _triton() -> Any:
    """The device code and what launching takes."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    from bitline.kernels.hopper.device import gemv_mma, small_m_pipelined, wgmma_persistent

    def shared(swizzle: int, width: int) -> Any:
        return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=width, rank=2)

    utils = driver.active.utils
    return SimpleNamespace(
        decode=gemv_mma.decode, ring=small_m_pipelined.ring, wide=wgmma_persistent.wide, Descriptor=TensorDescriptor,
        swizzled=shared(128, 16), plain32=shared(0, 32), plain16=shared(0, 16),
        fill=getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor,  # since 3.7, and before
        dtypes=TMA_DTYPE_DEVICE_TO_HOST,
    )  # fmt: skip


@functools.cache
def prepare() -> None:
    """Do what Triton does once in a process: its import, and hashing itself and the device code, 0.4 s in all.

    A layer that is packed for this kernel calls it, or the layer's first call would.
    """
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    kernels = _triton()
    triton_key()  # a hash of its library, 400 MB
    make_backend(driver.active.get_current_target()).hash()  # asks ptxas for its version
    for kernel in (kernels.decode, kernels.ring, kernels.wide):
        kernel.cache_key  # noqa: B018  # of the functions that it calls


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def _new() -> Any:
    """What allocates y: (shape, strides, dtype) to a tensor of the current GPU without torch's dispatcher, 1 us less a call;
    None where there are several."""
    return getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if torch.cuda.device_count() == 1 else None


class _Typed:
    """An address under a dtype, as Triton's compiler takes it."""

    __slots__ = ("address", "dtype")

    def __init__(self, tensor: Tensor | int, dtype: str) -> None:
        self.address, self.dtype = tensor if isinstance(tensor, int) else tensor.data_ptr(), dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class _Binary(NamedTuple):
    """A compiled kernel: Triton's C launcher, the arguments that it takes between the stream and the kernel's own, whether those
    are one tuple, of each tensor map the swizzle, element size, type and box, and the maps of the weights that were seen, which
    all numbers of rows share."""

    launch: Any
    head: tuple[Any, ...]
    grouped: bool
    maps: tuple[tuple[Any, ...], ...]
    weights: dict[tuple[int, ...], tuple[Any, ...]]

    def __call__(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        """Launch."""
        if self.grouped:
            self.launch(programs, 1, 1, stream, *self.head, arguments)
        else:
            self.launch(programs, 1, 1, stream, *self.head, *arguments)


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
    first, metadata, none = (binary.function, run.launch_cooperative_grid, run.launch_pdl), binary.packed_metadata, (None, None)
    grouped = hasattr(run, "kernel_signature")  # since Triton 3.7 one launcher serves all kernels
    head: tuple[Any, ...]
    if grouped:
        head = (*first, metadata, None, *none, *none, run.arg_annotations, run.kernel_signature)
    else:
        head = (*first, *none, metadata, None, *none)
    return _Binary(launch, head, grouped, tuple(map(_form, getattr(binary.metadata, "tensordesc_meta", None) or ())), {})


class _DecodePlan:
    """A launch for up to 4, 8 or 16 rows, or one number of up to 32."""

    def __init__(self, spec: LinearSpec, scheme: Scheme, m: int, bias: bool, tile: Decode | None = None) -> None:
        self.spec = spec  # kept alive, so that its identity stays its own
        mt = -(-m // 8)
        tiles, columns = layout.padded(spec.n, spec.k)
        tile = tile or decode_tile(m, tiles, columns // 64, scheme, spec.k % 128 == 0)
        self.tile = tile
        self.pads = tile.depth == 0  # x to whole blocks; the ring takes rows of any multiple of 16 bytes
        if tile.depth and scheme.per == 2:
            scheme = dataclasses.replace(scheme, blocks=2)  # the second of the last may be missing
        units = -(-columns // (64 * scheme.blocks))
        step = tile.warps // tile.groups * tile.c * tile.cut
        steps = -(-units // step)
        even = units == steps * step
        lanes = Lanes(tile.r, tile.c, mt, scheme.blocks, even and tiles % tile.r == 0, swap=tile.swap)
        code = code_of(scheme, bias, mt, "swap" if tile.swap else "")
        if tile.depth:
            even = even and spec.k % (64 * scheme.blocks) == 0
            lanes = Lanes(
                tile.r, tile.c, mt, scheme.blocks, even, depth=tile.depth, groups=tile.groups, ring_x=tile.ring_x,
                early=tile.early, cut=tile.cut, wait=f"cp.async.wait_group {tile.depth - 2}; // $0",
                sync=f"bar.sync $1, {32 * tile.groups}; // $0",
            )  # fmt: skip
            code = code_of(scheme, bias, mt, "ring" if tile.ring_x else "even" if even else "odd")
        self.constants = (code, lanes, tile.warps)
        self.options = {"num_warps": tile.warps, "launch_pdl": True, **({"maxnreg": tile.registers} if tile.registers else {})}
        self.programs = -(-tiles // (tile.r * tile.groups)) * tile.cut
        self.scratch = self.programs * tile.r * tile.groups * 128 * mt if tile.cut > 1 else 0
        self.numbers = (columns // 64 if tile.depth else units, tiles, scheme.groups, steps)
        self.tail = (*self.numbers, *self.constants)
        self.space = (0, 0) if tile.depth else ()  # of a launch that adds nothing up with others
        self.new = _new()
        self.binary: _Binary | None = None

    def known(self, device: int) -> _Binary | None:
        """The binary, where it has been compiled."""
        if self.binary is None:
            self.binary = _binaries.get((self.constants, self.options.get("maxnreg"), device))
        return self.binary

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        words, scale, zero, alpha, _ = packed
        m, k = x.shape
        n = self.spec.n
        y = self.new((m, n), (n, 1), x.dtype) if self.new else x.new_empty((m, n))
        stream = _raw_stream(x.get_device())
        space: tuple[Any, ...] = _workspace(x, self.scratch, stream) if self.scratch else self.space
        binary = self.binary or self.known(x.get_device())
        if binary is None:
            typed = (
                x, words, _Typed(scale, "fp32" if scale.dtype == torch.float32 else "i32"), _Typed(zero, "i16"),
                x if bias is None else bias, alpha, y,
                *(_Typed(*part) for part in zip(space, ("fp32", "i32"), strict=False)), m, n, k, *self.numbers,
            )  # fmt: skip
            kernel = _triton().ring if self.constants[1].depth else _triton().decode
            key = (self.constants, self.options.get("maxnreg"), x.get_device())
            _binaries[key] = _compile(kernel, self.programs, typed, self.constants, self.options)
            return y
        # Addresses: of a tensor the launcher would ask the driver what kind of memory it is, each time.
        arguments = (
            x.data_ptr(), words.data_ptr(), scale.data_ptr(), zero.data_ptr(), 0 if bias is None else bias.data_ptr(),
            alpha.data_ptr(), y.data_ptr(), *space, m, n, k, *self.tail,
        )  # fmt: skip
        binary(self.programs, stream, arguments)
        return y

    def input_maps(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for x."""
        return (address,)

    def output_maps(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for y."""
        return (address,)


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
        self.key = (spec.n, spec.k)
        split = 0
        if t.halves and rest and p * stages % rest == 0:
            split = 4 if p * stages // rest % 4 == 0 else 2
        self.kept = (t.bm // max(split, 1), t.bm2 // max(split, 1))  # rows of x that are written at a time
        first, registers, left = t.registers
        geometry = Geometry(t.bm, t.h, t.stages, t.nb, t.mr, t.gn, t.pdl, t.bm2, registers, left, t.turns, split)
        self.constants = (code_of(scheme, bias), geometry)
        self.options = {"num_warps": 4, "launch_pdl": t.pdl, **({"maxnreg": first} if first else {})}
        self.boxes = (nt * 4, 128 * scheme.width // 4, (16 if scheme.wide else 8) * scheme.fine, 8 * scheme.fine)
        self.shape = (m, -(-spec.n // 8) * 8)
        self.columns = -(-spec.k // 64) * 64 if spec.k % 8 else spec.k  # of x
        self.two = t.bm2 > 0
        self.forms: tuple[tuple[Any, ...], ...] = ()
        self.strides = (self.shape[1], 1)
        self.tail = (*self.numbers, *self.constants)
        self.inputs: dict[int, tuple[Any, ...]] = {}
        self.outputs: dict[int, tuple[Any, ...]] = {}
        self.new = _new()
        self.pads = False
        self.binary: _Binary | None = None

    def known(self, device: int) -> _Binary | None:
        """The binary, where it has been compiled."""
        if self.binary is None:
            self.binary = _binaries.get((self.constants, device))
            self.forms = self.binary.maps if self.binary else ()
        return self.binary

    def __call__(self, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        words, scale, zero, alpha, _ = packed
        y = self.new(self.shape, self.strides, x.dtype) if self.new else x.new_empty(self.shape)
        stream = _raw_stream(x.get_device())
        parts, flags = _workspace(x, self.scratch, stream) if self.scratch else (0, 0)
        binary = self.binary or self.known(x.get_device())
        if binary is None:
            self._compile((self.constants, x.get_device()), x, packed, bias, y, parts, flags)
            return y if self.shape[1] == self.spec.n else y[:, : self.spec.n].contiguous()
        maps = (*self.input_maps(x.data_ptr()), *self.weight_maps(words, scale, zero), *self.output_maps(y.data_ptr()))
        pointers = (parts, flags, 0 if bias is None else bias.data_ptr(), alpha.data_ptr())
        binary(self.programs, stream, (*maps, *pointers, *self.tail))
        return y if self.shape[1] == self.spec.n else y[:, : self.spec.n].contiguous()

    # A call finds the maps of a layer, an input and an output that it has seen by their addresses, which say all there is
    # to say beside the plan; they are made of those alone, and hold no memory.

    def input_maps(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for x."""
        found = self.inputs.get(address)
        if found is None:
            found = _remember(self.inputs, address, self._maps(address, self.columns, self.forms[: 1 + self.two]))
        return found

    def output_maps(self, address: int) -> tuple[Any, ...]:
        """The launcher's arguments for y."""
        found = self.outputs.get(address)
        if found is None:
            found = _remember(self.outputs, address, self._maps(address, self.shape[1], self.forms[-1 - self.two :]))
        return found

    def weight_maps(self, words: Tensor, scale: Tensor, zero: Tensor) -> tuple[Any, ...]:
        """The launcher's arguments for words, scales and zero points."""
        assert self.binary is not None
        known, at = self.binary.weights, (words.data_ptr(), scale.data_ptr(), zero.data_ptr(), *self.key)
        return known.get(at) or _remember(known, at, self._weight_maps(words, scale, zero, self.forms[1 + self.two :]))

    def _weight_maps(self, words: Tensor, scale: Tensor, zero: Tensor, forms: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        s, tiles = self.scheme, words.shape[0]
        found = (
            *_map(words.data_ptr(), tiles, words.shape[1] * words.shape[2] * 128, forms[0]),
            *_map(scale.data_ptr(), tiles, scale.shape[1] * (16 if s.wide else 8), forms[1]),
        )
        return (*found, *(_map(zero.data_ptr(), tiles, zero.shape[1] * 8, forms[2]) if s.zero else (0,)))

    def _maps(self, address: int, columns: int, forms: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """One map, or two where a tile is two products."""
        m = self.shape[0]
        return (*_map(address, m, columns, forms[0]), *(_map(address, m, columns, forms[1]) if self.two else (0,)))

    def _compile(
        self, key: Any, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, y: Tensor, parts: Any, flags: Any
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
            g.Descriptor.from_tensor(y, [self.kept[0], 64], g.swizzled),
            g.Descriptor.from_tensor(y, [self.kept[1], 64], g.swizzled) if bm2 else packed[0],
            _Typed(parts, "fp32"), _Typed(flags, "i32"), x if bias is None else bias, packed[3], *self.numbers,
        )  # fmt: skip
        _binaries[key] = _compile(g.wide, self.programs, typed, self.constants, self.options)


def _map(address: int, rows: int, columns: int, form: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tensor map (a 128-byte descriptor of the copy engine) and what the launcher takes with it."""
    swizzle, size, dtype, *block = form
    made = _triton().fill(address, swizzle, size, dtype, block, (rows, columns), (columns, 1), 0)
    return (made, rows, columns, columns, 1)


def _remember(known: dict[Any, tuple[Any, ...]], key: Any, value: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(known) >= 4096:
        known.clear()
    known[key] = value
    return value


def _form(meta: dict[str, Any]) -> tuple[Any, ...]:
    return (meta["swizzle"], meta["elem_size"], _triton().dtypes[meta["elem_type"]], *meta["block_size"])


_SLOT, _SLOTS = FLAGS, 8192  # int32 flags of one launch; captured launches that share the pool
_spaces: dict[tuple[int, int], tuple[int, int, int, tuple[Tensor, Tensor]]] = {}
_pools: dict[int, tuple[Tensor, Iterator[int]]] = {}


def _workspace(x: Tensor, size: int, stream: int) -> tuple[Any, Any]:
    """`size` float32 for parts of cut tiles, and zeroed flags, as addresses or tensors, that no other launch uses meanwhile.

    Every launch leaves its flags zero. A stream has its own, since its launches follow each other; so has every captured
    launch, since graphs may run side by side: flags from a pool, made before the capture, or where there are none left or
    nothing was made, fresh ones, which are cleared in the graph itself.
    """
    index = x.get_device()
    if not _capturing():
        space = _spaces.get((index, stream))
        if space is None or space[0] < size:
            parts, flags = x.new_empty(size, dtype=torch.float32), x.new_zeros(_SLOT, dtype=torch.int32)
            space = _spaces[index, stream] = (size, parts.data_ptr(), flags.data_ptr(), (parts, flags))
        if index not in _pools:
            _pools[index] = (x.new_zeros(_SLOTS, _SLOT, dtype=torch.int32), itertools.count())
            torch.cuda.current_stream(index).synchronize()  # before another stream uses it
        return space[1], space[2]
    parts = x.new_empty(size, dtype=torch.float32)
    pool = _pools.get(index)
    at = next(pool[1]) if pool else _SLOTS
    return parts, pool[0][at] if pool and at < _SLOTS else x.new_zeros(_SLOT, dtype=torch.int32)


_plans: dict[tuple[int, int, bool, int], Any] = {}


@functools.cache
def _sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def plan_of(spec: LinearSpec, m: int, bias: bool, index: int) -> _DecodePlan | _WidePlan:
    """The plan of a layer's calls with m rows on a GPU. `spec` is told by its identity."""
    key = (id(spec), m if m > DECODE_ROWS else 4 if m <= 4 else 8 if m <= 8 else 16, bias, index)
    plan: _DecodePlan | _WidePlan | None = _plans.get(key)
    if plan is None:
        scheme = scheme_of(spec)
        assert isinstance(scheme, Scheme)
        if len(_plans) > 1 << 16:
            _plans.clear()
        tile = few_tile(m, layout.padded(spec.n, spec.k)[0], spec.n, spec.k, scheme) if DECODE_ROWS < m <= RING_ROWS else None
        few = m <= DECODE_ROWS or tile
        plan = _plans[key] = _DecodePlan(spec, scheme, m, bias, tile) if few else _WidePlan(spec, scheme, m, bias, _sms(index))
    return plan


def run(x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """y [M, N]; x [M, K] contiguous. InputError where x is not on the GPU of the weight."""
    index = x.get_device()
    if index < 0 or packed[0].get_device() != index:  # the launcher takes any address
        raise InputError("the input of a layer is on another device", found=x.device, expected=packed[0].device)
    perm, k = packed[4], spec.k
    if perm.numel():
        x = x.index_select(1, perm)
    plan = plan_of(spec, x.shape[0], bias is not None, index)
    if k % 64 and (plan.pads or k % 8):
        x = torch.nn.functional.pad(x, (0, -k % 64))
    elif x.data_ptr() % 16:
        x = x.clone()
    if bias is not None and bias.data_ptr() % 16:
        bias = bias.clone()
    result: Tensor = plan(x, packed, bias)
    return result
