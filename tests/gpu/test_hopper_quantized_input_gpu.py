"""Inputs that are quantized before a call of the Hopper kernels, on an H100 or H200: the bits of a tensor, and exact results."""

import pytest
import torch
from graphs import captured
from test_hopper_gpu import run_concurrently
from test_hopper_scaled_gpu import BLOCKS, FP8, INT8, PER_TENSOR
from test_hopper_scaled_gpu import SPECS as SCALED
from test_hopper_w4a8_gpu import FP8 as W4AFP8
from test_hopper_w4a8_gpu import INT8 as W4A8
from test_hopper_w4a8_gpu import SPECS as FOUR_BITS

from bitline import InputError, Platform, QuantizedInput, QuantLinear
from bitline.kernels.hopper import runtime, scaled_linear
from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel
from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel
from bitline.quantized_input import code_dtype, reference_input, scale_columns, scale_count
from bitline.testing.generators import inputs, lossless_weight, random_weight
from bitline.types import ActSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not GluonHopperScaledMMLinearKernel.is_supported(Platform.detect("cuda")),
        reason="needs Hopper",
    ),
]
AZP = INT8.replace(act=ActSpec(INT8.weight, symmetric=False), bias=True)
CASES = [(GluonHopperScaledMMLinearKernel, spec) for spec in SCALED + PER_TENSOR]
CASES += [(GluonHopperW4A8LinearKernel, spec) for spec in FOUR_BITS]
FEW = [(k, s) for k, s in CASES if s in (FP8, BLOCKS, W4A8, W4AFP8)] + [(GluonHopperScaledMMLinearKernel, AZP)]
SIZES = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 129, 300)
CASE = pytest.mark.parametrize(("kernel", "spec"), CASES, ids=lambda v: v.key if hasattr(v, "key") else v.__name__)
SOME = pytest.mark.parametrize(("kernel", "spec"), FEW, ids=lambda v: v.key if hasattr(v, "key") else v.__name__)


def layer_of(kernel, weight):
    layer = QuantLinear(weight, kernel=kernel.__name__)
    assert layer.choice.kernel is kernel and kernel.takes_quantized_input
    return layer


def quantized(x, weight):
    return reference_input(x, weight.spec.act, weight.input_scale, weight.input_zero)


def chosen(m, spec, *, small):
    """Codes, scales and zero points that quantize no tensor. small: whose products with a lossless weight add up exactly."""
    act, g = spec.act, torch.Generator().manual_seed(m)
    count = scale_count(act, m, spec.k)
    if act.dtype.kind == "int":
        codes = torch.randint(-2, 3, (m, spec.k), generator=g) if small else torch.randint(-128, 128, (m, spec.k), generator=g)
        codes = codes.to(torch.int8)
    elif small:
        codes = torch.randint(-2, 3, (m, spec.k), generator=g).to(torch.float8_e4m3fn)
    else:
        raw = torch.randint(0, 256, (m, spec.k), generator=g).to(torch.uint8)
        codes = torch.where(raw & 127 == 127, raw - 1, raw).view(torch.float8_e4m3fn)  # without NaN
    exponents = torch.randint(-3, 4, (count,), generator=g).float()
    factor = 1.0 if small or act.scale == "e8m0" else 0.5 + torch.rand(count, generator=g)
    zero = None
    if not act.symmetric:
        zero = (
            torch.randint(-3, 4, (count,), generator=g).int() if small else torch.randint(-128, 128, (count,), generator=g).int()
        )
        zero = zero.cuda()
    return QuantizedInput(codes.cuda(), (2.0**exponents * factor).cuda(), zero)


def parts64(q, weight):
    """x and W in float64, and the bias or 0."""
    bias = 0.0 if weight.bias is None else weight.bias.double()
    act, k = weight.spec.act, weight.spec.k
    columns = scale_columns(act, k)
    spread = lambda t: (
        t.double().view(-1, columns).repeat_interleave(-(-k // columns) if columns == 1 else act.group_size, 1)[:, :k]
    )
    x = q.codes.double() if q.codes.dtype == torch.int8 else q.codes.float().double()
    if q.zero is not None:
        x = x - spread(q.zero)
    return x * spread(q.scales), weight.dequantize(torch.float32).double(), bias


def same_bits(kernel, spec, monkeypatch, *, quantized_first):
    """quantized_first: which of both calls compiles."""
    for module, name in ((runtime, "binaries"), (scaled_linear, "_plans")):
        monkeypatch.setattr(module, name, {})
    weight = random_weight(spec, 1, "cuda")
    layer = layer_of(kernel, weight)
    for m in SIZES:
        x = inputs(m, spec, m, "cuda")
        q = quantized(x, weight)
        for _ in range(3):  # compiles, launches, and for a tensor takes the eager path
            found, want = (layer(q), layer(x)) if quantized_first else reversed((layer(x), layer(q)))
            assert torch.equal(found, want), f"M={m}"


@CASE
def test_the_bits_of_a_tensor_that_quantizes_to_the_same_codes(kernel, spec, monkeypatch):
    same_bits(kernel, spec, monkeypatch, quantized_first=True)


@SOME
def test_the_bits_of_a_tensor_that_ran_before(kernel, spec, monkeypatch):
    same_bits(kernel, spec, monkeypatch, quantized_first=False)


@CASE
def test_chosen_codes_give_exact_results(kernel, spec):
    """Scales and zero points of any size, a static scheme's other than the layer's own: exact in float32, so rounded once."""
    weight = lossless_weight(spec, 3, "cuda")
    layer = layer_of(kernel, weight)
    for m in SIZES:
        q = chosen(m, spec, small=True)
        x, w, bias = parts64(q, weight)
        want = (x @ w.T + bias).to(spec.act_dtype)
        assert want.abs().max() > 1
        for _ in range(2):
            assert torch.equal(layer(q), want), f"M={m}"


@CASE
def test_every_code_and_scale_counts(kernel, spec):
    weight = random_weight(spec, 5, "cuda")
    layer = layer_of(kernel, weight)
    for m in (1, 8, 33, 65, 300):
        q = chosen(m, spec, small=False)
        if spec.act_dtype == torch.float16:
            q = q._replace(scales=q.scales / 64)  # within float16's range
        x, w, bias = parts64(q, weight)
        want, size = x @ w.T + bias, x.abs() @ w.abs().T
        # Half a step of y, and sums of E4M3 products, of which tensor cores keep some 14 bits
        allowed = want.abs() / (1024 if spec.act_dtype == torch.float16 else 128) + size / 256 + 1e-6
        assert ((layer(q).double() - want).abs() <= allowed).all(), f"M={m}"
        assert size.mean() / 256 < want.abs().mean() / 4, "a tolerance that would hide a wrong scale"


@SOME
def test_a_row_depends_on_its_own_codes_and_scales(kernel, spec):
    layer = layer_of(kernel, random_weight(spec, 1, "cuda"))
    for m in (2, 8, 33, 70, 300):
        q = chosen(m, spec, small=False)
        clean, row = layer(q), m - 1
        codes, scales = q.codes.clone().view(torch.int8), q.scales.clone().view(m, -1)
        codes[row, -1] ^= 0x40
        scales[row, -1] *= 2
        for changed in (q._replace(codes=codes.view(q.codes.dtype)), q._replace(scales=scales.view(q.scales.shape))):
            y = layer(changed)
            assert torch.equal(y[:row], clean[:row]) and not torch.equal(y[row], clean[row]), f"M={m}"


def test_nan_reaches_its_row_alone():
    for spec in (FP8, BLOCKS):
        layer = layer_of(GluonHopperScaledMMLinearKernel, random_weight(spec, 1, "cuda"))
        for m in (2, 16, 70):
            q = chosen(m, spec, small=False)
            clean, codes, scales = layer(q), q.codes.clone().view(torch.uint8), q.scales.clone().view(m, -1)
            codes[0, 17] = 0x7F
            scales[0, 0] = float("nan")
            for bad in (q._replace(codes=codes.view(q.codes.dtype)), q._replace(scales=scales.view(q.scales.shape))):
                y = layer(bad)
                assert y[0].isnan().all() and torch.equal(y[1:], clean[1:])


@SOME
def test_shapes_and_alignment(kernel, spec):
    weight = random_weight(spec.replace(k=512, block=spec.block if spec.block[1] == 128 else (1, 512)), 1, "cuda")
    layer, spec = layer_of(kernel, weight), weight.spec
    empty = QuantizedInput(*(None if t is None else t[:0] for t in quantized(inputs(2, spec, 2, "cuda"), weight)))
    assert layer(empty).shape == (0, spec.n) and layer(empty).dtype == spec.act_dtype
    for m in (6, 90):
        q = quantized(inputs(m, spec, m, "cuda"), weight)
        want = layer(q)
        lead = QuantizedInput(*(None if t is None else t.view(2, m // 2, -1) for t in q))
        assert torch.equal(layer(lead), want.view(2, m // 2, -1))
        apart = QuantizedInput(*(None if t is None else shifted(t) for t in q))
        assert apart.codes.data_ptr() % 16 and apart.scales.data_ptr() % 16
        for _ in range(2):
            assert torch.equal(layer(apart), want)
        wide = q._replace(codes=torch.cat([q.codes.view(torch.uint8)] * 2, 1).view(q.codes.dtype)[:, :512])
        assert not wide.codes.is_contiguous() and torch.equal(layer(wide), want)
        with pytest.raises(InputError, match="on one GPU"):
            layer(q._replace(scales=q.scales.cpu()))


def shifted(tensor):
    """A copy that starts one element after an aligned address."""
    storage = torch.empty(tensor.nbytes + tensor.itemsize, dtype=torch.uint8, device="cuda")
    out = storage[tensor.itemsize :].view(tensor.dtype).view(tensor.shape)
    return out.copy_(tensor)


@SOME
@pytest.mark.parametrize("m", [1, 6, 33, 300])
def test_graphs_follow_the_codes_and_streams_do_not_mix(kernel, spec, m):
    shaped = spec.replace(n=4096, k=2048, block=(1, 2048) if spec.block == (1, 520) else spec.block)
    weight = random_weight(shaped, 1, "cuda")
    layer = layer_of(kernel, weight)
    qs = [quantized(inputs(m, shaped, seed, "cuda"), weight) for seed in (1, 2)]
    run_concurrently(layer, qs, rounds=30, calls=10, replays=20)
    static = QuantizedInput(*(None if t is None else t.clone() for t in qs[0]))
    graph, out = captured(lambda: (layer(static), layer(static)))
    for q in (qs[1], qs[0]):
        for into, t in zip(static, q, strict=True):
            if into is not None:
                into.copy_(t)
        graph.replay()
        want = layer(q)
        assert all(torch.equal(y, want) for y in out)


@pytest.mark.parametrize("m", [1, 40, 300])
def test_tensors_and_quantized_inputs_take_turns(m):
    """They share the counters of a stream's workspace."""
    weight = random_weight(FP8.replace(n=3072, k=4096, block=(1, 4096)), 1, "cuda")
    layer = layer_of(GluonHopperScaledMMLinearKernel, weight)
    x, other = (inputs(m, weight.spec, seed, "cuda") for seed in (1, 2))
    q, want, want_other = quantized(x, weight), layer(x), layer(other)
    torch.cuda.synchronize()
    for _ in range(200):
        assert torch.equal(layer(q), want) and torch.equal(layer(other), want_other)


@CASE
def test_gradients_have_the_weight(kernel, spec):
    weight = random_weight(spec, 1, "cuda").with_bias(None)
    spec = weight.spec
    w = kernel.unpack(list(kernel.pack(weight).values()), spec)
    want = weight.dequantize(torch.float32)
    assert w.shape == (spec.n, spec.k) and (w.float() - want).abs().max() <= want.abs().max() / 128


def test_codes_have_the_dtype_of_the_scheme():
    assert {code_dtype(spec.act) for _, spec in CASES} == {torch.float8_e4m3fn, torch.int8}
