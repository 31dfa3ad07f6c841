"""Every exported function of the native core over odd sizes, in memory of exactly the size that is needed.

    python tests/sanitized_calls.py {after | before | heap} [LEVEL…]

Run by test_native_sanitizers.py in a process of its own, which an out-of-bounds access ends. after, before: each tensor has an
inaccessible page right after or before it. heap: tensors of the allocator, for a core built with the sanitizers, which do not see
masked loads and stores. An assertion fails where a function was never called.
"""

import collections
import ctypes
import math
import mmap
import random
import sys

import torch

from bitline import bitstream, memory, native, types
from bitline.expert_gate import ACTIVATIONS, ExpertGate
from bitline.formats.common import packed_int32
from bitline.formats.gguf.block_codes import BitPlanes
from bitline.formats.gguf.block_scales import q4_k
from bitline.formats.gguf.blocks import BLOCKS
from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.kernels.cpu.native_experts import ExpertsCall, fields_of_experts
from bitline.kernels.cpu.native_linear import OP
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.kernels.cpu.unpack_weight import unpack_in_torch
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel
from bitline.model.decoder_experts import RoutedMlp
from bitline.model.decoder_layer import CAPACITY, RANKS, ROUTED, LayerFields
from bitline.parallel.shared_memory import LINE, _View, _Waits, size_of
from bitline.testing import check
from bitline.testing.conformance import default_specs
from bitline.testing.generators import inputs, random_spec, random_weight
from bitline.types import ActSpec, LinearSpec

ROWS = (0, 1, 2, 3, 7, 17, 65)
SIZES = (1, 2, 3, 7, 8, 15, 17, 31, 33, 63, 65, 127, 130, 257)
CALLS: collections.Counter[str] = collections.Counter()


def count_calls(core: native.Core) -> None:
    """Count the calls of each function."""
    for name in native.SIGNATURES:
        short = name.removeprefix("bitline_")
        function = getattr(core, short)

        def counted(*arguments, short=short, function=function):
            CALLS[short] += 1
            return function(*arguments)

        setattr(core, short, counted)


GUARD = "heap"
LIBC = ctypes.CDLL(None, use_errno=True)
EMPTY = torch.empty


def empty(*shape, dtype=torch.float32, device=None) -> torch.Tensor:
    """torch.empty at the end or at the beginning of its pages, with an inaccessible page after or before it."""
    if GUARD == "heap" or device is not None:
        return EMPTY(*shape, dtype=dtype, device=device)
    size = torch.Size(shape[0] if shape and not isinstance(shape[0], int) else shape)
    count, page = size.numel() * dtype.itemsize, mmap.PAGESIZE
    if count == 0:
        return EMPTY(size, dtype=dtype)
    whole = -(-count // page) * page
    region = mmap.mmap(-1, whole + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    if LIBC.mprotect(ctypes.c_void_p(at + whole if GUARD == "after" else at), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    offset = whole - count if GUARD == "after" else page
    return torch.frombuffer(region, dtype=dtype, offset=offset, count=size.numel()).view(size)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy in such memory."""
    return empty(x.shape, dtype=x.dtype).copy_(x)


def random_bytes(*shape: int) -> torch.Tensor:
    return guarded(torch.randint(256, shape, dtype=torch.uint8))


def random_int32(rows: int, columns: int, extra: int) -> torch.Tensor:
    return strided(guarded(torch.randint(-(2**31), 2**31 - 1, (rows, columns + extra), dtype=torch.int32)), extra)


def strided(x: torch.Tensor, extra: int) -> torch.Tensor:
    """Rows `extra` columns apart, whose last row ends, or first row begins, at the guard page."""
    return x[:, : x.shape[1] - extra] if GUARD == "before" else x[:, extra:]


def repacking(r: random.Random) -> None:
    for rows in SIZES:
        for columns in r.sample(SIZES, 4):
            extra = r.randrange(4)
            packed = random_int32(rows, columns, extra)
            packed_int32.repack_gptq(packed)
            packed_int32.repack_awq(packed, 8 * columns)
            for bits in (1, 2, 4, 8):
                packed_int32.repack_gptq_permuted(packed, bits, guarded(torch.randperm(rows * 32 // bits).int()))
            for bits in range(1, 8):
                if columns * 32 % bits == 0:
                    n = columns * 32 // bits
                    for minus_one in (False, True):
                        packed_int32.unpack_zero_points(packed, bits, n, minus_one=minus_one)
                        if n % 8 == 0:
                            packed_int32.unpack_zero_points(packed, bits, n, minus_one=minus_one, interleaved=True)
                stream = strided(random_bytes(rows, bitstream.row_bytes(columns, bits) + extra), extra)
                codes = bitstream.unpack(stream, bits, columns)
                assert int(codes.max()) < 1 << bits
                assert torch.equal(bitstream.unpack(bitstream.pack(codes, bits), bits, columns), codes)
                bitstream.take(stream, bits, columns, guarded(torch.randint(columns, (r.choice(SIZES),))))
            bitstream.take(random_bytes(rows, columns), 8, columns, guarded(torch.randint(columns, (5,))))
            for dtype in (torch.uint8, torch.bfloat16, torch.float32):
                native.transposed(strided(guarded(torch.zeros(rows, columns + extra, dtype=dtype)), extra))
    for n in (0, *SIZES, 4097, (1 << 18) + 3):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            assert native.all_finite(guarded(torch.zeros(n).to(dtype)))


def gguf(r: random.Random) -> None:
    for kind in (kind for kind in BLOCKS.values() if isinstance(kind.codes, BitPlanes)):
        size = next(found for name, found in BLOCK_SIZES.items() if BLOCKS.get(name) is kind)[1]
        for rows in r.sample(SIZES, 3):
            count = r.choice((1, 2, 3, 5))
            blocks = random_bytes(rows, count * size).view(rows, count, size)
            k = count * kind.codes.size
            out = empty(rows, bitstream.row_bytes(k, kind.codes.bits), dtype=torch.uint8)
            assert kind.codes.repack_native(blocks, out) and torch.equal(out, kind.codes(blocks))
            if kind.scales is q4_k:
                assert q4_k(guarded(blocks))["scale"].max() < 64


INT4 = (types.uint4b8, types.uint4, types.uint3b4, types.uint2, types.uint8b128, types.uint8, types.int4, types.int8,
        types.float4_e2m1, types.uint5b16)  # fmt: skip


def int4pack(r: random.Random) -> None:
    for kind in INT4:
        for n in r.sample(SIZES, 4):
            for group in (16, 32, 64, 128, 256):
                zero = r.choice(("int", "float")) if kind in (types.uint4, types.uint2, types.uint8) else "none"
                spec = LinearSpec(n, group * r.randrange(1, 4), kind, (1, group), zero=zero,
                                  scale_dtype=r.choice((torch.float16, torch.bfloat16, torch.float32)))  # fmt: skip
                if TorchInt4PackLinearKernel.can_implement(spec):
                    TorchInt4PackLinearKernel.pack(random_weight(spec, n))


ACTS = (None, ActSpec(types.int8), ActSpec(types.int8, symmetric=False), ActSpec(types.int8, True, "tensor"),
        ActSpec(types.int8, False, "tensor", 0, False), ActSpec(types.float8_e4m3fn),
        ActSpec(types.float8_e4m3fn, granularity="group", group_size=128), ActSpec(types.int8, granularity="group", group_size=7),
        ActSpec(types.float4_e2m1, granularity="group", group_size=32, scale="e8m0"))  # fmt: skip


def linear_specs(r: random.Random) -> list[LinearSpec]:
    """Every type with every kind of zero point and every dtype of x, at odd sizes."""
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
        packed = [guarded(t) for t in Kernel.pack(weight).values()]
        bias = None if weight.bias is None else guarded(weight.bias.to(spec.act_dtype))
        for m in (*ROWS, 130) if r.random() < 0.2 else ROWS:
            x = guarded(inputs(m, spec, m))
            y = Kernel.apply(x, packed, bias, spec)
            assert y.shape == (m, spec.n)
            if m in (1, 17):
                check(y, x, weight, factor=6)  # the offsets' sums of x cancel at times; other tests hold the rule on chosen data
            if len(packed) == 1:
                same = gemm(x, packed[0], bias, spec.n)
                assert torch.equal(same, y) or bool(y.isnan().any())
        assert torch.equal(Kernel.unpack(packed, spec), unpack_in_torch(packed[0], spec.act_dtype))
        if len(packed) == 1:
            x = strided(guarded(torch.zeros(4, spec.k + 3, dtype=spec.act_dtype)), 3)
            assert OP(x, packed[0], bias, spec.n).shape == (4, spec.n)
    spec = LinearSpec(65, 130, types.float8_e4m3fn, (1, 16))
    weight = guarded(Kernel.pack(random_weight(spec, 1))["weight"])
    for m in (515, 1030):  # panels; more than one pass of 1024 rows
        gemm(guarded(inputs(m, spec)), weight, None, 65)


def fused_gemv(r: random.Random) -> None:
    """Weights of different types that share x."""
    k = 130
    for kinds in ((types.uint4b8, types.uint4), (types.int8, types.float8_e4m3fn, types.uint2), (types.uint3b4, types.uint4b8)):
        specs = []
        for n, kind in zip((1, 33, 95), kinds, strict=False):
            act = r.choice((None, ActSpec(types.int8)))
            specs.append(LinearSpec(n, k, kind, (1, r.choice((16, 32, k))), bias=r.random() < 0.5, act=act))
        weights = [random_weight(spec, 2) for spec in specs]
        packed = [guarded(Kernel.pack(w)["weight"]) for w in weights]
        biases = [None if w.bias is None else guarded(w.bias.to(torch.bfloat16)) for w in weights]
        x = guarded(inputs(1, specs[0], 3).bfloat16())
        y = empty(sum(spec.n for spec in specs), dtype=torch.bfloat16)
        at = [p if p is None else p.data_ptr() for pair in zip(packed, biases, strict=True) for p in pair] + [None, None]
        assert native.core().fused_gemv(x.data_ptr(), k, *at[:6], y.data_ptr(), 2) == 0
        separate = [OP(x, p, b, spec.n)[0] for p, b, spec in zip(packed, biases, specs, strict=True)]
        assert torch.equal(y, torch.cat(separate))
        assert native.core().fused_gemv(x.data_ptr(), k - 1, *at[:6], y.data_ptr(), 2) == -4


def experts(r: random.Random) -> None:
    """Experts of every gate, none of them for some tokens."""
    for name in ACTIVATIONS:
        gate = ExpertGate(name, gated=r.random() < 0.7, alpha=1.5, limit=r.choice((0.0, 7.0)))
        count, n, k, inner = r.choice((1, 3, 9)), r.choice(SIZES), r.choice(SIZES), r.choice(SIZES)
        kind, act = r.choice((types.uint4b8, types.uint4, types.float8_e4m3fn)), r.choice((None, ActSpec(types.int8)))
        dtype = r.choice((torch.bfloat16, torch.float16, torch.float32))
        base = LinearSpec(n, inner, kind, (1, 16), bias=r.random() < 0.5, act=act, act_dtype=dtype)
        specs = (base.replace(n=(1 + gate.gated) * inner, k=k), base)
        stacks, biases = [], []
        for spec in specs:
            weights = [random_weight(spec, e) for e in range(count)]
            packed = [Kernel.pack(weight)["weight"] for weight in weights]
            room = -(-packed[0].nbytes // 256) * 256
            stacks.append(guarded(torch.stack([torch.nn.functional.pad(p, (0, room - p.nbytes)) for p in packed])))
            biases.append(guarded(torch.stack([w.bias.to(spec.act_dtype) for w in weights])) if spec.bias else None)
        for m in ROWS[1:]:
            x, index = guarded(inputs(m, specs[0], m)), guarded(torch.randint(count + 1, (m, 3)))
            y = Kernel.apply_experts(
                x, index, guarded(torch.rand(m, 3)), stacks[:1], biases[0], stacks[1:], biases[1], *specs, gate
            )
            assert y.shape == (m, n)


def decode_ops(r: random.Random) -> None:
    """What lies between the linear layers of one token."""
    core = native.core()
    random_bf16 = lambda *shape: guarded(torch.randn(shape).bfloat16())
    empty_bf16 = lambda *shape: empty(*shape, dtype=torch.bfloat16)
    for n in SIZES:
        x, weight, y = random_bf16(3, n), random_bf16(n), empty_bf16(3, n)
        core.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), 3, n, 1e-6)
        core.silu_and_mul(x.data_ptr(), weight.data_ptr(), y.data_ptr(), n)
        k = r.choice(SIZES)
        w, x, y = random_bf16(n, k), random_bf16(k), empty_bf16(n)
        assert core.gemv_bf16(x.data_ptr(), w.data_ptr(), y.data_ptr(), n, k) == 0
        kv_heads, q_per_kv, dim = r.randrange(1, 4), r.randrange(1, 5), r.choice((16, 48, 80, 128))
        qkv, cos, sin = random_bf16((q_per_kv + 2) * kv_heads, dim), random_bf16(dim), random_bf16(dim)
        keys, values, y = random_bf16(kv_heads, n, dim), random_bf16(kv_heads, n, dim), empty_bf16(kv_heads * q_per_kv, dim)
        at = [t.data_ptr() for t in (qkv, cos, sin, keys, values, y)]
        assert core.decode_attention(*at, kv_heads, q_per_kv, dim, n, n - 1, dim**-0.5) == 0
        assert bool(y.isfinite().all())


def decode_layers(r: random.Random) -> None:
    """A whole decoder layer."""
    for hidden, kv_heads, q_per_kv, dim, intermediate, qk_norm in ((33, 1, 1, 16, 7, False), (130, 2, 3, 48, 95, True)):
        random_bf16 = lambda *shape: guarded(torch.randn(shape).bfloat16())
        q_size, kv_size = kv_heads * q_per_kv * dim, kv_heads * dim
        shapes = ((q_size, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, q_size), (intermediate, hidden),
                  (intermediate, hidden), (hidden, intermediate))  # fmt: skip
        x, y = random_bf16(hidden), empty(hidden, dtype=torch.bfloat16)
        capacity = r.choice((1, 2, 130))
        qk_norms = (random_bf16(dim), random_bf16(dim)) if qk_norm else (None, None)
        kv_cache = [random_bf16(kv_heads, capacity, dim) for _ in range(2)]
        tensors = [x, y, random_bf16(hidden), random_bf16(hidden), *qk_norms, random_bf16(dim), random_bf16(dim), *kv_cache]
        for n, k in shapes:
            kind = r.choice((types.uint4b8, types.int8, types.uint4))
            weight = random_weight(LinearSpec(n, k, kind, (1, k), bias=r.random() < 0.5), n)
            tensors += guarded(Kernel.pack(weight)["weight"]), None if weight.bias is None else guarded(weight.bias.bfloat16())
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        sizes = (hidden, kv_heads, q_per_kv, dim, capacity)
        one_rank, small = shared(1, 2 * hidden), shared(1, 2 * hidden - 2)
        at = ctypes.addressof
        for more, expected in (((capacity - 1, intermediate, 0, 0), 0), ((0, intermediate + 1, 0, 0), -4),
                               ((0, intermediate, at(one_rank), 0), 0), ((0, intermediate, at(small), 0), -4)):  # fmt: skip
            layer = LayerFields(*addresses, *sizes, *more)
            assert native.core().decode_layer(ctypes.addressof(layer), 0.2, 1e-6, 1e-6, 1e-6) == expected
            scalars = (ctypes.c_double * 8)(*(0.2, 1e-6, 1e-6, 1e-6) * 2)
            both = (LayerFields * 2)(layer, layer)
            ys = empty(2, hidden, dtype=torch.bfloat16)
            places = [t.data_ptr() for t in (x, ys, tensors[6], tensors[7])]
            assert native.core().decode_layers(at(both), at(scalars), 2, *places, more[0]) == expected

        fields = list(layer)
        fields[1], fields[18:24], fields[CAPACITY:] = ys.data_ptr(), [0] * 6, [capacity, capacity - 1, 0, 0, 0]
        without_mlp = LayerFields(*fields)
        assert native.core().decode_layer(at(without_mlp), 0.2, 1e-6, 1e-6, 1e-6) == 0
        assert native.core().decode_layers(at(without_mlp), at(scalars), 1, *places, 0) == -4
        for has_shared in (False, True):
            mlp, kept = routed_mlp(hidden, has_shared, r)
            changed = [list(mlp.experts) for _ in range(4)]
            changed[0][5] = kept[0].data_ptr()  # the down projections as the first ones
            changed[1][11], changed[2][12], changed[3][12] = 2, 0, 6  # tokens; of five experts none, or six
            others = [RoutedMlp.from_buffer_copy(mlp) for _ in changed]
            for other, values in zip(others, changed, strict=True):
                other.experts = ExpertsCall(*values)
            for routed, ranks, expected in ((mlp, 0, 0), *((other, 0, -4) for other in others), (mlp, at(one_rank), -4)):
                layer = LayerFields(*fields)
                layer[ROUTED], layer[RANKS] = at(routed), ranks
                assert native.core().decode_layer(at(layer), 0.2, 1e-6, 1e-6, 1e-6) == expected
                both = (LayerFields * 2)(layer, layer)
                assert native.core().decode_layers(at(both), at(scalars), 2, *places, 0) == expected


def routed_mlp(hidden: int, has_shared: bool, r: random.Random) -> tuple[RoutedMlp, list[torch.Tensor]]:
    """An MLP of five experts, and tensors that it points to: the down projections first."""
    inner, gate = r.choice((1, 31, 65)), ExpertGate("silu")
    down = LinearSpec(hidden, inner, types.uint4b8, (1, 16))
    stacks = []
    for spec in (down, down.replace(n=2 * inner, k=hidden)):
        packed = [Kernel.pack(random_weight(spec, e))["weight"] for e in range(5)]
        room = -(-packed[0].nbytes // 256) * 256
        stacks.append(guarded(torch.stack([torch.nn.functional.pad(p, (0, room - p.nbytes)) for p in packed])))
    kept = [*stacks, guarded(torch.randn(5, hidden).bfloat16())]
    mlp = RoutedMlp(router=kept[2].data_ptr(), renormalize=r.randrange(2), round_weights=r.randrange(2))
    mlp.experts = ExpertsCall(*[0] * 5, *fields_of_experts(stacks[1], None, stacks[0], None, 1, 3, torch.bfloat16, gate))
    if has_shared:
        mlp.shared_intermediate = n = r.choice((1, 33, 130))
        kept.append(guarded(torch.randn(hidden).bfloat16()))
        mlp.shared_router = kept[-1].data_ptr()
        for i, (rows, columns) in enumerate(((n, hidden), (n, hidden), (hidden, n))):
            mlp.shared[i].plain = r.randrange(2)
            spec = LinearSpec(rows, columns, types.int8, (1, columns))
            packed = Kernel.pack(random_weight(spec, i))["weight"]
            kept.append(guarded(torch.randn(rows, columns).bfloat16() if mlp.shared[i].plain else packed))
            mlp.shared[i].weight = kept[-1].data_ptr()
    return mlp, kept


def routing(r: random.Random) -> None:
    """The router of one token, among whose logits are ties, NaN and infinity."""
    for experts in (*SIZES, 513):
        hidden, top_k = r.choice(SIZES), r.randrange(1, experts + 1)
        router, x = guarded(torch.randint(-3, 4, (experts, hidden)).bfloat16()), guarded(torch.ones(hidden).bfloat16())
        router[:: r.randrange(1, 9)] = r.choice((0.0, math.nan, math.inf, -math.inf))
        index, weights = empty(top_k, dtype=torch.int64), empty(top_k)
        at = (x.data_ptr(), router.data_ptr(), hidden, experts, top_k, r.randrange(2), r.randrange(2))
        assert native.core().route(*at, index.data_ptr(), weights.data_ptr()) == 0
        assert len(set(index.tolist())) == top_k and int(index.min()) >= 0 and int(index.max()) < experts


def shared(world: int, capacity: int, rank: int = 0) -> _View:
    """What ranks exchange through memory of their own; the other ranks have come here once already."""
    memory = empty(size_of(world, capacity), dtype=torch.uint8).zero_()
    memory[: world * LINE].view(torch.int64)[:: LINE // 8] = 1 << 40
    view = _View(memory.data_ptr(), rank, world, capacity, 0, _Waits(lambda _rank: 1))
    view.memory_of = memory
    return view


def exchanges(r: random.Random) -> None:
    """Gathers and sums of ranks."""
    core = native.core()
    for n in (*SIZES, 20000):
        world = r.randrange(1, 4)
        for dtype, code in ((torch.float32, 0), (torch.bfloat16, 2)):
            view = shared(world, n * dtype.itemsize, r.randrange(world))
            x = guarded(torch.randn(n).to(dtype))
            gathered, y = empty(world, n, dtype=dtype), empty(n, dtype=torch.bfloat16)
            assert core.ranks_gather(ctypes.addressof(view), x.data_ptr(), x.nbytes, gathered.data_ptr()) == 0
            assert torch.equal(gathered[view.rank], x)
            assert core.ranks_sum(ctypes.addressof(view), x.data_ptr(), n, code, y.data_ptr(), 2) == 0
            assert torch.equal(y, x.bfloat16())
            assert core.ranks_gather(ctypes.addressof(view), x.data_ptr(), x.nbytes + 1, gathered.data_ptr()) == -4


def gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
    """The C function itself, into memory like its arguments'."""
    core = native.core()
    y = empty(x.shape[0], n, dtype=x.dtype).fill_(math.nan)
    code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[x.dtype]
    at = 0 if bias is None else bias.data_ptr()
    assert x.shape[0] == 0 or core.gemm(x.data_ptr(), x.shape[0], weight.data_ptr(), at, y.data_ptr(), code) == 0
    return y


def main() -> None:
    global GUARD
    GUARD = sys.argv[1]
    torch.manual_seed(0)
    core = native.core()
    assert core is not None, native.why_not()
    count_calls(core)
    core.abi(), core.bind_torch_threads(core.torch_library), core.num_threads(), core.isa_supported()
    core.empty_parallel_regions(3, 5)
    assert core.pool_loops(200, 7, 3) <= 0
    assert core.awake_team_loops(200, 7) == 0
    core.adapt_threads(1), core.pretend_contended(10**9), core.empty_parallel_regions(3, 5)
    core.adapt_threads(0), core.pretend_contended(0)
    for size in (1, 5000, (4 << 20) + 17, (9 << 20) + 4095):
        region = empty(size, dtype=torch.uint8)
        core.prefault_pages(region.data_ptr(), size)
        region.fill_(1)
    torch.empty = empty
    memory.empty_pooled = memory.empty = empty
    for level in sys.argv[2:] or native.isas():
        native.use_isa(level)
        assert native.isa() == level
        r = random.Random(level)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            repacking(r)
            gguf(r)
            int4pack(r)
            decode_ops(r)
            exchanges(r)
            routing(random.Random(threads))
            if level != "portable":
                linear(r)
                fused_gemv(r)
                experts(random.Random(threads))
                decode_layers(r)
    core.register_torch_op(core.torch_library)
    missing = {name.removeprefix("bitline_") for name in native.SIGNATURES} - set(CALLS)
    assert not missing or sys.argv[2:], f"never called: {missing}"
    print("calls:", sum(CALLS.values()))


if __name__ == "__main__":
    main()
