"""The public test tools: each catches the defect that it is for."""

import pytest
import torch

from bitline import ActSpec, Kernel, LinearSpec, QuantizedWeight, Verdict, types
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.testing import (
    check,
    check_exact,
    check_kernel,
    compare,
    inputs,
    lossless_inputs,
    lossless_weight,
    poison,
    random_spec,
    random_weight,
    reference64,
)  # fmt: skip

SPEC = LinearSpec(16, 64, types.uint4, (1, 32), zero="int", act_dtype=torch.float32)
ALLOCATIONS = (
    lambda dtype: torch.empty(3, 2, dtype=dtype),
    lambda dtype: torch.empty((2,), dtype=dtype),
    lambda dtype: torch.empty_like(torch.zeros(2, 2, dtype=dtype)),
    lambda dtype: torch.empty_strided((2, 2), (1, 2), dtype=dtype),
    lambda dtype: torch.zeros(1).new_empty(4, dtype=dtype),
    lambda dtype: torch.zeros(1).new_empty_strided((2,), (1,), dtype=dtype),
)


@pytest.mark.parametrize("allocate", ALLOCATIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_poisoned_floats_are_nan(allocate, dtype):
    with poison():
        assert bool(allocate(dtype).float().isnan().all())


@pytest.mark.parametrize("allocate", ALLOCATIONS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_poisoned_integers_are_0xaa(allocate, dtype):
    with poison():
        made = allocate(dtype).flatten()
    assert set(made.numpy().tobytes()) == {0xAA}


def test_poison_ends():
    before = (torch.empty, torch.Tensor.new_empty, torch.empty_like)
    with pytest.raises(RuntimeError), poison():
        assert torch.empty is not before[0]
        raise RuntimeError
    assert (torch.empty, torch.Tensor.new_empty, torch.empty_like) == before
    assert "new_empty" not in vars(torch.Tensor)


def test_reference64_is_the_gemm_plus_bias():
    weight = random_weight(SPEC.replace(bias=True), 1)
    x = inputs(3, SPEC)
    exact = x.double() @ weight.dequantize().double().T + weight.bias.double()
    assert reference64(x, weight).dtype == torch.float64 and torch.equal(reference64(x, weight), exact)


def test_the_tolerance_names_the_worst_element():
    weight, x = random_weight(SPEC, 2), inputs(3, SPEC)
    good = reference64(x, weight).float()
    assert check(good, x, weight).ok
    bad = good.clone()
    bad[1, 7] += 0.01
    assert not compare(bad, x, weight).ok
    with pytest.raises(AssertionError, match=r"\[1, 7\]"):
        check(bad, x, weight)
    bad[1, 7] = float("nan")
    with pytest.raises(AssertionError, match=r"\[1, 7\]: got nan"):
        check(bad, x, weight)
    with pytest.raises(AssertionError, match="expected"):
        check(good[:, :3], x, weight)
    with pytest.raises(AssertionError, match="float64"):
        check(good.double(), x, weight)


def test_lossless_data_exposes_one_wrong_term():
    weight, x = lossless_weight(SPEC, 3), lossless_inputs(3, SPEC)
    good = reference64(x, weight).float()
    check_exact(good, x, weight)
    bad = good.clone()
    bad[2, 5] += 0.5
    with pytest.raises(AssertionError, match=r"1 of 48 elements differ, the first at \[2, 5\]"):
        check_exact(bad, x, weight)
    with pytest.raises(ValueError, match="not lossless"):
        check_exact(good.half(), inputs(3, SPEC).half(), random_weight(SPEC.replace(act_dtype=torch.float16)))


def test_generators_cover_the_space_of_specs():
    specs = [random_spec(seed) for seed in range(600)]
    assert all(LinearSpec.parse(s.key) == s for s in specs)
    assert {s.weight.name for s in specs} == set(types.SCALAR_TYPES)
    for fact in ("zero", "act_order", "ragged", "act_dtype", "bias", "scale_dtype"):
        assert len({getattr(s, fact) for s in specs}) > 1, fact
    assert any(s.scale2_block for s in specs) and any(s.block_offset != (0, 0) for s in specs)
    assert len({str(s.act) for s in specs}) > 10


def test_weights_are_valid_repeatable_and_lossless():
    for seed in range(300):
        spec = random_spec(seed)
        weight = random_weight(spec, seed)
        again = random_weight(spec, seed)
        for name, tensor in weight.tensors().items():
            assert torch.equal(tensor.view(torch.uint8), again.tensors()[name].view(torch.uint8)), name
        if 0.0 not in spec.weight.values():
            with pytest.raises(ValueError, match="no code for zero"):
                lossless_weight(spec, seed)
            continue
        exact = lossless_weight(spec, seed)
        x = lossless_inputs(4, spec, seed)
        product = reference64(x, exact)
        assert torch.equal(product, product.to(torch.bfloat16).double()), spec.key
        assert float((exact.dequantize() != 0).float().mean()) <= 8 / spec.k + 0.01


# ---- broken kernels: the suite has to report each one's defect ---------------------------------------------------------


class Toy(Kernel):
    """The reference kernel, for subclasses that break one thing."""

    @classmethod
    def can_implement(cls, spec):
        return Verdict(True)

    pack = ReferenceLinearKernel.pack
    apply = ReferenceLinearKernel.apply
    cost = ReferenceLinearKernel.cost


class ForgetsARow(Toy):
    @classmethod
    def apply(cls, x, packed, bias, spec):
        y = torch.empty(x.shape[0], spec.n, dtype=x.dtype)
        y[:-1] = ReferenceLinearKernel.apply(x, packed, bias, spec)[:-1]
        return y


class OffByOneZero(Toy):
    @classmethod
    def pack(cls, weight):
        packed = ReferenceLinearKernel.pack(weight)
        return {**packed, "zero": packed["zero"] + 1}


class ForgetsBias(Toy):
    @classmethod
    def apply(cls, x, packed, bias, spec):
        return ReferenceLinearKernel.apply(x, packed, None, spec)


class ChangesTheWeight(Toy):
    @classmethod
    def pack(cls, weight):
        weight.codes.bitwise_xor_(1)
        return ReferenceLinearKernel.pack(weight)


class ChangesTheInput(Toy):
    @classmethod
    def apply(cls, x, packed, bias, spec):
        y = ReferenceLinearKernel.apply(x, packed, bias, spec)
        x.mul_(2)
        return y


class NotDeterministic(Toy):
    @classmethod
    def apply(cls, x, packed, bias, spec):
        return ReferenceLinearKernel.apply(x, packed, bias, spec) + torch.randn(x.shape[0], spec.n) * 1e-7


class NotBatchInvariant(Toy):
    batch_invariant = True

    @classmethod
    def apply(cls, x, packed, bias, spec):
        y = ReferenceLinearKernel.apply(x, packed, bias, spec)
        return y * (1 + 1e-7 * (x.shape[0] > 7))


class ForgetsZeroPointsOfTheInput(Toy):
    takes_quantized_input = True

    @classmethod
    def apply_quantized(cls, codes, scales, zero, packed, bias, spec):
        return ReferenceLinearKernel.apply_quantized(codes, scales, None, packed, bias, spec)


class FailsAtM1(Toy):
    @classmethod
    def apply(cls, x, packed, bias, spec):
        if x.shape[0] == 1:
            raise RuntimeError("no decode here")
        return ReferenceLinearKernel.apply(x, packed, bias, spec)


class CostsNothing(Toy):
    @classmethod
    def cost(cls, spec, platform, m):
        return 0.0


class CostCrashesWhereItRefuses(Toy):
    @classmethod
    def can_implement(cls, spec):
        return Verdict(not spec.bias, "a bias")

    @classmethod
    def cost(cls, spec, platform, m):
        return 1.0 / (0 if spec.bias else 1)


class NoReason(Toy):
    @classmethod
    def can_implement(cls, spec):
        return Verdict(spec.n == 16, " ")


class NoVerdict(Toy):
    @classmethod
    def can_implement(cls, spec):
        return True


class RefusesEverything(Toy):
    @classmethod
    def can_implement(cls, spec):
        return Verdict(False, "not today")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (ForgetsARow, "random_data .*nan"), (OffByOneZero, "lossless_data"), (ForgetsBias, "random_data"),
        (ChangesTheWeight, "pack changed the weight|different tensors"), (ChangesTheInput, "apply changed its input"),
        (NotDeterministic, "declared deterministic"), (NotBatchInvariant, "declared batch invariant"),
        (FailsAtM1, "no decode here"), (CostsNothing, "cost with M=1 is 0.0"),
        (CostCrashesWhereItRefuses, "ZeroDivisionError"), (NoReason, "refuses without a reason"),
        (NoVerdict, "not a Verdict"), (RefusesEverything, "implements none of the specs"),
    ],
)  # fmt: skip
def test_the_suite_catches(kernel, message):
    with pytest.raises(AssertionError, match=message):
        check_kernel(kernel, [SPEC, SPEC.replace(n=8, bias=True)])


def test_the_suite_catches_a_kernel_that_is_wrong_for_quantized_inputs_alone():
    spec = LinearSpec(16, 64, types.int8, (1, 64), act=ActSpec(types.int8, symmetric=False), act_dtype=torch.float32)
    assert check_kernel(Toy, [spec]).passed
    with pytest.raises(AssertionError, match="quantized_input"):
        check_kernel(ForgetsZeroPointsOfTheInput, [spec])


def test_the_suite_refuses_a_platform_that_the_kernel_is_not_for():
    class GpuOnly(Toy):
        platforms = ("cuda",)

    with pytest.raises(AssertionError, match="does not run on cpu"):
        check_kernel(GpuOnly, [SPEC])


def test_the_reference_conforms():
    report = check_kernel(ReferenceLinearKernel)
    assert not report.refused and len(report.passed) > 70 and "0 failures" in str(report)


def test_random_weight_gives_a_quantized_weight():
    assert isinstance(random_weight(SPEC), QuantizedWeight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_reference_conforms_on_a_gpu():
    with poison():
        assert bool(torch.empty(3, device="cuda").isnan().all())
    assert len(check_kernel(ReferenceLinearKernel, device="cuda").passed) > 70
