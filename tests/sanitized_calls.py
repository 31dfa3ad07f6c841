"""Every exported function of the native core over awkward sizes, in memory of exactly the size that is needed.

    python tests/sanitized_calls.py {after | before | heap} [LEVEL…]

Run by test_native_sanitizers.py in a process of its own, which a touch outside of a tensor ends. after, before: each tensor lies
against a page that cannot be touched. heap: where the allocator puts it, for a core and an allocator that are watched, which
do not see what vectors load and store under a mask. Ends with an error where a function was not called.
"""

import collections
import ctypes
import math
import mmap
import random
import sys

import torch

from bitline import bitstream, memory, native, types
from bitline.formats.common import packed_int32
from bitline.formats.gguf.block_codes import BitPlanes
from bitline.formats.gguf.blocks import BLOCKS
from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.kernels.cpu.native_cpu import OP
from bitline.kernels.cpu.native_cpu import CPUWNA16LinearKernel as Kernel
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel
from bitline.testing import check
from bitline.testing.conformance import default_specs
from bitline.testing.generators import inputs, random_spec, random_weight
from bitline.types import ActSpec, LinearSpec

ROWS = (0, 1, 2, 3, 7, 17, 65)
SIZES = (1, 2, 3, 7, 8, 15, 17, 31, 33, 63, 65, 127, 130, 257)
CALLS: collections.Counter[str] = collections.Counter()


def watch(core: native.Core) -> None:
    """Count the calls of each function."""
    for name in native.SIGNATURES:
        short = name.removeprefix("bitline_")
        function = getattr(core, short)

        def counted(*arguments, short=short, function=function):
            CALLS[short] += 1
            return function(*arguments)

        setattr(core, short, counted)


PLACE = "heap"
LIBC = ctypes.CDLL(None, use_errno=True)
EMPTY = torch.empty


def empty(*shape, dtype=torch.float32, device=None) -> torch.Tensor:
    """torch.empty, at the end or at the beginning of its pages, with a page after or before it that cannot be touched."""
    if PLACE == "heap" or device is not None:
        return EMPTY(*shape, dtype=dtype, device=device)
    size = torch.Size(shape[0] if shape and not isinstance(shape[0], int) else shape)
    count, page = size.numel() * dtype.itemsize, mmap.PAGESIZE
    if count == 0:
        return EMPTY(size, dtype=dtype)
    whole = -(-count // page) * page
    memory = mmap.mmap(-1, whole + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    if LIBC.mprotect(ctypes.c_void_p(at + whole if PLACE == "after" else at), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    offset = whole - count if PLACE == "after" else page
    return torch.frombuffer(memory, dtype=dtype, offset=offset, count=size.numel()).view(size)


def placed(x: torch.Tensor) -> torch.Tensor:
    """A copy in such memory."""
    return empty(x.shape, dtype=x.dtype).copy_(x)


def random_bytes(*shape: int) -> torch.Tensor:
    return placed(torch.randint(256, shape, dtype=torch.uint8))


def random_words(rows: int, columns: int, extra: int) -> torch.Tensor:
    """Rows that lie apart; the last one ends where the memory ends, or the first one begins where it begins."""
    wide = placed(torch.randint(-(2**31), 2**31 - 1, (rows, columns + extra), dtype=torch.int32))
    return apart(wide, extra)


def apart(wide: torch.Tensor, extra: int) -> torch.Tensor:
    return wide[:, : wide.shape[1] - extra] if PLACE == "before" else wide[:, extra:]


def repacking(r: random.Random) -> None:
    for rows in SIZES:
        for columns in r.sample(SIZES, 4):
            extra = r.randrange(4)
            words = random_words(rows, columns, extra)
            packed_int32.repack_gptq(words)
            packed_int32.repack_awq(words, 8 * columns)
            for width in (1, 2, 4, 8):
                packed_int32.repack_gptq_permuted(words, width, placed(torch.randperm(rows * 32 // width).int()))
            for width in range(1, 8):
                if columns * 32 % width == 0:
                    n = columns * 32 // width
                    for minus_one in (False, True):
                        packed_int32.unpack_zero_points(words, width, n, minus_one=minus_one)
                        if n % 8 == 0:
                            packed_int32.unpack_zero_points(words, width, n, minus_one=minus_one, interleaved=True)
                stream = apart(random_bytes(rows, bitstream.row_bytes(columns, width) + extra), extra)
                codes = bitstream.unpack(stream, width, columns)
                assert int(codes.max()) < 1 << width
                assert torch.equal(bitstream.unpack(bitstream.pack(codes, width), width, columns), codes)
                bitstream.take(stream, width, columns, placed(torch.randint(columns, (r.choice(SIZES),))))
            bitstream.take(random_bytes(rows, columns), 8, columns, placed(torch.randint(columns, (5,))))
            for dtype in (torch.uint8, torch.bfloat16, torch.float32):
                native.transposed(apart(placed(torch.zeros(rows, columns + extra, dtype=dtype)), extra))
    for n in (0, *SIZES, 4097, (1 << 18) + 3):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            assert native.all_finite(placed(torch.zeros(n).to(dtype)))


def gguf(r: random.Random) -> None:
    for kind in (kind for kind in BLOCKS.values() if isinstance(kind.codes, BitPlanes)):
        size = next(found for name, found in BLOCK_SIZES.items() if BLOCKS.get(name) is kind)[1]
        for rows in r.sample(SIZES, 3):
            count = r.choice((1, 2, 3, 5))
            blocks = random_bytes(rows, count * size).view(rows, count, size)
            k = count * kind.codes.size
            out = empty(rows, bitstream.row_bytes(k, kind.codes.bits), dtype=torch.uint8)
            assert kind.codes.repack_native(blocks, out) and torch.equal(out, kind.codes(blocks))


INT4 = (types.uint4b8, types.uint4, types.uint3b4, types.uint2, types.uint8b128, types.uint8, types.int4, types.int8,
        types.float4_e2m1, types.uint5b16)  # fmt: skip


def torchs_int4(r: random.Random) -> None:
    for kind in INT4:
        for n in r.sample(SIZES, 4):
            for group in (16, 32, 64, 128, 256):
                zero = r.choice(("int", "float")) if kind in (types.uint4, types.uint2, types.uint8) else "none"
                spec = LinearSpec(n, group * r.randrange(1, 4), kind, (1, group), zero=zero,
                                  scale_dtype=r.choice((torch.float16, torch.bfloat16, torch.float32)))  # fmt: skip
                if TorchInt4PackLinearKernel.can_implement(spec):
                    TorchInt4PackLinearKernel.pack(random_weight(spec, n))


ACTS = (None, ActSpec(types.int8), ActSpec(types.int8, symmetric=False), ActSpec(types.int8, True, "tensor"),
        ActSpec(types.int8, False, "tensor", 0, False), ActSpec(types.float8_e4m3fn))  # fmt: skip


def linear_specs(r: random.Random) -> list[LinearSpec]:
    """Every type with every kind of zero, in every input dtype, at sizes that are multiples of nothing."""
    specs = []
    for kind in types.SCALAR_TYPES.values():
        plain = kind.kind == "int" and not kind.signed and not kind.bias
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for zero in ("none", "int", "float") if plain else ("none",):
                n, k = r.choice(SIZES), r.choice(SIZES)
                group = r.choice((1, 7, 16, 32, 100, k))
                specs.append(LinearSpec(
                    n, k, kind, (1, group), scale_dtype=r.choice((torch.float32, torch.float16, torch.bfloat16)), zero=zero,
                    act_order=k > 1 and r.random() < 0.25, bias=r.random() < 0.5, act_dtype=dtype, act=r.choice(ACTS),
                ))  # fmt: skip
    return specs + default_specs()[:25] + [random_spec(seed) for seed in range(500, 560)]


def linear(r: random.Random) -> None:
    for spec in linear_specs(r):
        weight = random_weight(spec, 1)
        packed = [placed(t) for t in Kernel.pack(weight).values()]
        bias = None if weight.bias is None else placed(weight.bias.to(spec.act_dtype))
        for m in (*ROWS, 130) if r.random() < 0.2 else ROWS:
            x = placed(inputs(m, spec, m))
            y = Kernel.apply(x, packed, bias, spec)
            assert y.shape == (m, spec.n)
            if m in (1, 17):
                check(y, x, weight)
            if len(packed) == 1:
                same = gemm(x, packed[0], bias, spec.n)
                assert torch.equal(same, y) or bool(y.isnan().any())
        if len(packed) == 1:
            strided = apart(placed(torch.zeros(4, spec.k + 3, dtype=spec.act_dtype)), 3)
            assert OP(strided, packed[0], bias, spec.n).shape == (4, spec.n)
    spec = LinearSpec(65, 130, types.float8_e4m3fn, (1, 16))
    weight = placed(Kernel.pack(random_weight(spec, 1))["weight"])
    for m in (515, 1030):  # panels, and more rows than one pass takes
        gemm(placed(inputs(m, spec)), weight, None, 65)


def rows_of_one(r: random.Random) -> None:
    """Several weights for one row, whatever each of them is."""
    k = 130
    for kinds in ((types.uint4b8, types.uint4), (types.int8, types.float8_e4m3fn, types.uint2), (types.uint3b4, types.uint4b8)):
        specs = []
        for n, kind in zip((1, 33, 95), kinds, strict=False):
            act = r.choice((None, ActSpec(types.int8)))
            specs.append(LinearSpec(n, k, kind, (1, r.choice((16, 32, k))), bias=r.random() < 0.5, act=act))
        weights = [random_weight(spec, 2) for spec in specs]
        packed = [placed(Kernel.pack(w)["weight"]) for w in weights]
        biases = [None if w.bias is None else placed(w.bias.to(torch.bfloat16)) for w in weights]
        x = placed(inputs(1, specs[0], 3).bfloat16())
        y = empty(sum(spec.n for spec in specs), dtype=torch.bfloat16)
        at = [p if p is None else p.data_ptr() for pair in zip(packed, biases, strict=True) for p in pair] + [None, None]
        assert native.core().gemm_row(x.data_ptr(), k, *at[:6], y.data_ptr(), 2) == 0
        apart = [OP(x, p, b, spec.n)[0] for p, b, spec in zip(packed, biases, specs, strict=True)]
        assert torch.equal(y, torch.cat(apart))
        assert native.core().gemm_row(x.data_ptr(), k - 1, *at[:6], y.data_ptr(), 2) == -4


def steps(r: random.Random) -> None:
    """What lies between linear layers."""
    core = native.core()
    numbers = lambda *shape: placed(torch.randn(shape).bfloat16())
    room = lambda *shape: empty(*shape, dtype=torch.bfloat16)
    for n in SIZES:
        x, weight, y = numbers(3, n), numbers(n), room(3, n)
        core.step_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), 3, n, 1e-6)
        core.step_gate(x.data_ptr(), weight.data_ptr(), y.data_ptr(), n)
        k = r.choice(SIZES)
        w, x, y = numbers(n, k), numbers(k), room(n)
        assert core.step_rows(x.data_ptr(), w.data_ptr(), y.data_ptr(), n, k) == 0
        heads, repeat, dim = r.randrange(1, 4), r.randrange(1, 5), r.choice((16, 48, 80, 128))
        qkv, cos, sin = numbers((repeat + 2) * heads, dim), numbers(dim), numbers(dim)
        keys, values, y = numbers(heads, n, dim), numbers(heads, n, dim), room(heads * repeat, dim)
        at = [t.data_ptr() for t in (qkv, cos, sin, keys, values, y)]
        assert core.step_attention(*at, heads, repeat, dim, n, n - 1, dim**-0.5) == 0
        assert bool(y.isfinite().all())


def layers(r: random.Random) -> None:
    """A whole layer of a decoder."""
    for hidden, heads, repeat, dim, inner, normed in ((33, 1, 1, 16, 7, False), (130, 2, 3, 48, 95, True)):
        numbers = lambda *shape: placed(torch.randn(shape).bfloat16())
        every, one = heads * repeat * dim, heads * dim
        sizes = (
            (every, hidden),
            (one, hidden),
            (one, hidden),
            (hidden, every),
            (inner, hidden),
            (inner, hidden),
            (hidden, inner),
        )
        x, y = numbers(hidden), empty(hidden, dtype=torch.bfloat16)
        place = r.choice((1, 2, 130))
        tensors = [x, y, numbers(hidden), numbers(hidden), *((numbers(dim), numbers(dim)) if normed else (None, None)),
                   numbers(dim), numbers(dim), numbers(heads, place, dim), numbers(heads, place, dim)]  # fmt: skip
        for n, k in sizes:
            kind = r.choice((types.uint4b8, types.int8, types.uint4))
            weight = random_weight(LinearSpec(n, k, kind, (1, k), bias=r.random() < 0.5), n)
            tensors += placed(Kernel.pack(weight)["weight"]), None if weight.bias is None else placed(weight.bias.bfloat16())
        numbers_at = [0 if t is None else t.data_ptr() for t in tensors]
        for dims in ((hidden, heads, repeat, dim, place, place - 1, inner), (hidden, heads, repeat, dim, place, 0, inner + 1)):
            line = (ctypes.c_int64 * 31)(*numbers_at, *dims)
            assert native.core().step_layer(ctypes.addressof(line), 0.2, 1e-6, 1e-6, 1e-6) == (0 if dims[-1] == inner else -4)


def gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
    """The C function itself, into memory like its arguments'."""
    core = native.core()
    y = empty(x.shape[0], n, dtype=x.dtype).fill_(math.nan)
    code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[x.dtype]
    at = 0 if bias is None else bias.data_ptr()
    assert x.shape[0] == 0 or core.gemm(x.data_ptr(), x.shape[0], weight.data_ptr(), at, y.data_ptr(), code) == 0
    return y


def main() -> None:
    global PLACE
    PLACE = sys.argv[1]
    torch.manual_seed(0)
    core = native.core()
    assert core is not None, native.why_not()
    watch(core)
    core.abi(), core.init(core.torch_library), core.threads(), core.empty_regions(3, 5), core.isa_highest()
    for size in (1, 5000, (4 << 20) + 17, (9 << 20) + 4095):
        whole = empty(size, dtype=torch.uint8)
        core.prepare(whole.data_ptr(), size)
        whole.fill_(1)
    torch.empty = empty
    memory.passing = memory.empty = empty
    for level in sys.argv[2:] or native.isas():
        native.use_isa(level)
        assert native.isa() == level
        r = random.Random(level)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            repacking(r)
            gguf(r)
            torchs_int4(r)
            steps(r)
            if level != "portable":
                linear(r)
                rows_of_one(r)
                layers(r)
    core.bind(core.torch_library)
    missing = {name.removeprefix("bitline_") for name in native.SIGNATURES} - set(CALLS)
    assert not missing or sys.argv[2:], f"never called: {missing}"
    print("calls:", sum(CALLS.values()))


if __name__ == "__main__":
    main()
