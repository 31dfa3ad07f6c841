"""The native CPU kernel at every ISA level of this machine."""

import math

import pytest
import torch

from bitline import QuantLinear, choose, native, types
from bitline.errors import BitlineError
from bitline.kernels.cpu import native_linear, packed_weight
from bitline.kernels.cpu.native_linear import CPUBatchInvariantLinearKernel
from bitline.kernels.cpu.native_linear import CPUWNA16LinearKernel as Kernel
from bitline.select import Policy
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel, default_specs
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_spec, random_weight
from bitline.types import ActSpec, LinearSpec

LEVELS = [level for level in native.isas() if level != "portable"]
pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no native kernel here: {native.why_not() or 'no AVX2'}")
BASE = LinearSpec(40, 96, types.uint4b8, (1, 32), scale_dtype=torch.bfloat16)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_conformance(kernel_level):
    specs = default_specs() + [random_spec(seed) for seed in range(300, 320)]
    check_kernel(Kernel, specs if kernel_level == LEVELS[-1] else specs[::4])


@pytest.mark.parametrize("kind", types.SCALAR_TYPES.values(), ids=str)
@pytest.mark.parametrize("group", [1, 7, 16, 32, 100])
def test_every_type_and_group(kernel_level, kind, group):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        spec = LinearSpec(35, 100, kind, (1, group), scale_dtype=torch.float32, act_dtype=dtype)
        weight = random_weight(spec, 1)
        packed = list(Kernel.pack(weight).values())
        for m in (1, 5, 13):
            x = inputs(m, spec, m)
            check(Kernel.apply(x, packed, None, spec), x, weight)


def run_poisoned(spec, weight, x):
    """The kernel into a buffer of NaN with a margin, which must not be written."""
    core = native.core()
    packed = Kernel.pack(weight)["weight"]
    y = torch.full((x.shape[0] * spec.n + 64,), math.nan, dtype=x.dtype)
    bias = None if weight.bias is None else weight.bias.to(x.dtype)
    code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[x.dtype]
    failed = core.gemm(x.data_ptr(), x.shape[0], packed.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), code)
    assert failed == 0
    assert bool(y[x.shape[0] * spec.n :].isnan().all()), "written past the end"
    return y[: x.shape[0] * spec.n].view(x.shape[0], spec.n)


@pytest.mark.parametrize("n", [1, 15, 17, 31, 33, 64])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 9, 11, 12, 13, 25])
def test_every_element_is_written_and_none_else(kernel_level, n, m):
    for kind in (types.uint4b8, types.uint3b4, types.int8):
        spec = LinearSpec(n, 70, kind, (1, 32), scale_dtype=torch.float32, bias=True)
        weight, x = lossless_weight(spec, n), lossless_inputs(m, spec, m)
        check_exact(run_poisoned(spec, weight, x), x, weight)


PANEL = {
    "nvfp4": (LinearSpec(70, 160, types.float4_e2m1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(70, 160)), 140),
    "offsets": (LinearSpec(33, 96, types.uint4, (1, 16), scale_dtype=torch.bfloat16, zero="float"), 129),
    "zeros": (LinearSpec(33, 90, types.uint6, (1, 16), scale_dtype=torch.float16, zero="int", bias=True), 130),
    "channel": (LinearSpec(40, 700, types.int8, (1, 700), scale_dtype=torch.float32), 515),
    "fp8": (LinearSpec(40, 300, types.float8_e4m3fn, (1, 32), scale_dtype=torch.float8_e8m0fnu), 520),
    "long": (LinearSpec(36, 600, types.uint8, (1, 300), zero="int", act_order=True), 513),
    "passes": (LinearSpec(17, 40, types.uint4b8, (1, 32)), 1100),
}


@pytest.mark.parametrize("name", PANEL)
def test_large_m(kernel_level, name):
    spec, m = PANEL[name]
    exact, x = lossless_weight(spec, 1), lossless_inputs(m, spec, 2)
    check_exact(run_poisoned(spec, exact, x), x, exact)
    weight, x = random_weight(spec, 3), inputs(m, spec, 4)
    check(run_poisoned(spec, weight, x), x, weight)


@pytest.mark.parametrize("m", [1, 7, 40, 200])
def test_same_bits_for_any_number_of_threads(kernel_level, threads, m):
    for kind in (types.uint4b8, types.float8_e4m3fn):
        spec = LinearSpec(500, 256, kind, (1, 16), act=None if m < 100 else ActSpec(types.int8))
        packed, x = list(Kernel.pack(random_weight(spec, 1)).values()), inputs(m, spec)
        results = []
        for count in (1, 2, 3, 2):
            threads(count)
            results.append(Kernel.apply(x, packed, None, spec))
        assert all(torch.equal(results[0], r) for r in results[1:])


@pytest.mark.parametrize("kind", types.SCALAR_TYPES.values(), ids=str)
def test_batch_invariance(kernel_level, threads, kind):
    fp8 = ActSpec(types.float8_e4m3fn)  # computed in bfloat16; float32 outputs show every bit of the accumulators
    for group, dtype, act in ((16, torch.bfloat16, None), (128, torch.bfloat16, None), (600, torch.float16, None),
                              (128, torch.float32, fp8), (32, torch.float32, fp8), (600, torch.float32, fp8),
                              (64, torch.float32, None), (128, torch.float32, ActSpec(types.int8, symmetric=False))):  # fmt: skip
        spec = LinearSpec(70, 600, kind, (1, group), scale_dtype=torch.float32, act_dtype=dtype, act=act)
        packed = list(CPUBatchInvariantLinearKernel.pack(random_weight(spec, 1)).values())
        x = inputs(65, spec, 2)
        threads(1)
        alone = torch.cat([CPUBatchInvariantLinearKernel.apply(row, packed, None, spec) for row in x.split(1)])
        for m in (2, 3, 7, 17, 65):
            for count in (1, 2, 3):
                threads(count)
                together = torch.cat([CPUBatchInvariantLinearKernel.apply(part, packed, None, spec) for part in x.split(m)])
                assert torch.equal(together, alone), f"M={m} on {count} threads, group size {group}, {dtype}"


def test_the_batch_invariant_kernel_conforms_and_is_chosen_by_policy(kernel_level):
    check_kernel(CPUBatchInvariantLinearKernel, default_specs()[::4])
    platform = "cpu:avx512_bf16,avx512_vnni,avx512_vbmi"
    assert choose(BASE, platform, Policy(batch_invariant=True)).kernel is CPUBatchInvariantLinearKernel
    assert choose(BASE, platform).kernel is Kernel


ACTS = [ActSpec(kind, dynamic, how, 0, symmetric, limit=limit) for kind in (types.int8, types.float8_e4m3fn)
        for dynamic, how, limit in ((True, "token", 0.0), (True, "tensor", 0.0), (True, "token", 1.5), (False, "tensor", 0.0))
        for symmetric in ((True, False) if kind is types.int8 else (True,))]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_activation_quantization(kernel_level, act):
    for kind, dtype in ((types.int8, torch.bfloat16), (types.uint4b8, torch.float32), (types.nf4, torch.float32),
                        (types.uint3b4, torch.float16), (types.float8_e4m3fn, torch.bfloat16)):  # fmt: skip
        spec = LinearSpec(33, 130, kind, (1, 64), act=act, act_dtype=dtype)
        weight = random_weight(spec, 1)
        packed = list(Kernel.pack(weight).values())
        for m in (1, 4, 14):
            x = inputs(m, spec, m)
            check(Kernel.apply(x, packed, None, spec), x, weight)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_token_gives_nan_in_its_row(kernel_level, bad):
    spec = BASE.replace(act=ActSpec(types.int8))
    packed, x = list(Kernel.pack(random_weight(spec, 1)).values()), inputs(3, spec)
    x[1, 5] = bad
    y = Kernel.apply(x, packed, None, spec)
    assert bool(y[1].isnan().all()) and bool(y[[0, 2]].isfinite().all())


def test_nan_and_infinite_inputs_reach_the_output(kernel_level):
    packed, x = list(Kernel.pack(random_weight(BASE, 1)).values()), inputs(3, BASE)
    x[0, 3], x[2, 95] = math.nan, math.inf
    y = Kernel.apply(x, packed, None, BASE)
    assert bool(y[0].isnan().all()) and bool(y[1].isfinite().all()) and not bool(y[2].isfinite().any())


def test_one_weight_runs_at_every_level():
    weight = lossless_weight(BASE, 1)
    packed, x = list(Kernel.pack(weight).values()), lossless_inputs(5, BASE)
    before = native.isa()
    try:
        for name in LEVELS:
            native.use_isa(name)
            check_exact(Kernel.apply(x, packed, None, BASE), x, weight)
    finally:
        native.use_isa(before)


def test_no_kernel_below_avx2():
    packed = list(Kernel.pack(random_weight(BASE, 1)).values())
    before = native.isa()
    native.use_isa("portable")
    try:
        with pytest.raises((BitlineError, RuntimeError), match="CPU features"):
            Kernel.apply(inputs(1, BASE), packed, None, BASE)
    finally:
        native.use_isa(before)


# ---- the operator --------------------------------------------------------------------------------------------------


def test_the_operator_is_registered_by_the_core():
    Kernel.pack(random_weight(BASE))
    assert native_linear.register_native_op()


def test_python_and_native_operator_agree():
    weight = random_weight(BASE.replace(bias=True), 1)
    packed = Kernel.pack(weight)["weight"]
    for shape in ((1, 96), (4, 96), (2, 3, 96), (96,), (0, 96), (2, 0, 96)):
        x = torch.randn(shape).bfloat16()
        for bias in (None, weight.bias.bfloat16()):
            y = native_linear.OP(x, packed, bias, 40)
            assert y.shape == (*shape[:-1], 40) and torch.equal(y, native_linear._linear(x, packed, bias, 40))


def test_inputs_that_are_not_contiguous():
    packed = Kernel.pack(random_weight(BASE, 1))["weight"]
    x = torch.randn(96, 7).bfloat16().t()
    column_slice = torch.randn(7, 200).bfloat16()[:, 50:146]
    row_slice = torch.randn(14, 96).bfloat16()[::2]
    for odd in (x, column_slice, row_slice, x[:1], x.view(7, 1, 96).expand(7, 3, 96)):
        assert torch.equal(native_linear.OP(odd, packed, None, 40), native_linear.OP(odd.contiguous(), packed, None, 40))


def test_wrong_arguments_are_refused():
    packed = Kernel.pack(random_weight(BASE, 1))["weight"]
    x = torch.randn(2, 96).bfloat16()
    for wrong in ((torch.randn(2, 95).bfloat16(), packed, None, 40), (x, packed, None, 41), (x.double(), packed, None, 40)):
        with pytest.raises(RuntimeError, match="cpu_linear"):
            native_linear.OP(*wrong)
    other = packed.clone()
    other[0] += 1
    with pytest.raises(RuntimeError, match="version"):
        native_linear.OP(x, other, None, 40)
    with pytest.raises(BitlineError, match="version"):
        native_linear._linear(x, other, None, 40)


def test_layers_call_it_directly_and_compile():
    layer = QuantLinear(random_weight(BASE, 1), kernel="CPUWNA16LinearKernel")
    assert layer._direct is not None and layer._direct[0] is native_linear.OP
    x = torch.randn(3, 2, 96).bfloat16()
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), expected)


def test_schemes_that_torch_fake_quantizes():
    act = ActSpec(types.int8, granularity="group", group_size=32, symmetric=False)
    spec = BASE.replace(weight=types.int8, act=act)
    weight = random_weight(spec, 1)
    layer = QuantLinear(weight, kernel="CPUWNA16LinearKernel")
    assert layer._direct is None
    x = inputs(5, spec)
    check(layer(x), x, weight)


# ---- selection and layout ------------------------------------------------------------------------------------------


def test_it_is_chosen_where_it_can_run():
    assert choose(BASE, "cpu:avx512_bf16,avx512_vnni,avx512_vbmi").kernel is Kernel
    choice = choose(BASE, "cpu:avx512_bf16,no_native")
    assert choice.kernel is not Kernel
    refused = next(c for c in choice.candidates if c.kernel is Kernel)
    assert "native core" in refused.verdict.reason and "compiler" in refused.verdict.fix
    assert choose(BASE, "cpu:neon", Policy()).kernel is not Kernel


@pytest.mark.parametrize("seed", range(40))
def test_packed_bytes_are_what_is_packed(seed):
    spec = random_spec(seed)
    packed = Kernel.pack(random_weight(spec, seed))["weight"]
    if spec.ragged:
        assert Kernel.packed_bytes(spec) > 0
    else:
        assert packed.nbytes == Kernel.packed_bytes(spec)


LAYER = LinearSpec(128, 512, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
COMMON = (
    LAYER.replace(block=(1, 128)), LAYER.replace(weight=types.uint3b4, block=(1, 128)), LAYER.replace(weight=types.uint6b32),
    LAYER.replace(weight=types.float4_e2m1, block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(128, 512)),
    LAYER.replace(weight=types.uint4, block=(1, 32), scale_dtype=torch.uint8, scale2_block=(1, 256), zero="float"),
    LAYER.replace(weight=types.int8, block=(1, 512)),
)  # fmt: skip


@pytest.mark.parametrize("spec", COMMON, ids=str)
def test_common_layers_take_no_more_memory_than_codes_and_scales(spec):
    super_scales = 128 * 2 * 8 if spec.scale2_block else 0  # float32 for each row and 256 columns, of scales and offsets
    assert Kernel.packed_bytes(spec) <= spec.weight_bytes() + super_scales + 256 + 512 + 1024
    assert not packed_weight.layout_of(spec).has_column_map


def test_long_reductions_are_as_exact_as_torch(kernel_level):
    for k, block in ((8192, (1, 8192)), (8192, (1, 16)), (5000, (1, 5000))):
        spec = LinearSpec(32, k, types.uint4b8, block, act_dtype=torch.float32)
        weight = random_weight(spec, 1)
        packed = list(Kernel.pack(weight).values())
        for m in (1, 4):
            x = inputs(m, spec, m)
            check(Kernel.apply(x, packed, None, spec), x, weight)
