"""Experts on Hopper: the device code compiles, and the host's launches give the layer when each kernel does what it says."""

from types import SimpleNamespace

import pytest
import torch
from compile_targets import hopper_reports

from bitline import types
from bitline.expert_gate import ExpertGate
from bitline.experts import _stack_like
from bitline.kernels.hopper import experts, experts_plans, layout, runtime
from bitline.kernels.hopper.config import SMEM_BYTES
from bitline.kernels.hopper.experts_config import persistent_config, small_m_config
from bitline.kernels.hopper.linear import GluonHopperLinearKernel
from bitline.kernels.hopper.scheme import dequant_scheme
from bitline.testing.generators import lossless_inputs
from bitline.types import ActSpec, LinearSpec
from experts_oracle import Experts, routing, specs_of

BF16 = torch.bfloat16
DOWN = LinearSpec(64, 96, types.uint4b8, (1, 32), scale_dtype=BF16)
RELU, PLAIN = ExpertGate("relu"), ExpertGate("relu2", False)


@pytest.mark.parametrize("step", [pytest.param(17, id="17th"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)])
def test_compiles(step, tmp_path):
    pytest.importorskip("triton")
    found = hopper_reports("hopper_experts_targets.py", tmp_path, step)
    assert len(found) >= 54 // step
    for kernel in found:
        assert kernel["a_in_registers"], kernel
        if "loop" in kernel:  # else Triton's package has no disassembler here
            assert kernel["mmas"] > 0 and kernel["spills"] == 0 and kernel["loop"] <= 3.6 * kernel["weights"], kernel


def test_which_layers_it_takes():
    w4 = LinearSpec(1536, 2048, types.uint4b8, (1, 128), scale_dtype=BF16)
    assert experts.fuses_experts(w4) and experts.fuses_experts(w4.replace(n=2880, k=2880, block=(1, 32)))
    assert not experts.fuses_experts(w4.replace(act_order=True))
    assert not experts.fuses_experts(w4.replace(act=ActSpec(types.int8)))
    assert not experts.fuses_experts(w4.replace(n=1544))  # half of its rows are no whole tiles
    assert not experts.fuses_experts(w4.replace(k=2044))  # rows of x are no multiples of 16 bytes
    odd = LinearSpec(32, 45 * 64, types.uint4b8, (1, 64), scale_dtype=BF16)
    assert not experts.fuses_experts(odd)  # 2 x 45 x 32 bytes of scales: experts of a stack have gaps
    for spec in (w4, w4.replace(n=2880, k=2880, block=(1, 32)), odd):
        packed = GluonHopperLinearKernel.pack(Experts.make(spec, spec, PLAIN, 1).up[0])
        gaps = any(_stack_like(t, 2).stride(0) != t.numel() for t in packed.values() if t.dim() > 1)
        assert gaps is not experts.fuses_experts(spec)


@pytest.mark.parametrize("tile", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("gated", [True, False])
def test_configs_fit(tile, gated):
    for spec in (DOWN.replace(n=1536, k=2048, block=(1, 128)), DOWN.replace(n=32, k=64), DOWN.replace(weight=types.int8)):
        scheme = dequant_scheme(spec)
        if tile > experts.LARGEST_BLOCK:
            for blocks in (1, 8, 1000):
                large = persistent_config(spec, scheme, tile, blocks, gated, 132)
                assert large.stages >= 2 and large.smem_bytes(scheme) <= SMEM_BYTES
            continue
        for blocks in (1, 8, 1000):
            config = small_m_config(spec, scheme, tile, blocks, gated, 132)
            assert config.smem_bytes(scheme, tile) <= SMEM_BYTES and config.n16_per_cta <= layout.padded_shape(spec.n, 1)[0]


def sort(index, in_order, ranges, pairs, count, _block):
    at = 0
    for e in range(count):
        mine = (index.view(-1) == e).nonzero().view(-1)
        in_order[at : at + len(mine)] = mine
        ranges[e], ranges[count + e] = at, at + len(mine)
        at += len(mine)


def blocks(ranges, out, num_blocks, count, tile, _experts, _block):
    found = []
    for e in range(count):
        found += [(e, start, int(ranges[count + e])) for start in range(int(ranges[e]), int(ranges[count + e]), tile)]
    table = torch.tensor([*found, *[(count, 0, 0)] * (num_blocks - len(found))]).t()
    out[:-1], out[-1] = table.reshape(-1), len(found)


def gather(x, in_order, table, out, rows, pairs_per_x, num_blocks, count, _k, tile, _block):
    expert, start, end = table[:-1].view(3, num_blocks).tolist()
    for b in range(int(table[-1])):
        for i, pair in enumerate(in_order[start[b] : min(start[b] + tile, end[b])].tolist()):
            out[b * tile + i], rows[pair] = x[pair // pairs_per_x], b * tile + i
        assert expert[b] < count


def weighted_sum(y, index, weights, rows, out, count, top_k, _tiles, _n, has_rows, _block):
    pairs = index.view(-1)
    given = rows.long() if has_rows else torch.arange(len(pairs))
    total = torch.zeros(len(pairs), out.shape[1])
    for pair in ((pairs >= 0) & (pairs < count)).nonzero().view(-1).tolist():
        total[pair] = y[given[pair]].float() * weights.view(-1)[pair].float()
    out.copy_(total.view(-1, top_k, out.shape[1]).sum(1).to(out.dtype))


@pytest.fixture
def kernels(monkeypatch):
    """Kernels of tables and rows in Python; projections that multiply by `kernels.layers`, whose rows must be the block's."""
    fake = SimpleNamespace(sort=sort, blocks=blocks, gather=gather, weighted_sum=weighted_sum, layers=[], seen=[])

    def launch(self, num_ctas, stream, tensors, scalars):
        assert num_ctas > 0 and all(t.is_contiguous() for t in tensors)
        fake.seen.append(self.kernel.__name__)
        self.kernel(*tensors, *scalars, *self.constants)

    def small(self, x, packed, bias, out, routes, count, pairs_per_x, stream):
        fake.seen.append("small")
        project = fake.layers[self.constants[2].activation == ""]
        out.fill_(torch.nan)
        for block in range(routes.num_blocks):
            if routes.blocks is routes.experts:
                expert, pairs = int(routes.experts.view(-1)[block]), [block]
            else:
                expert, start, end = routes.blocks[:-1].view(3, -1)[:, block].tolist()
                pairs = routes.in_order[start : min(start + self.constants[0].mma_rows, end)].tolist()
            if 0 <= expert < count:
                out[pairs] = project(expert, x[[pair // pairs_per_x for pair in pairs]])

    def persistent(self, x, packed, bias, y, routes, count, stream):
        fake.seen.append("persistent")
        tile, used = self.config.tile_m, int(routes.blocks[-1])
        y.fill_(torch.nan)
        for block in range(used):
            expert = int(routes.blocks[block])
            rows = slice(block * tile, (block + 1) * tile)
            y[rows] = fake.layers[self.constants[2].activation == ""](expert, x[rows])

    monkeypatch.setattr(runtime, "experts", lambda: fake)
    monkeypatch.setattr(runtime, "raw_stream", lambda index: 7)
    monkeypatch.setattr(experts, "num_sms", lambda index: 132)
    monkeypatch.setattr(experts_plans.Launch, "__call__", launch)
    monkeypatch.setattr(experts_plans.SmallProjection, "run", small)
    monkeypatch.setattr(experts_plans.PersistentProjection, "run", persistent)
    return fake


@pytest.mark.parametrize("gate", [RELU, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (40, 16), (80, 32), (300, 64), (900, 128)])
def test_launches_give_the_layer(kernels, monkeypatch, gate, tokens, tile):
    """Also with numbers out of range and an expert without tokens; rows that no pair has are NaN on the way."""
    count = 8
    up, down = specs_of(DOWN, gate, 128)
    layer = Experts.make(up, down, gate, count, lossless=True)
    first = [w.dequantize().to(torch.float64) for w in layer.up]
    second = [w.dequantize().to(torch.float64) for w in layer.down]
    kernels.layers = [
        lambda e, x: gate((x.double() @ first[e].t()).float()).to(BF16),
        lambda e, x: (x.double() @ second[e].t()).to(BF16),
    ]
    real = experts_plans.SmallProjection.__init__

    def with_rows(self, *args, **named):
        real(self, *args, **named)
        self.constants = (SimpleNamespace(mma_rows=args[5]), *self.constants[1:])

    monkeypatch.setattr(experts_plans.SmallProjection, "__init__", with_rows)
    x, (index, _) = lossless_inputs(tokens, up), routing(tokens, 2, 3, seed=tokens)  # nothing for five experts
    index[0, 1] = count
    weights = torch.full(index.shape, 0.5)
    plan = experts.ExpertsPlan((up, down), gate, count, (False, False), index.numel(), x.device)
    assert plan.tile == tile and plan.is_sorted == (tokens > 1)
    y = torch.full((tokens, down.n), torch.nan, dtype=BF16)
    plan.run(x, index, weights, [], None, [], None, y, None)
    layer.check_exact(y, x, index, weights, each=True)
    assert kernels.seen[-3:] == ["small", "small", "weighted_sum"] if tile <= 16 else ["persistent", "persistent", "weighted_sum"]


def test_a_stack_is_one_matrix_of_all_experts(monkeypatch):
    """Addresses, shapes and distances that the two kernels get."""
    calls, maps, compiled = [], [], []
    monkeypatch.setattr(runtime, "gluon", lambda: SimpleNamespace(
        fill_tensor_map=lambda *a: maps.append(a) or "map", swizzle128=0, plain32=0, plain16=0,
        TensorDescriptor=SimpleNamespace(from_tensor=lambda *a: a)))  # fmt: skip
    monkeypatch.setattr(runtime, "experts", lambda: SimpleNamespace(small_m=lambda: 0, persistent=lambda: 0))
    formats = tuple((0, 2, 1, i, name) for i, name in enumerate(("x", "weight", "scale", "y")))
    binary = runtime.Binary(lambda *b: calls.append(b), (), False, formats, {})
    monkeypatch.setattr(runtime, "compile_and_run", lambda *a: compiled.append(a) or binary)
    monkeypatch.setattr(runtime, "binaries", {})
    up, down = specs_of(DOWN, RELU, 128)
    layer, count = Experts.make(up, down, RELU, 3), 3
    packed = [_stack_like(t, count) for t in GluonHopperLinearKernel.pack(layer.up[0]).values()]
    scheme, rows = dequant_scheme(up), 256
    plan = experts_plans.PersistentProjection(up, scheme, RELU, False, persistent_config(up, scheme, 64, 4, True, 132))
    x, y = torch.zeros(rows, up.k, dtype=BF16), torch.zeros(rows, down.k, dtype=BF16)
    index, in_order, table = torch.zeros(9, 2).long(), torch.zeros(18).int(), torch.zeros(13).int()
    routes = experts_plans.Routes(index, in_order, table, 4)
    plan.run(x, packed, None, y, routes, count, 7)
    assert not calls and not maps  # Triton's own launch
    plan.run(x, packed, None, y, routes, count, 7)
    n16 = up.n // 16
    shapes = {m[0]: m[5] for m in maps}
    assert shapes[x.data_ptr()] == (rows, up.k) and shapes[y.data_ptr()] == (rows, down.k)
    assert shapes[packed[0].data_ptr()] == (count * n16, packed[0][0].numel() // n16)
    assert shapes[packed[1].data_ptr()] == (count * n16, packed[1][0].numel() // n16 // 2)
    assert calls[-1][0] == 132
    config = small_m_config(up, scheme, 8, 4, True, 132)
    small = experts_plans.SmallProjection(up, scheme, RELU, False, config, 8, is_sorted=True, waits_first=True)
    for _ in range(2):
        small.run(x, packed, None, y, routes, count, 2, 7)
    types = [argument.dtype for argument in compiled[-1][2][:10]]  # of an order that the device code knows
    assert types == ["bf16", "i32", "i32", "i32", "bf16", "fp32", "bf16", "i64", "i32", "i32"]
    units = [t.stride(0) * t.element_size() // 256 for t in (packed[0], packed[1], packed[0], packed[3])]
    args = calls[-1][4:]
    assert args[:10] == tuple(t.data_ptr() for t in (x, *packed[:3], x, packed[3], y, index, in_order, table))
    assert list(args[10:14]) == units and args[14:16] == (up.n, up.k) and calls[-1][0] == small.tiles_n * 4
