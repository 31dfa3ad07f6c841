"""Kernels on torch's CPU operators, against an exact float64 GEMM."""

import dataclasses
import itertools
from hashlib import sha256

import pytest
import torch

from bitline import bitstream
from bitline.kernels.torch import int4_cpu, int4_packing, int8_cpu, int8_mm
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel
from bitline.kernels.torch.int8_cpu import TorchInt8PackLinearKernel
from bitline.kernels.torch.int8_mm import TorchInt8ScaledMMLinearKernel
from bitline.linear import QuantLinear
from bitline.platform import cpu_features
from bitline.testing import check, check_exact, poison
from bitline.types import SCALAR_TYPES, ActSpec, LinearSpec, float4_e2m1, float8_e4m3fn, int8, uint4b8, uint8b128
from bitline.weight import QuantizedWeight

M_VALUES = (0, 1, 2, 3, 7, 17, 65)
SEED = itertools.count()
needs_vectors = pytest.mark.skipif(not cpu_features() & {"avx2", "avx512"}, reason="torch's int4 operator needs AVX2")


def make(
    n, k, weight=uint4b8, group=0, *, zero="none", act_order=False, bias=False, act=None, dtype=torch.bfloat16,
    scale_dtype=torch.float32, block=None, lossless=False,
):  # fmt: skip
    """A random weight; with lossless, one whose GEMM is exact in every intermediate dtype."""
    gen = torch.Generator().manual_seed(next(SEED))
    spec = LinearSpec(
        n, k, weight, block or (1, group or k), scale_dtype=scale_dtype, zero=zero, act_order=act_order, act=act,
        act_dtype=dtype, bias=bias,
    )  # fmt: skip
    top = 1 << weight.bits
    raw = torch.randint(0, top, (n, k), generator=gen)
    if weight.kind == "float":  # no NaN codes
        raw = torch.tensor([c for c, v in enumerate(weight.values()) if abs(v) < 1e9])[raw % (top - 2)]
    scale = torch.rand(spec.grid, generator=gen) / 8 + 0.01
    zeros = torch.randint(0, top, spec.grid, generator=gen).to(torch.uint8)
    offset = torch.randn(spec.grid, generator=gen) / 8
    if lossless:
        scale = 2.0 ** torch.randint(-2, 1, spec.grid, generator=gen)
        offset = torch.randint(-2, 3, spec.grid, generator=gen).float()
    made = QuantizedWeight(
        spec,
        bitstream.pack(raw.to(torch.uint8), weight.bits),
        scale.to(scale_dtype),
        zero=zeros if zero == "int" else None,
        offset=offset if zero == "float" else None,
        perm=torch.randperm(k, generator=gen).int() if act_order else None,
        input_scale=None if act is None or act.dynamic else torch.tensor(0.03),
        input_zero=None if act is None or act.dynamic or act.symmetric else torch.tensor(5),
        bias=torch.randint(-3, 4, (n,), generator=gen).float() if bias else None,
    )
    return made


def inputs(m, weight, *, lossless=False):
    gen = torch.Generator().manual_seed(next(SEED))
    x = torch.randn(m, weight.spec.k, generator=gen)
    if lossless:  # one small integer per token, so each output is one weight times it
        x = torch.zeros_like(x)
        if m:
            at = torch.randint(0, weight.spec.k, (m, 1), generator=gen)
            x.scatter_(1, at, torch.randint(-1, 2, (m, 1), generator=gen).float())
    return x.to(weight.spec.act_dtype)


def run(kernel, weight, x):
    assert kernel.can_implement(weight.spec), kernel.can_implement(weight.spec).reason
    packed = kernel.pack(weight)
    bias = None if weight.bias is None else weight.bias.to(x.dtype)
    with poison():
        return kernel.apply(x, list(packed.values()), bias, weight.spec)


def verify(kernel, weight, m_values=M_VALUES):
    packed = list(kernel.pack(weight).values())
    bias = None if weight.bias is None else weight.bias.to(weight.spec.act_dtype)
    for m in m_values:
        x = inputs(m, weight)
        with poison():
            out = kernel.apply(x, packed, bias, weight.spec)
        check(out, x, weight)


INTEGERS = [t for t in SCALAR_TYPES.values() if t.kind == "int" and t.bits > 1]


# ---- int4 ------------------------------------------------------------------------------------------------------------


@needs_vectors
class TestInt4:
    kernel = TorchInt4PackLinearKernel

    def test_layout_is_known_here(self):
        assert int4_packing.layout() is not None

    @pytest.mark.parametrize("scalar", [*INTEGERS, float4_e2m1, SCALAR_TYPES["float6_e2m3"]], ids=str)
    @pytest.mark.parametrize("zero", ["none", "int", "float"])
    def test_every_type(self, scalar, zero):
        if zero == "int" and scalar.kind != "int":
            pytest.skip("float codes have no zero points")
        verify(self.kernel, make(80, 192, scalar, 64, zero=zero))

    @pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 1024, 0])
    @pytest.mark.parametrize("n,k", [(50, 70), (48, 130), (64, 1024), (3, 32), (192, 576)])
    def test_shapes_and_groups(self, n, k, group):
        verify(self.kernel, make(n, k, uint4b8, min(group, k), zero="int", bias=True))

    @pytest.mark.parametrize("m", [1, 3, 300])
    def test_lossless(self, m):
        for scalar, zero in itertools.product([*INTEGERS, float4_e2m1], ["none", "float"]):
            if scalar.bits > 4 and zero == "float":
                continue  # such a weight has no exact bfloat16 form
            weight = make(70, 96, scalar, 32, zero=zero, lossless=True, act_order=True)
            x = inputs(m, weight, lossless=True)
            check_exact(run(self.kernel, weight, x), x, weight)

    @pytest.mark.parametrize("scalar", [uint4b8, uint8b128, SCALAR_TYPES["uint3"]], ids=str)
    def test_act_order(self, scalar):
        verify(self.kernel, make(70, 160, scalar, 32, act_order=True, zero="int" if not scalar.bias else "none"))

    @pytest.mark.parametrize("scalar", [uint4b8, int8], ids=str)
    def test_both_sides_of_the_crossover(self, scalar):
        weight = make(1088, 1024, scalar, 128, bias=True)
        planes = 1 if scalar is uint4b8 else 2
        at = int4_cpu._panel_crossover_m(1088 * 1024 * planes, planes, "amx" in cpu_features())
        verify(self.kernel, weight, [int(at) - 1, int(at), int(at) + 1, int(at) + 2])

    def test_several_panels(self, monkeypatch):
        monkeypatch.setattr(int4_cpu, "PANEL", 130 * 256)
        for scalar, zero in ((uint4b8, "none"), (SCALAR_TYPES["uint8"], "int"), (SCALAR_TYPES["uint4"], "int")):
            verify(self.kernel, make(300, 256, scalar, 128, zero=zero, bias=True), [2000])

    def test_without_a_known_layout(self, monkeypatch):
        monkeypatch.setattr(int4_packing, "layout", lambda: None)
        verify(self.kernel, make(64, 64), [600])

    def test_packing_in_chunks_equals_packing_the_whole(self):
        codes = torch.randint(0, 16, (192, 64), dtype=torch.uint8)
        parts = [int4_packing.convert(codes[r : r + 64]) for r in range(0, 192, 64)]
        assert torch.equal(torch.cat(parts), int4_packing.convert(codes))

    def test_block_scales_and_shards(self):
        whole = make(300, 512, uint4b8, block=(128, 128))
        verify(self.kernel, whole.shard(0, 1, 4), [1, 5])
        verify(self.kernel, whole.shard(1, 1, 8), [1, 5])
        shard = make(64, 192, uint4b8, 96).narrow(1, 64, 160)  # as many columns as a group, but parts of two groups
        verify(self.kernel, shard, [1, 5])
        assert "20 columns" in self.kernel.can_implement(whole.narrow(1, 20, 500).spec).reason

    @pytest.mark.parametrize("act", ["int8-dynamic-token", "int8-static-tensor-asym", "int8-dynamic-group32"])
    def test_quantized_inputs(self, act):
        verify(self.kernel, make(64, 128, uint4b8, 32, act=ActSpec.parse(act)))

    @pytest.mark.parametrize(
        "change,reason",
        [
            ({"act_dtype": torch.float16}, "60 times slower"),
            ({"weight": float8_e4m3fn}, "not integers"),
            ({"block": (1, 16)}, "group size 16"),
            ({"ragged": True}, "unequal size"),
        ],
    )
    def test_refusals(self, change, reason):
        verdict = self.kernel.can_implement(LinearSpec(64, 256, uint4b8, (1, 128)).replace(**change))
        assert not verdict and reason in verdict.reason and verdict.fix

    def test_packed_size(self):
        for scalar, claimed in ((uint4b8, 1.07), (uint8b128, 1.07)):
            weight = make(256, 1024, scalar, 128, scale_dtype=torch.float16)
            size = sum(t.nbytes for t in self.kernel.pack(weight).values())
            assert size == self.kernel.packed_bytes(weight.spec) <= claimed * weight.nbytes()


# ---- int8 ------------------------------------------------------------------------------------------------------------

FITS = [t for t in INTEGERS if t.name != "uint8"]


@needs_vectors
class TestInt8Pack:
    kernel = TorchInt8PackLinearKernel

    @pytest.mark.parametrize("scalar", [*FITS, float4_e2m1], ids=str)
    def test_every_type(self, scalar):
        verify(self.kernel, make(48, 130, scalar))

    @pytest.mark.parametrize("n,k", [(50, 70), (1, 1), (33, 17), (64, 64)])
    def test_shapes(self, n, k):
        verify(self.kernel, make(n, k, uint8b128, bias=True))
        verify(self.kernel, make(n, k, int8, block=(n, k), act_order=True))

    @pytest.mark.parametrize("m", [1, 200])
    def test_lossless(self, m, monkeypatch):
        monkeypatch.setattr(int8_cpu, "PANEL", 1000)
        for scalar in FITS:
            weight = make(70, 90, scalar, lossless=True, act_order=True)
            x = inputs(m, weight, lossless=True)
            check_exact(run(self.kernel, weight, x), x, weight)

    def test_both_sides_of_the_crossover(self):
        weight = make(1000, 1024, int8, bias=True)
        at = int(int8_cpu._panel_crossover_m(1000 * 1024, "amx" in cpu_features()))
        verify(self.kernel, weight, [at - 1, at, at + 1, at + 2])

    def test_refusals(self):
        spec = LinearSpec(64, 256, int8, (1, 256))
        for change, reason in (
            ({"block": (1, 128)}, "groups of 128"), ({"zero": "int"}, "zero points"), ({"weight": float8_e4m3fn}, "float8"),
            ({"weight": SCALAR_TYPES["uint8"]}, "uint8"), ({"act_dtype": torch.float32}, "30 times slower"),
        ):  # fmt: skip
            verdict = self.kernel.can_implement(spec.replace(**change))
            assert not verdict and reason in verdict.reason and verdict.fix


ACTS = [
    f"{dtype}-{how}{asym}"
    for dtype in ("int8", "int4")
    for how in ("dynamic-token", "dynamic-tensor", "static-tensor")
    for asym in ("", "-asym")
]


class TestInt8MM:
    kernel = TorchInt8ScaledMMLinearKernel

    @pytest.mark.parametrize("act", ACTS)
    @pytest.mark.parametrize("scalar", [int8, uint4b8], ids=str)
    def test_schemes(self, act, scalar):
        verify(self.kernel, make(50, 70, scalar, act=ActSpec.parse(act), bias=True))

    @pytest.mark.parametrize("n,k", [(1, 1), (8, 8), (33, 17), (48, 130)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_shapes_and_dtypes(self, n, k, dtype):
        act = ActSpec.parse("int8-dynamic-token")
        verify(self.kernel, make(n, k, int8, act=act, dtype=dtype))
        verify(self.kernel, make(n, k, uint8b128, act=act, dtype=dtype, block=(n, k), act_order=True))

    @pytest.mark.parametrize("m", [1, 2, 8, 9, 1030])
    def test_several_output_tiles(self, m, monkeypatch):
        monkeypatch.setattr(int8_mm, "CACHED", 1000)
        monkeypatch.setattr(int8_mm, "ACCUMULATORS", {"cpu": 200})
        verify(self.kernel, make(50, 70, int8, act=ActSpec.parse("int8-dynamic-token-asym"), bias=True), [m])

    def test_accumulation_is_exact(self):
        """Activations whose codes are known: every output is an integer that float32 represents."""
        weight = make(40, 64, int8, act=ActSpec.parse("int8-static-tensor-asym"), dtype=torch.float32, lossless=True)
        weight = dataclasses.replace(weight, input_scale=torch.tensor(1.0), input_zero=torch.tensor(-7))
        for m in (1, 5, 20):
            x = torch.randint(-100, 101, (m, 64)).float()
            check_exact(run(self.kernel, weight, x), x, weight)

    def test_refusals(self):
        spec = LinearSpec(64, 256, int8, (1, 256), act=ActSpec.parse("int8-dynamic-token"))
        for change, reason in (
            ({"block": (1, 128)}, "groups of 128"), ({"zero": "int"}, "zero points"), ({"act": None}, "16 or 32 bit"),
            ({"act": ActSpec.parse("float8_e4m3fn-dynamic-token")}, "float8"),
            ({"k": 1 << 17, "block": (1, 1 << 17)}, "overflow"), ({"act": ActSpec.parse("int8-dynamic-group32")}, "group32"),
        ):  # fmt: skip
            verdict = self.kernel.can_implement(spec.replace(**change))
            assert not verdict and reason in verdict.reason and verdict.fix


# ---- what holds for each ---------------------------------------------------------------------------------------------

EXAMPLES = [
    (TorchInt4PackLinearKernel, {"weight": uint4b8, "group": 32, "act_order": True, "bias": True}),
    (TorchInt4PackLinearKernel, {"weight": uint8b128, "group": 32}),
    (TorchInt8PackLinearKernel, {"weight": int8, "act_order": True, "bias": True}),
    (TorchInt8ScaledMMLinearKernel, {"weight": int8, "act": ActSpec.parse("int8-dynamic-token-asym"), "bias": True}),
]


@pytest.mark.parametrize("kernel,kind", EXAMPLES)
class TestEvery:
    def test_pack_is_pure(self, kernel, kind):
        weight = make(80, 128, **kind)
        digest = lambda: [sha256(t.contiguous().view(-1).view(torch.uint8).numpy()).digest() for t in weight.tensors().values()]
        before = digest()
        first = kernel.pack(weight)
        own = {t.data_ptr() for t in weight.tensors().values()}
        assert not any(t.data_ptr() in own for t in first.values() if t.numel())
        for t in first.values():
            t.fill_(0)
        with poison():
            second, third = kernel.pack(weight), kernel.pack(weight)
        assert digest() == before
        assert all(torch.equal(second[k], third[k]) for k in first)
        x = inputs(5, weight)
        check(
            kernel.apply(x, list(second.values()), None if weight.bias is None else weight.bias.to(x.dtype), weight.spec),
            x,
            weight,
        )

    def test_through_a_layer(self, kernel, kind):
        weight = make(80, 128, **kind)
        layer = QuantLinear(weight, kernel=kernel.__name__)
        x = inputs(24, weight).view(4, 6, 128).transpose(0, 1)
        check(layer(x).reshape(24, 80), x.reshape(24, 128), weight)
