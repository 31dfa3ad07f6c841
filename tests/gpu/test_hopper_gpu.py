"""GluonHopperLinearKernel on an H100 or H200: conformance, every tile, cut tiles on two streams, graphs side by side."""

import copy

import pytest
import torch

from bitline import InputError, Platform, QuantLinear, types
from bitline.kernels.hopper import heuristics, launch
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.hopper.scheme import scheme_of
from bitline.testing import check, check_exact
from bitline.testing.conformance import check_kernel
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_weight
from bitline.types import LinearSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not GluonHopperLinearKernel.is_supported(Platform.detect("cuda")), reason="needs Hopper"
    ),
]
BASE = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
E2M1 = BASE.replace(n=256, k=1024, weight=types.float4_e2m1)
E4M3 = BASE.replace(weight=types.float8_e4m3fn, block=(1, 520))
SPECS = [
    BASE, BASE.replace(n=512, k=1024, act_dtype=torch.float16, scale_dtype=torch.float16, bias=True),
    BASE.replace(n=256, k=1024, block=(1, 32)), BASE.replace(block=(1, 16), act_dtype=torch.float16), BASE.replace(n=67, k=129),
    BASE.replace(n=96, k=768, block=(1, 192)), BASE.replace(block=(1, 520), scale_dtype=torch.float32, act_order=True),
    BASE.replace(weight=types.uint4, zero="int", block=(1, 64)), BASE.replace(weight=types.int4, bias=True),
    BASE.replace(weight=types.uint8b128), BASE.replace(weight=types.int8, act_dtype=torch.float16),
    BASE.replace(weight=types.uint8, zero="int"), BASE.replace(weight=types.uint8, zero="int", act_dtype=torch.float16),
    E2M1.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
    E2M1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 1024)),
    E2M1.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu, act_dtype=torch.float16), E2M1.replace(act_dtype=torch.float16),
    E2M1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 1024), act_dtype=torch.float16),
    BASE.replace(block=(1, 48)), BASE.replace(block=(1, 96), weight=types.uint4, zero="int"), BASE.replace(block_offset=(0, 64)),
    BASE.replace(block_offset=(0, 16), act_dtype=torch.float16), BASE.replace(block=(1, 640), block_offset=(0, 120)),
    E4M3.replace(bias=True), E4M3.replace(act_dtype=torch.float16), E4M3.replace(block=(128, 128), scale_dtype=torch.float32),
    E4M3.replace(block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
]  # fmt: skip


def packed(weight):
    return list(GluonHopperLinearKernel.pack(weight).values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_conformance(spec):
    check_kernel(GluonHopperLinearKernel, [spec], device="cuda")


@pytest.mark.parametrize(
    "shape", list(heuristics._COSTS), ids=lambda t: f"{t.bm}+{t.bm2} nb{t.nb} mr{t.mr} x{t.each}{' turns' * t.turns}"
)
def test_every_tile_whole_and_cut(shape):
    for spec in (BASE.replace(n=1024, k=2048, bias=True), BASE.replace(weight=types.uint4, zero="int", block=(1, 64))):
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight = make(spec, 3, "cuda")
            bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
            for m in (17, 90, 321):
                x = given(m, spec, m, "cuda")
                for programs in (1, 5, 48, 64, 132):
                    tile = shape._replace(p=programs)
                    plan = launch._WidePlan(spec, scheme_of(spec), m, bias is not None, 132, tile)
                    judge(plan(x, packed(weight), bias), x, weight)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_every_scheme_in_every_tile_of_many_rows(spec):
    weight = random_weight(spec, 3, "cuda")
    bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
    x = inputs(300, spec, 1, "cuda")
    for shape in heuristics._COSTS:
        plan = launch._WidePlan(spec, scheme_of(spec), 300, bias is not None, 132, shape._replace(p=3))
        words = packed(weight)
        at = x.index_select(1, words[4]) if words[4].numel() else x
        at = torch.nn.functional.pad(at, (0, -spec.k % 64)) if spec.k % 8 else at
        check(plan(at, words, bias), x, weight)


REGISTERS = [  # (8-row tiles of x, tile): words in registers, and those of the ring that the rule names by itself
    (1, heuristics.Decode(1, 2, 16)), (1, heuristics.Decode(2, 1, 4, 72)), (1, heuristics.Decode(2, 1, 8, 128)),
    (2, heuristics.Decode(1, 1, 16)),    (2, heuristics.Decode(2, 1, 16, swap=True)), (2, heuristics.Decode(2, 1, 4, 128)),
    (1, heuristics.Decode(1, 1, 16, 0, 2)),
    (1, heuristics.Decode(1, 1, 16, 0, 3, 2, True)), (1, heuristics.Decode(2, 1, 8, 0, 4, 2, True)),
]  # fmt: skip
FEW = REGISTERS + [(mt, kind.tile) for mt, kinds in heuristics._FEW.items() for kind in kinds]
KINDS = [  # warps that share x or not, numbers of tiles that are no power of two, programs that share K, x from the cache
    heuristics.Decode(7, 1, 4, 0, 2, 1, True), heuristics.Decode(3, 1, 8, 0, 3, 4, True, early=True),
    heuristics.Decode(1, 1, 16, 0, 3, 2, True, early=True), heuristics.Decode(2, 1, 8, 0, 3, 4, True, early=True, cut=4),
    heuristics.Decode(2, 1, 8, 0, 2), heuristics.Decode(2, 1, 16, swap=True),
]  # fmt: skip


def few_plan(tile, spec, m, bias=False):
    scheme = scheme_of(spec)
    return launch._DecodePlan(spec, scheme, m, bias, tile.fitted(scheme, m))


def run_tile(tile, weight, x, bias=None):
    """What a call would do with this tile."""
    plan = few_plan(tile, weight.spec, x.shape[0], bias is not None)
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    k = x.shape[1]
    if k % 64 and (plan.pads or k % 8):
        x = torch.nn.functional.pad(x, (0, -k % 64))
    return plan(x, packed(weight), bias)


@pytest.mark.parametrize("mt, tile", FEW, ids=lambda v: "-".join(str(int(i)) for i in v) if isinstance(v, tuple) else str(v))
def test_every_tile_of_few_rows(mt, tile):
    for n, k in ((1024, 2048), (1032, 4160), (517, 4304)):
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight = make(BASE.replace(n=n, k=k), 3, "cuda")
            for m in (8 * mt - 7, 8 * mt - 2, 8 * mt):
                x = given(m, weight.spec, m, "cuda")
                judge(run_tile(tile, weight, x), x, weight)


@pytest.mark.parametrize("tile", KINDS, ids=lambda v: "-".join(str(int(i)) for i in v))
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_every_kind_of_tile_with_every_scheme(spec, tile):
    n = 394
    if spec.scale2_block == (spec.n, spec.k):
        spec = spec.replace(scale2_block=(n, spec.k))
    spec = spec.replace(n=n)
    for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
        weight = make(spec, 3, "cuda")
        bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
        for m in (5, 13) + ((20,) if tile.depth else ()):
            x = given(m, spec, m, "cuda")
            judge(run_tile(tile, weight, x, bias), x, weight)


def side_by_side(call, xs, rounds=20, calls=5, replays=10):
    """Each x on a stream of its own, and then in a captured graph of several calls, gives what it gives alone."""
    want = [call(x) for x in xs]
    streams, graphs = [torch.cuda.Stream() for _ in xs], []
    torch.cuda.synchronize()
    for _ in range(rounds):
        found = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                found.append(call(x))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    for x in xs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [call(x) for _ in range(calls)]
        graphs.append((graph, out))
    for _ in range(replays):
        for stream, (graph, _out) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for (_, out), w in zip(graphs, want, strict=True) for y in out)


def test_few_rows_cut_along_k_on_two_streams_and_in_two_graphs():
    spec = BASE.replace(n=1024, k=4096)
    weight = packed(random_weight(spec, 1, "cuda"))
    for tile in {kind.tile for kinds in heuristics._FEW.values() for kind in kinds if kind.tile.cut > 1}:
        for m in (8, 16, 23, 32):
            plan = few_plan(tile, spec, m)
            assert plan.scratch
            side_by_side(lambda x, plan=plan: plan(x, weight, None), [inputs(m, spec, seed, "cuda") for seed in (1, 2)])


@pytest.mark.parametrize("m", [1, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 65, 97, 129, 200, 257, 300, 1000, 2049])
def test_rows_on_layers_of_several_shapes(m):
    for n, k in ((4096, 4096), (1024, 4096), (10240, 2048), (2053, 4304), (4104, 4160)):
        spec = BASE.replace(n=n, k=k)
        for make, given, judge in ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact)):
            weight = make(spec, 1, "cuda")
            x = given(m, spec, m, "cuda")
            judge(GluonHopperLinearKernel.apply(x, packed(weight), None, spec), x, weight)


def test_cut_tiles_on_two_streams_and_in_two_graphs():
    weight = random_weight(BASE.replace(n=4096, k=4096), 1, "cuda")
    layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
    side_by_side(layer, [inputs(64, layer.spec, seed, "cuda") for seed in (1, 2)], rounds=100, calls=10, replays=30)


@pytest.mark.parametrize(
    "shape", list(heuristics._COSTS), ids=lambda t: f"{t.bm}+{t.bm2} nb{t.nb} mr{t.mr} x{t.each}{' turns' * t.turns}"
)
def test_each_cut_tile_on_two_streams_and_in_two_graphs(shape):
    spec = BASE.replace(n=1024, k=2048)
    weight = packed(random_weight(spec, 1, "cuda"))
    m = shape.bm + shape.bm2 + 7
    plan = launch._WidePlan(spec, scheme_of(spec), m, False, 132, shape._replace(p=29))
    assert plan.scratch
    side_by_side(lambda x: plan(x, weight, None), [inputs(m, spec, seed, "cuda") for seed in (1, 2)])


@pytest.mark.parametrize("m", [1, 6, 16, 24, 40, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layers_own_call_gives_what_the_kernel_gives(m, bias):
    spec = BASE.replace(n=1024, k=2048, bias=bias)
    layer = QuantLinear(random_weight(spec, 1, "cuda"), kernel="GluonHopperLinearKernel")
    twin = copy.deepcopy(layer)
    x = inputs(m, spec, m, "cuda")
    want = launch.run(x, layer._packed, layer.bias, spec)
    apart = torch.empty(m, 2 * spec.k, device="cuda", dtype=x.dtype)[:, : spec.k].copy_(x)
    unaligned = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view_as(x).copy_(x)
    given_in_turn = (x, x, x, x.clone(), apart, unaligned, *3 * [x.view(1, m, -1)], x.view(m, 1, 1, -1))
    for call in (layer, twin, layer.cuda()):
        for given in given_in_turn:
            y = call(given)
            assert y.shape == (*given.shape[:-1], spec.n) and torch.equal(y.view(m, -1), want)
        assert {x.shape, (1, m, spec.k)} <= set(call._eager.entries) and all(call._eager.entries.values())
    graded = x.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(layer(x), want) and torch.equal(layer(graded), want)
    with pytest.raises(InputError, match="no gradient"):
        layer(graded)
    with pytest.raises(InputError, match="does not fit the layer"):
        layer(x.half())
    moved = layer._packed[0]
    moved.data = moved.data.clone()  # whoever moves a weight behind the layer's back
    assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize("spec", [BASE, BASE.replace(n=4096, k=4096), BASE.replace(n=67, k=129, bias=True)], ids=lambda s: s.key)
@pytest.mark.parametrize("m", [1, 16, 24, 64, 300])
def test_a_captured_call_follows_its_input(m, spec):
    weight = random_weight(spec, 1, "cuda")
    layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
    x = inputs(m, spec, 0, "cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        z = layer(x)
    for seed in range(1, 4):
        x.copy_(inputs(m, spec, seed, "cuda"))
        y.fill_(float("nan"))
        graph.replay()
        check(y, x, weight)
        assert torch.equal(y, z) and torch.equal(y, layer(x))


@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_calls_with_new_tensors_use_them(m):
    """Maps and addresses are remembered between calls, and memory that is freed is used again."""
    spec = BASE.replace(n=512, k=1024)
    for seed in range(8):
        weight = random_weight(spec, seed, "cuda")
        layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
        kept = []
        for more in range(3):
            x = inputs(m, spec, 10 * seed + more, "cuda")
            kept.append((layer(x), x))
            torch.ops.bitline.linear(x, layer._packed, None, "GluonHopperLinearKernel", spec.key)
        for y, x in kept:
            check(y, x, weight)


def test_an_input_elsewhere_is_refused():
    weight = random_weight(BASE, 1, "cuda")
    layer = QuantLinear(weight, kernel="GluonHopperLinearKernel")
    for m in (1, 40):
        with pytest.raises(InputError, match="another device"):
            layer(inputs(m, BASE, 1))
        x = inputs(m, BASE, 1, "cuda")
        check(layer(x), x, weight)


def test_torch_compile_keeps_the_choice_by_rows():
    layer = QuantLinear(random_weight(BASE.replace(n=512, k=1024), 1, "cuda"), kernel="GluonHopperLinearKernel")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for m in (2, 9, 70, 300):
            x = inputs(m, layer.spec, m, "cuda")
            assert torch.equal(compiled(x), layer(x))
