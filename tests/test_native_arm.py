"""The native core on an ARM CPU: cross-compiled by zig (requirements-dev.txt), run by qemu where that is installed (Debian's
qemu-user). The portable level's results must be this machine's, bit for bit; those of the linear kernels, which only the levels
`neon` and `neon_i8mm` have there, are checked here against the reference.
"""

import io
import math
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitline import native, types
from bitline.act_quant import fake_quantize
from bitline.kernels.cpu.native_linear import CPUBatchInvariantLinearKernel
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.kernels.cpu.unpack_weight import unpack_in_torch
from bitline.testing import check, check_exact
from bitline.testing.conformance import BATCH_SIZES, default_specs
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_spec, random_weight
from bitline.testing.tolerance import reference64
from bitline.types import ActSpec, LinearSpec

ROOT = Path(__file__).parents[1]
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ROWS = [m for m in BATCH_SIZES if m]
zig = pytest.importorskip("ziglang", reason="pip install ziglang builds for other machines")
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.xdist_group("arm")]  # one process builds


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    write_compiler = runpy.run_path(str(ROOT / "release" / "zig_compiler.py"))["write_compiler"]
    return write_compiler(tmp_path_factory.mktemp("compiler") / "arm-c++", "aarch64-linux-musl")


@pytest.fixture(scope="module")
def program(compiler, tmp_path_factory):
    """The core as csrc/CMakeLists.txt builds it for ARM, linked with native_arm_gemm.cpp."""
    folder = tmp_path_factory.mktemp("core")
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cmake, ninja = shutil.which("cmake", path=found), shutil.which("ninja", path=found)
    run(cmake, "-G", "Ninja", "-S", ROOT / "csrc", "-B", folder, f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}")  # fmt: skip
    run(ninja, "-C", folder)
    objects = sorted((folder / "CMakeFiles").glob("*.dir/**/*.o"))
    source = ROOT / "tests" / "native_arm_gemm.cpp"
    run(compiler, "-std=c++20", "-O2", "-static", "-o", folder / "gemm", source, *objects, "-ldl", "-lpthread")
    return folder / "gemm"


@pytest.fixture(scope="module")
def emulated(program):
    if EMULATOR is None:
        pytest.skip("built; apt-get install qemu-user runs it")
    if native.core() is None:
        pytest.skip(f"built; weights cannot be packed here: {native.why_not()}")
    return program


def packed_input(kernel, weight, x):
    """The weight as the kernel packs it, and x as the kernel's `apply` gives it to the core."""
    packed = list(kernel.pack(weight).values())
    if len(packed) > 1:
        x = fake_quantize(x, weight.spec.act, *(t if t.numel() else None for t in packed[1:])).to(x.dtype)
    return packed[0], x


def write_case(file, kernel, weight, x):
    packed, x = packed_input(kernel, weight, x)
    bias = torch.empty(0) if weight.bias is None else weight.bias.to(x.dtype)
    data = [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in (x, packed, bias)]
    file.write(struct.pack("<6q", x.shape[0], weight.spec.n, *map(len, data), DTYPE_CODES[x.dtype]))
    file.writelines(data)


def read_result(file, rows, columns, dtype):
    (failed,) = struct.unpack("<q", file.read(8))
    assert failed == 0
    data = bytearray(file.read((rows + 1) * columns * dtype.itemsize))
    out = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(rows + 1, columns)
    assert bool((out[rows:].contiguous().view(torch.uint8) == 255).all()), "written past the end"
    return out[:rows]


def read_results(file, weight, x):
    """y of a case, whose unpacked W must be the torch code's, bit for bit."""
    spec = weight.spec
    y, w = read_result(file, x.shape[0], spec.n, x.dtype), read_result(file, spec.n, spec.k, x.dtype)
    assert torch.equal(w.nan_to_num(), unpack_in_torch(Kernel.pack(weight)["weight"], x.dtype).nan_to_num()), spec.key
    return y


def linear(program, folder, cases, levels=("neon", "neon_i8mm"), cpu="max", kernel=Kernel):
    """y [M, N] of each case (weight, x), for each of the levels, which must be those that the CPU has."""
    with (folder / "cases").open("wb") as file:
        for weight, x in cases:
            write_case(file, kernel, weight, x)
    run(EMULATOR, "-cpu", cpu, program, folder / "cases", folder / "results")
    file, results = io.BytesIO((folder / "results").read_bytes()), {}
    while head := file.read(8):
        level = native.LEVELS[struct.unpack("<q", head)[0]]
        results[level] = [read_results(file, weight, x) for weight, x in cases]
    assert tuple(results) == tuple(levels)
    return results


def check_all(program, folder, specs, rows=ROWS):
    """Random data within the tolerance, lossless data exact, but for codebooks without 0, of which there is none."""
    with_zero = [s for s in specs if 0.0 in s.weight.values()]
    loose = [(w, inputs(m, w.spec, m)) for w in (random_weight(s, i) for i, s in enumerate(specs)) for m in rows]
    exact = [(w, lossless_inputs(m, w.spec, m)) for w in (lossless_weight(s, i) for i, s in enumerate(with_zero)) for m in rows]
    for found in linear(program, folder, loose + exact).values():
        for y, (weight, x) in zip(found[: len(loose)], loose, strict=True):
            check(y, x, weight)
        for y, (weight, x) in zip(found[len(loose) :], exact, strict=True):
            check_exact(y, x, weight)


# ---- the portable level --------------------------------------------------------------------------------------------------


def build_portable(out, *compiler):
    """The portable level and native_portable.cpp as one program."""
    listed = re.findall(r"^bitline_variants\((\S+) portable", (ROOT / "csrc" / "CMakeLists.txt").read_text(), re.MULTILINE)
    variants = [ROOT / "csrc" / "variants" / name for name in listed]
    run(*compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-DBITLINE_ISA=portable", "-DBITLINE_ISA_portable=1",
        f"-I{ROOT / 'csrc'}", "-o", out, ROOT / "tests" / "native_portable.cpp", *sorted((ROOT / "csrc").glob("*.cpp")),
        *variants, "-ldl", "-lpthread")  # fmt: skip
    return out


def test_an_arm_cpu_computes_the_same(compiler, tmp_path):
    arm = build_portable(tmp_path / "arm", compiler, "-static")
    assert arm.read_bytes()[18:20] == (183).to_bytes(2, "little")  # EM_AARCH64
    if EMULATOR is None:
        pytest.skip("built; apt-get install qemu-user runs it")
    here, there = run(build_portable(tmp_path / "here", os.environ.get("CXX", "c++"))), run(EMULATOR, arm)
    assert here == there and len(here.splitlines()) > 100


# ---- the linear kernels --------------------------------------------------------------------------------------------------


def test_the_core_is_built_for_arm_with_every_level(program):
    assert program.read_bytes()[18:20] == (183).to_bytes(2, "little")  # EM_AARCH64
    built = {p.parent.parent.name for p in (program.parent / "CMakeFiles").glob("gemm_neon_*.dir/variants/*.o")}
    assert built == {"gemm_neon_neon.dir", "gemm_neon_neon_i8mm.dir"}


@pytest.mark.parametrize(("cpu", "levels"), [("cortex-a72", ()), ("neoverse-n1", ("neon",)), ("max", ("neon", "neon_i8mm"))])
def test_levels_of_a_cpu(emulated, tmp_path, cpu, levels):
    spec = LinearSpec(40, 96, types.uint4b8, (1, 32), scale_dtype=torch.bfloat16)
    weight, x = lossless_weight(spec, 1), lossless_inputs(17, spec)
    for found in linear(emulated, tmp_path, [(weight, x)], levels, cpu).values():
        check_exact(found[0], x, weight)


def test_common_and_random_schemes(emulated, tmp_path):
    check_all(emulated, tmp_path, default_specs() + [random_spec(seed) for seed in range(300, 340)])


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_type_and_group(emulated, tmp_path, dtype):
    specs = [
        LinearSpec(35, 100, kind, (1, group), scale_dtype=torch.float32, act_dtype=dtype)
        for kind in types.SCALAR_TYPES.values()
        for group in (1, 7, 16, 100)
    ]
    check_all(emulated, tmp_path, specs, (1, 5, 13))


ACTS = [ActSpec(kind, dynamic, how, 0, symmetric) for kind in (types.int8, types.float8_e4m3fn)
        for dynamic, how in ((True, "token"), (True, "tensor"), (False, "tensor"))
        for symmetric in ((True, False) if kind is types.int8 else (True,))]  # fmt: skip
ACTS += [ActSpec(types.float8_e4m3fn, granularity="group", group_size=128),
         ActSpec(types.float4_e2m1, granularity="group", group_size=16, scale="e4m3")]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_quantized_activations(emulated, tmp_path, act):
    kinds = (types.int8, types.uint4b8, types.uint3b4, types.uint8b128, types.nf4, types.float8_e4m3fn)
    specs = [
        LinearSpec(45, 268, kind, (1, group), act=act, act_dtype=dtype)
        for kind in kinds
        for group, dtype in ((64, torch.bfloat16), (268, torch.float32))
    ]
    check_all(emulated, tmp_path, specs)


@pytest.mark.parametrize("zero", ["int", "float"])
def test_offsets(emulated, tmp_path, zero):
    specs = [
        LinearSpec(33, 130, types.SCALAR_TYPES[f"uint{bits}"], (1, group), zero=zero, act_dtype=dtype, act_order=group == 64)
        for bits in (2, 3, 4, 5, 6, 8)
        for group, dtype in ((16, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16))
    ]
    check_all(emulated, tmp_path, specs, (1, 4, 25))


def test_extreme_codes(emulated, tmp_path):
    """Full-range codes of W and of int8 activations, all of one sign: no sum saturates."""
    cases = []
    for kind, code in (
        (types.int8, 0x80),
        (types.int8, 0x7F),
        (types.uint4b8, 0xFF),
        (types.uint6b32, 0xFF),
        (types.uint8, 0xFF),
    ):
        for act in (None, ActSpec(types.int8)):
            zero = "int" if kind is types.uint8 else "none"
            spec = LinearSpec(45, 512, kind, (1, 512), act=act, zero=zero, scale_dtype=torch.float32, act_dtype=torch.float32)
            weight = random_weight(spec, 1)
            weight.codes.view(torch.uint8).fill_(code)
            cases += [(weight, torch.full((m, 512), sign)) for m in (1, 2, 17) for sign in (1.0, -1.0)]
    for found in linear(emulated, tmp_path, cases).values():
        for y, (weight, x) in zip(found, cases, strict=True):
            check(y, x, weight)


@pytest.mark.parametrize("m", [1, 2, 5, 13])
def test_nan_codes_of_fp8(emulated, tmp_path, m):
    spec = LinearSpec(70, 128, types.float8_e4m3fn, (1, 128), scale_dtype=torch.float32)
    weight, x = random_weight(spec, 1), inputs(m, spec, m)
    weight.codes.view(torch.uint8)[3, 7], weight.codes.view(torch.uint8)[69, 127] = 0x7F, 0xFF
    rows = torch.zeros(70, dtype=torch.bool)
    rows[[3, 69]] = True
    for found in linear(emulated, tmp_path, [(weight, x)]).values():
        assert torch.equal(found[0].isnan(), rows.expand(m, 70))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_in_x(emulated, tmp_path, value):
    spec = LinearSpec(40, 256, types.uint4b8, (1, 64), scale_dtype=torch.float32)
    cases = []
    for m in (2, 9):
        x = inputs(m, spec, 1)
        x[1, 3] = value
        cases.append((random_weight(spec, 1), x))
    for found in linear(emulated, tmp_path, cases).values():
        for y, (weight, x) in zip(found, cases, strict=True):
            assert torch.equal(y.isfinite(), reference64(x, weight).isfinite())


def test_every_magnitude_of_x(emulated, tmp_path):
    spec = LinearSpec(40, 256, types.uint4b8, (1, 64), scale_dtype=torch.float32)
    weight = lossless_weight(spec, 1)
    exponents = (0, -100, -40, -31, 60, 100)
    scaled = lambda v, e: torch.ldexp(v.float(), torch.tensor(e)).to(v.dtype)
    for m in (1, 2, 17):
        x = lossless_inputs(m, spec, 1)
        for found in linear(emulated, tmp_path, [(weight, scaled(x, e)) for e in exponents]).values():
            check_exact(found[0], x, weight)
            assert all(torch.equal(y, scaled(found[0], e)) for y, e in zip(found, exponents, strict=True))


def test_batch_invariance(emulated, tmp_path):
    cases = []
    for kind in (types.uint4b8, types.uint3b4, types.nf4, types.float8_e4m3fn, types.int8):
        for act in (None, ActSpec(types.int8), ActSpec(types.float8_e4m3fn)):
            spec = LinearSpec(40, 300, kind, (1, 100), scale_dtype=torch.float32, act=act, act_dtype=torch.bfloat16)
            weight, x = random_weight(spec, 1), inputs(17, spec, 2)
            cases += [(weight, x), *((weight, x[i : i + 1]) for i in range(17)), (weight, x[:2]), (weight, x[:3])]
    for found in linear(emulated, tmp_path, cases, kernel=CPUBatchInvariantLinearKernel).values():
        for i in range(0, len(cases), 20):
            together, alone = found[i], torch.cat(found[i + 1 : i + 18])
            check(together, cases[i][1], cases[i][0])
            assert torch.equal(together, alone)
            assert torch.equal(together[:2], found[i + 18]) and torch.equal(together[:3], found[i + 19])
