"""SHA-256 of everything that the native core computes at every ISA level of this machine, to compare two builds bit by bit.

    python tests/native_outputs.py dump OUT.json          # the core that BITLINE_NATIVE_LIBRARY names, else the installed one
    python tests/native_outputs.py compare OLD.json NEW.json

Inputs are seeded, so two dumps of one machine are equal where the libraries compute the same bits. Every function of
`native.SIGNATURES` is called; `compare` ends with exit status 1 and the names of the cases that differ.
"""

import ctypes
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bitline import bitstream, native, types
from bitline.expert_gate import ExpertGate
from bitline.formats.gguf.block_codes import BitPlanes
from bitline.formats.gguf.blocks import BLOCKS
from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.kernels.cpu.native_linear import CPUBatchInvariantLinearKernel, CPUWNA16LinearKernel
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel
from bitline.model.decoder_layer import ROUTED, LayerFields
from bitline.testing.conformance import default_specs
from bitline.testing.generators import inputs, random_spec, random_weight
from bitline.types import LinearSpec
from sanitized_calls import ACTS, INT4, routed_mlp, shared

Case = tuple[str, Tensor | int]
BF16 = torch.bfloat16
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, BF16: 2}
SHAPES = ((1, 1), (3, 17), (16, 16), (33, 150), (65, 130), (129, 257))
THREADS = (1, 3)
# Calls that compute no tensor; `set_isa` and `register_torch_op` are made by native.use_isa and by packing a weight.
WITHOUT_OUTPUT = {"abi", "isa", "isa_supported", "set_isa", "bind_torch_threads", "num_threads", "empty_parallel_regions",
                  "pool_loops", "awake_team_loops", "adapt_threads", "pretend_contended", "register_torch_op"}  # fmt: skip


def random_int32(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def random_bf16(*shape: int) -> Tensor:
    return torch.randn(shape).to(BF16)


# ---- repacking -----------------------------------------------------------------------------------------------------------


def gptq_awq(core: native.Core) -> Iterator[Case]:
    for k_packed, columns in SHAPES:
        src = random_int32(k_packed, columns)
        out = torch.zeros(columns, k_packed, dtype=torch.int32)
        core.repack_gptq(src.data_ptr(), columns, k_packed, columns, out.data_ptr(), k_packed)
        yield f"repack_gptq {k_packed}x{columns}", out
        blocks = -(-k_packed // 8)
        out = torch.zeros(8 * columns, blocks, dtype=torch.int32)
        core.repack_awq(src.data_ptr(), columns, k_packed, columns, out.data_ptr(), blocks)
        yield f"repack_awq {k_packed}x{columns}", out
        for bits in (1, 2, 4, 8):
            perm = torch.randperm(k_packed * 32 // bits).int()
            out = torch.zeros(columns, k_packed, dtype=torch.int32)
            sizes = (perm.numel(), bits, columns)
            assert core.repack_gptq_permuted(src.data_ptr(), columns, perm.data_ptr(), *sizes, out.data_ptr(), k_packed) == 0
            yield f"repack_gptq_permuted {bits} bits {k_packed}x{columns}", out
        for bits in range(1, 8):
            n = columns * 32 // bits // 8 * 8
            for awq_order in (0, 1):
                out = torch.zeros(n, k_packed, dtype=torch.uint8)
                sizes = (columns, k_packed, n, bits)
                assert core.unpack_zero_points(src.data_ptr(), *sizes, 0x11111111, 1, awq_order, out.data_ptr()) == 0
                yield f"unpack_zero_points {bits} bits {k_packed}x{columns} order {awq_order}", out


def bit_streams(core: native.Core) -> Iterator[Case]:
    for n, k in SHAPES:
        index = torch.randint(k, (k + 3,))
        for bits in range(1, 9):
            row = bitstream.row_bytes(k, bits)
            packed = random_bytes(n, row)
            if bits < 8:
                codes, again = torch.zeros(n, k, dtype=torch.uint8), torch.zeros_like(packed)
                core.unpack_codes(packed.data_ptr(), row, n, k, bits, codes.data_ptr())
                core.pack_codes(codes.data_ptr(), k, n, k, bits, again.data_ptr())
                yield f"unpack_codes {bits} bits {n}x{k}", codes
                yield f"pack_codes {bits} bits {n}x{k}", again
            out = torch.zeros(n, bitstream.row_bytes(k + 3, bits), dtype=torch.uint8)
            assert core.take_columns(packed.data_ptr(), row, n, k, bits, index.data_ptr(), k + 3, out.data_ptr()) == 0
            yield f"take_columns {bits} bits {n}x{k}", out
        for dtype in (torch.uint8, torch.int16, torch.int32):
            x = torch.randint(100, (n, k), dtype=dtype)
            out = torch.zeros(k, n, dtype=dtype)
            assert core.transpose(x.data_ptr(), k, n, k, x.itemsize, out.data_ptr()) == 0
            yield f"transpose {dtype} {n}x{k}", out
    for dtype, bits in ((torch.float16, 0x7C00), (BF16, 0x7F80), (torch.float32, 0x7F800000), (torch.float8_e4m3fn, 0x7F)):
        for n in (0, 1, 63, 1000, (1 << 18) + 3):
            x = torch.randn(n).to(dtype)
            found = core.all_finite(x.data_ptr(), n, x.itemsize, bits)
            if n:
                x[n // 2] = torch.nan
            yield f"all_finite {dtype} {n}", 2 * found + core.all_finite(x.data_ptr(), n, x.itemsize, bits)


def gguf_blocks(core: native.Core) -> Iterator[Case]:
    for kind, block in BLOCKS.items():
        if isinstance(block.codes, BitPlanes):
            for n, count in ((1, 1), (5, 3), (40, 9)):
                blocks = random_bytes(n, count, BLOCK_SIZES[kind][1])
                out = torch.zeros(n, bitstream.row_bytes(count * block.codes.size, block.codes.bits), dtype=torch.uint8)
                assert block.codes.repack_native(blocks, out)
                yield f"repack_gguf_blocks {kind} {n}x{count}", out
                if kind in ("Q4_K", "Q5_K"):
                    scales = block.scales(blocks).values()
                    yield f"unpack_gguf_scales {kind} {n}x{count}", torch.cat([t.view(torch.uint8).flatten() for t in scales])


def int4pack(_core: native.Core) -> Iterator[Case]:
    for kind in INT4:
        for n, groups, group in ((1, 1, 32), (65, 2, 64), (130, 3, 128)):
            for zero in ("none", "int", "float") if kind in (types.uint4, types.uint2, types.uint8) else ("none",):
                spec = LinearSpec(n, group * groups, kind, (1, group), zero=zero, scale_dtype=torch.float32)
                for name, tensor in TorchInt4PackLinearKernel.pack(random_weight(spec, n)).items():
                    yield f"int4pack {spec.key} {name}", tensor


# ---- linear layers -------------------------------------------------------------------------------------------------------

M_GEMV, M_PANEL = (1, 2, 3, 4, 5, 6, 9, 12, 13, 25), (64, 140, 600)


def linear_specs() -> list[LinearSpec]:
    r = random.Random(1)
    specs = default_specs() + [random_spec(seed) for seed in range(500, 540)]
    for kind in types.SCALAR_TYPES.values():
        for zero in ("none", "int", "float") if kind.kind == "int" and not kind.signed and not kind.bias else ("none",):
            for dtype in DTYPE_CODES:
                n, k = r.choice((33, 64, 70)), r.choice((100, 130, 256))
                specs.append(LinearSpec(n, k, kind, (1, r.choice((7, 16, 32, k))), scale_dtype=torch.float32, zero=zero,
                                        act_order=r.random() < 0.25, bias=r.random() < 0.5, act_dtype=dtype,
                                        act=r.choice(ACTS)))  # fmt: skip
    return specs


def gemm(core: native.Core, x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
    y = torch.zeros(x.shape[0], n, dtype=x.dtype)
    at = 0 if bias is None else bias.data_ptr()
    assert core.gemm(x.data_ptr(), x.shape[0], packed.data_ptr(), at, y.data_ptr(), DTYPE_CODES[x.dtype]) == 0
    return y


def linear(core: native.Core) -> Iterator[Case]:
    for i, spec in enumerate(linear_specs()):
        weight = random_weight(spec, 1)
        bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
        for kernel in (CPUWNA16LinearKernel, CPUBatchInvariantLinearKernel):
            packed = kernel.pack(weight)["weight"]
            yield f"gemm_pack {i} {spec.key} {kernel.__name__}", packed
            yield f"gemm_unpack {i} {spec.key} {kernel.__name__}", kernel.unpack([packed], spec)
            for m in M_GEMV if i % 7 else M_GEMV + M_PANEL:
                yield f"gemm {i} {spec.key} M={m} {kernel.__name__}", gemm(core, inputs(m, spec, m), packed, bias, spec.n)


def fused_gemv(core: native.Core) -> Iterator[Case]:
    for kinds in ((types.uint4b8, types.uint4), (types.int8, types.float8_e4m3fn, types.uint2), (types.uint3b4, types.uint4b8)):
        specs = [LinearSpec(n, 130, kind, (1, 32)) for n, kind in zip((1, 33, 95), kinds, strict=False)]
        packed = [CPUWNA16LinearKernel.pack(random_weight(spec, 2))["weight"] for spec in specs]
        x, y = random_bf16(130), torch.zeros(sum(spec.n for spec in specs), dtype=BF16)
        arguments = [a for p in packed for a in (p.data_ptr(), None)] + [None, None]
        assert core.fused_gemv(x.data_ptr(), 130, *arguments[:6], y.data_ptr(), 2) == 0
        yield f"fused_gemv {' '.join(map(str, kinds))}", y


def experts(_core: native.Core) -> Iterator[Case]:
    for gate in (ExpertGate("silu"), ExpertGate("gelu", gated=False), ExpertGate("silu", True, 1.702, 7.0)):
        for dtype in DTYPE_CODES:
            down = LinearSpec(65, 130, types.uint4b8, (1, 32), act_dtype=dtype)
            specs = down.replace(n=130 * (1 + gate.gated), k=100), down
            parts = [torch.stack([CPUWNA16LinearKernel.pack(random_weight(s, e))["weight"] for e in range(4)]) for s in specs]
            for m in (1, 9, 70):
                x, index, weights = inputs(m, specs[0], m), torch.randint(5, (m, 2)), torch.rand(m, 2)
                y = CPUWNA16LinearKernel.apply_experts(x, index, weights, parts[:1], None, parts[1:], None, *specs, gate)
                yield f"experts {gate.key} {dtype} M={m}", y


# ---- decode step ---------------------------------------------------------------------------------------------------------


def decode_ops(core: native.Core) -> Iterator[Case]:
    for n in (1, 15, 33, 130, 1000):
        x, weight, y = random_bf16(3, n), random_bf16(n), torch.zeros(3, n, dtype=BF16)
        core.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), 3, n, 1e-6)
        yield f"rms_norm {n}", y.clone()
        core.silu_and_mul(x[0].data_ptr(), x[1].data_ptr(), y.data_ptr(), n)
        yield f"silu_and_mul {n}", y[0].clone()
        for k in (1, 17, 100, 576):
            w, v, out = random_bf16(n, k), random_bf16(k), torch.zeros(n, dtype=BF16)
            assert core.gemv_bf16(v.data_ptr(), w.data_ptr(), out.data_ptr(), n, k) == 0
            yield f"gemv_bf16 {n}x{k}", out
        for kv_heads, repeat, dim in ((1, 1, 16), (2, 3, 48), (3, 2, 128)):
            qkv, cos, sin = random_bf16((repeat + 2) * kv_heads, dim), random_bf16(dim), random_bf16(dim)
            cache, out = random_bf16(2, kv_heads, n, dim), torch.zeros(kv_heads * repeat, dim, dtype=BF16)
            arguments = [t.data_ptr() for t in (qkv, cos, sin, cache[0], cache[1], out)]
            assert core.decode_attention(*arguments, kv_heads, repeat, dim, n, n - 1, dim**-0.5) == 0
            yield f"decode_attention {kv_heads} {repeat} {dim} {n}", torch.cat((out.flatten(), cache.flatten()))


def routing(core: native.Core) -> Iterator[Case]:
    for experts, top_k, hidden in ((1, 1, 1), (8, 2, 576), (60, 4, 130), (513, 9, 33)):
        x, router = random_bf16(hidden), random_bf16(experts, hidden)
        for renormalize, rounded in ((0, 0), (1, 1)):
            index, weights = torch.zeros(top_k, dtype=torch.int64), torch.zeros(top_k)
            sizes = (hidden, experts, top_k, renormalize, rounded)
            assert core.route(x.data_ptr(), router.data_ptr(), *sizes, index.data_ptr(), weights.data_ptr()) == 0
            yield f"route {top_k} of {experts} {renormalize} {rounded}", torch.cat((index.float(), weights))


def decode_layer(core: native.Core) -> Iterator[Case]:
    for hidden, kv_heads, repeat, dim, intermediate, qk_norm in ((33, 1, 1, 16, 7, False), (130, 2, 3, 48, 95, True)):
        q, kv = kv_heads * repeat * dim, kv_heads * dim
        shapes = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (intermediate, hidden), (intermediate, hidden),
                  (hidden, intermediate))  # fmt: skip
        y, cache = torch.zeros(hidden, dtype=BF16), random_bf16(2, kv_heads, 130, dim)
        tensors = [random_bf16(hidden), y, random_bf16(hidden), random_bf16(hidden),
                   *((random_bf16(dim), random_bf16(dim)) if qk_norm else (None, None)),
                   random_bf16(dim), random_bf16(dim), cache[0], cache[1]]  # fmt: skip
        for n, k in shapes:
            kind = (types.uint4b8, types.int8)[n % 2]
            tensors += CPUWNA16LinearKernel.pack(random_weight(LinearSpec(n, k, kind, (1, k)), n))["weight"], None
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        layer = LayerFields(*addresses, hidden, kv_heads, repeat, dim, 130, 129, intermediate, 0, 0)
        assert core.decode_layer(ctypes.addressof(layer), 0.2, 1e-6, 1e-6, 1e-6) == 0
        yield f"decode_layer {hidden}", torch.cat((y, cache.flatten()))
        attention = LayerFields(*layer)
        attention[1], attention[18:24] = (out := torch.zeros(2, hidden, dtype=BF16)).data_ptr(), [0] * 6
        assert core.decode_layer(ctypes.addressof(attention), 0.2, 1e-6, 1e-6, 1e-6) == 0
        yield f"decode_layer without MLP {hidden}", out.clone()
        for has_shared in (False, True):
            mlp, _kept = routed_mlp(hidden, has_shared, random.Random(hidden))
            attention[ROUTED] = ctypes.addressof(mlp)
            assert core.decode_layer(ctypes.addressof(attention), 0.2, 1e-6, 1e-6, 1e-6) == 0
            yield f"decode_layer with experts {hidden} {has_shared}", out[0].clone()
        twice, scalars = (LayerFields * 2)(layer, layer), (ctypes.c_double * 8)(*(0.2, 1e-6, 1e-6, 1e-6) * 2)
        both = torch.zeros(2, hidden, dtype=BF16)
        at = [t.data_ptr() for t in (tensors[0], both, tensors[6], tensors[7])]
        assert core.decode_layers(ctypes.addressof(twice), ctypes.addressof(scalars), 2, *at, 129) == 0
        yield f"decode_layers {hidden}", both


def exchanges(core: native.Core) -> Iterator[Case]:
    """Of two ranks, of which the other one wrote zeros."""
    for n in (1, 33, 1000):
        view, x, gathered, y = shared(2, 2 * n), random_bf16(n), torch.zeros(2, n, dtype=BF16), torch.zeros(n, dtype=BF16)
        assert core.ranks_gather(ctypes.addressof(view), x.data_ptr(), x.nbytes, gathered.data_ptr()) == 0
        assert core.ranks_sum(ctypes.addressof(view), x.data_ptr(), n, 2, y.data_ptr(), 2) == 0
        yield f"exchanges {n}", torch.cat((gathered.flatten(), y))


# ---- dump and compare ----------------------------------------------------------------------------------------------------

AT_EVERY_LEVEL = (gptq_awq, bit_streams, gguf_blocks, int4pack, decode_ops, routing, exchanges)
FROM_AVX2 = (linear, fused_gemv, experts, decode_layer)


def digest(value: Tensor | int) -> str:
    data = str(value).encode() if isinstance(value, int) else value.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def dump(path: Path) -> None:
    core = native.core()
    assert core is not None, native.why_not()
    called: set[str] = set()
    for name in native.SIGNATURES:
        short = name.removeprefix("bitline_")
        function = getattr(core, short)
        setattr(core, short, lambda *a, short=short, function=function: (called.add(short), function(*a))[1])
    found = {}
    for level in native.isas():
        native.use_isa(level)
        for threads in THREADS:
            torch.set_num_threads(threads)
            for cases in AT_EVERY_LEVEL + (FROM_AVX2 if level != "portable" else ()):
                torch.manual_seed(0)
                for name, value in cases(core):
                    found[f"{level} threads={threads} {name}"] = digest(value)
    page = torch.zeros(9 << 20, dtype=torch.uint8)
    core.prefault_pages(page.data_ptr(), page.numel())
    found["prefault_pages"] = digest(page)
    missing = {name.removeprefix("bitline_") for name in native.SIGNATURES} - called - WITHOUT_OUTPUT
    assert not missing, f"never called: {sorted(missing)}"
    path.write_text(json.dumps({"levels": native.isas(), "sha256": found}, indent=0) + "\n")
    print(f"{len(found)} outputs at {', '.join(native.isas())} from {core.path}")


def compare(old: Path, new: Path) -> None:
    a, b = (json.loads(path.read_text())["sha256"] for path in (old, new))
    differing = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    print(f"{len(a)} and {len(b)} outputs, {len(differing)} differ", *differing[:50], sep="\n")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"dump": dump, "compare": compare}[command](*map(Path, paths))
