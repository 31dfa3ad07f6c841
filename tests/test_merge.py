"""Layers with one input, packed as one: the merged weight, who is merged, and that each call has the bits of separate layers."""

import copy
import dataclasses
import threading

import pytest
import torch
from torch import nn

import bitline
from bitline import QuantLinear, types
from bitline.model import merge
from bitline.model.merge_weights import merge_key, merge_weights
from bitline.model.plan import plan, quant_linears
from bitline.model.verify import check_layers, find_overflow
from bitline.testing import random_spec, random_weight
from bitline.types import ActSpec, LinearSpec
from test_architectures import ARCHITECTURES, SETTINGS
from tiny import compressed, llama, random_model

IDS = torch.tensor([[1, 5, 9, 77, 3]])
E4M3 = types.float8_e4m3fn
REFERENCE = bitline.Policy(kernel="ReferenceLinearKernel")
BATCH_INVARIANT = bitline.Policy(batch_invariant=True)


# ---- weights -----------------------------------------------------------------------------------------------------------------


def stacked(weights):
    return torch.cat([w.dequantize() for w in weights])


def same_shared(weights):
    """The weights with the first one's values of what a merged layer has once."""
    names = ("perm", "input_scale", "input_zero", "input_multiplier")
    return [weights[0]] + [dataclasses.replace(w, **{n: getattr(weights[0], n) for n in names}) for w in weights[1:]]


@pytest.mark.parametrize("seed", range(60))
def test_a_merged_weight_has_every_rows_codes_and_scales(seed):
    spec = random_spec(seed)
    weights = same_shared([random_weight(spec, i) for i in range(3)])
    merged = merge_weights(weights) if merge_key(spec) is not None else None
    if spec.ragged or spec.block_offset != (0, 0):
        assert merge_key(spec) is None
    elif merged is None:  # a block of rows would belong to two weights, or a second level has one value for all
        whole = spec.scale2_block is not None and spec.scale2_block[0] not in (1, *spec.block[:1])
        assert spec.n % spec.block[0] or whole or spec.scale2_block == (spec.n, spec.k) or spec.n % spec.scale2_block[0]
    else:
        assert merged.spec.n == 3 * spec.n and torch.equal(merged.dequantize(), stacked(weights))
        assert merged.spec.replace(n=spec.n, block=spec.block, scale2_block=spec.scale2_block) == spec
        assert (merged.bias is None) == (weights[0].bias is None)


def test_rows_of_different_numbers_and_blocks():
    spec = LinearSpec(256, 256, E4M3, (128, 128), scale_dtype=torch.float32, act=ActSpec(E4M3, True, "group", 128))
    parts = [random_weight(spec.replace(n=n, block=(128, 128)), n) for n in (256, 128, 200)]
    merged = merge_weights(parts)
    assert merged.spec.n == 584 and merged.spec.block == (128, 128) and torch.equal(merged.dequantize(), stacked(parts))
    assert merge_weights([parts[2], parts[0]]) is None


def test_scales_per_tensor():
    spec = LinearSpec(64, 96, E4M3, (64, 96), scale_dtype=torch.float32, act=ActSpec(E4M3, False, "tensor"))
    a, b = same_shared([random_weight(spec, 1), random_weight(spec.replace(n=32, block=(32, 96)), 2)])
    merged = merge_weights([a, b])
    assert merged.spec.block == (1, 96) and torch.equal(merged.dequantize(), stacked([a, b]))
    same = dataclasses.replace(b, scale=a.scale)
    merged = merge_weights([a, same])
    assert merged.spec.block == (96, 96) and torch.equal(merged.dequantize(), stacked([a, same]))


@pytest.mark.parametrize("name", ["perm", "input_scale", "input_zero", "input_multiplier", "scale2"])
def test_what_a_layer_has_once_must_be_equal(name):
    act = ActSpec(types.int8, False, "tensor", symmetric=False)
    spec = LinearSpec(64, 96, types.int8, (1, 96), act_order=True, act=act, input_multiplier=True)
    if name == "scale2":
        spec = LinearSpec(64, 96, types.float4_e2m1, (1, 16), scale_dtype=E4M3_DTYPE, scale2_block=(64, 96))
    base = random_weight(spec.replace(input_multiplier=False), 1)
    if spec.input_multiplier:
        base = dataclasses.replace(base, spec=spec, input_multiplier=torch.rand(96) + 0.5)
    assert torch.equal(merge_weights([base, base]).dequantize(), stacked([base, base]))
    value = getattr(base, name)
    other = value.flip(0) if name == "perm" else value + 1
    assert merge_weights([base, dataclasses.replace(base, **{name: other})]) is None


E4M3_DTYPE = torch.float8_e4m3fn


# ---- models ------------------------------------------------------------------------------------------------------------------


def loaded(folder, policy=REFERENCE, dtype=torch.float32, **options):
    return bitline.load_model(folder, dtype=dtype, policy=policy, **options)


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(ids).logits


@pytest.fixture
def pair(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    return loaded(folder, merge=False), loaded(folder, merge=True)


def merged_names(model):
    return {name.rpartition(".")[2] for name, _ in quant_linears(model)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(tmp_path, name):
    folder, dense = compressed(tmp_path, random_model(name, SETTINGS | ARCHITECTURES[name][1]))
    model = loaded(folder, merge=True)
    merges = {"Phi": {"qkv_proj"}, "OPT": {"qkv_proj"}, "Mixtral": {"qkv_proj"}}.get(name, {"qkv_proj", "gate_up_proj"})
    expected = set() if name in ("Phi3", "GPTNeoX", "Falcon") else merges
    assert {n for n in merged_names(model) if isinstance(_first(model, n), QuantLinear)} & set(
        merge.SIBLINGS.values()
    ) >= expected
    assert not expected or not merged_names(model) & {"q_proj", "k_proj", "v_proj"}
    assert torch.allclose(logits(model), logits(dense), rtol=1e-4, atol=1e-4)


def _first(model, leaf):
    return next(m for name, m in model.named_modules() if name.rpartition(".")[2] == leaf)


@pytest.mark.parametrize("policy", [BATCH_INVARIANT, bitline.Policy(kernel="BatchInvariantLinearKernel")])
def test_the_bits_of_separate_layers_with_batch_invariant_kernels(tmp_path, policy):
    folder, _ = compressed(tmp_path, llama())
    apart, together = (loaded(folder, policy, torch.bfloat16, merge=m, native_step=False) for m in (False, True))
    for length in (1, 2, 7, 40):
        ids = torch.arange(length)[None] % 90
        assert torch.equal(logits(apart, ids), logits(together, ids))


def test_modules_names_and_readers(pair):
    apart, together = pair
    assert len(list(quant_linears(apart))) == 14 and len(list(quant_linears(together))) == 8
    assert set(together.bitline_weights) == set(apart.bitline_weights) | {
        f"model.layers.{i}.{n}" for i in range(2) for n in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    }
    packed = ".packed_", "_extra_state", ".bias"  # as a merged layer has them, instead of each of its own
    assert {n for n in together.state_dict() if not any(p in n for p in packed)} == {
        n for n in apart.state_dict() if not any(p in n for p in packed)
    }
    again = copy.deepcopy(together)
    again.load_state_dict(together.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict(apart.state_dict())
    attention = together.model.layers[0].self_attn
    assert (attention.q_proj.out_features, attention.k_proj.out_features, attention.k_proj.in_features) == (64, 32, 64)
    assert "rows 64 to 96 of qkv_proj" in repr(attention) and "qkv_proj" in attention.qkv_proj.source[0].replace(
        "q_proj", "qkv_proj"
    )
    for name, layer in quant_linears(together):
        layer.reload(together.bitline_weights[name]())
    assert torch.allclose(logits(apart), logits(together), atol=1e-5)
    assert {r.names[0].rpartition(".")[2] for r in plan(together)} == {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    assert all(check.ok for check in check_layers(together)) and find_overflow(together, IDS) is None


def calls_of(model, run):
    """How often each merged layer runs."""
    count = {}
    hooks = []
    for name, layer in quant_linears(model):
        leaf = name.rpartition(".")[2]
        hooks.append(layer.register_forward_hook(lambda *_, leaf=leaf: count.update({leaf: count.get(leaf, 0) + 1})))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return count


def test_siblings_share_a_call_within_the_parents_forward_and_only_there(pair):
    _, model = pair
    assert calls_of(model, lambda: logits(model)) == {"qkv_proj": 2, "gate_up_proj": 2, "o_proj": 2, "down_proj": 2}
    assert calls_of(model, lambda: model(IDS)) == {"qkv_proj": 2, "gate_up_proj": 2, "o_proj": 2, "down_proj": 2}
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 64)
    assert calls_of(mlp, lambda: (mlp.gate_proj(x), mlp.up_proj(x))) == {"gate_up_proj": 2}
    assert all(not s.active and s.entry is None for m in model.modules() for s in m.__dict__.get("_shared_calls", ()))


def test_a_tensor_changed_in_place_between_calls(pair):
    apart, together = (m.model.layers[0].mlp for m in pair)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.randn(3, 64)
            for _ in range(3):
                x += 1.0
                assert torch.allclose(together.gate_proj(x), apart.gate_proj(x), atol=1e-5)
                assert torch.allclose(together(x), apart(x), atol=1e-5)
                assert torch.allclose(together.up_proj(x), apart.up_proj(x), atol=1e-5)


@pytest.mark.parametrize("which", ["gate_proj", "up_proj"])
def test_hooks_that_change_the_input(pair, which):
    def in_place(_module, args):
        args[0].mul_(2.0)

    def another(_module, args):
        return (args[0] + 1.0,)

    def after(_module, args, _y):
        args[0].add_(0.5)

    apart, together = (m.model.layers[0].mlp for m in pair)
    for register, hook in (("register_forward_pre_hook", in_place), ("register_forward_pre_hook", another),
                           ("register_forward_hook", after)):  # fmt: skip
        handles = [getattr(mlp.get_submodule(which), register)(hook) for mlp in (apart, together)]
        with torch.inference_mode():
            x = torch.randn(3, 64)
            assert torch.allclose(together(x.clone()), apart(x.clone()), atol=1e-4)
        for handle in handles:
            handle.remove()


def test_an_exception_leaves_nothing_behind(pair):
    _, model = pair
    mlp, want = model.model.layers[0].mlp, logits(model)

    def fail(*_):
        raise RuntimeError("stop")

    handle = mlp.act_fn.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        logits(model)
    handle.remove()
    assert not mlp._shared_calls[0].active and mlp._shared_calls[0].entry is None
    assert torch.equal(logits(model), want)


def test_a_copy_has_its_own_layers(pair):
    _, model = pair
    copied = copy.deepcopy(model)
    attention, other = (m.model.layers[0].self_attn for m in (model, copied))
    assert other.q_proj.shared.layer is other.qkv_proj is not attention.qkv_proj and other._shared_calls[0] is other.q_proj.shared
    want = logits(model)
    for buffer in attention.qkv_proj.buffers():
        buffer.zero_()
    assert torch.equal(logits(copied), want) and not torch.equal(logits(model), want)
    assert calls_of(copied, lambda: logits(copied))["qkv_proj"] == 2


def test_threads(pair):
    _, model = pair
    inputs = [torch.arange(3 + i)[None] for i in range(4)]
    want = [logits(model, ids) for ids in inputs]
    wrong = []

    def run(i):
        for _ in range(10):
            if not torch.equal(logits(model, inputs[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_operator_for_siblings_when_compiled(pair):
    _, model = pair
    graphs = []

    def backend(graph, _example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model.model.layers[0].mlp, backend=backend, fullgraph=True)
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(compiled(x), model.model.layers[0].mlp(x))
    assert sum("bitline.linear" in str(n.target) for n in graphs[0].graph.nodes) == 2
    graphs.clear()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        want = model(IDS, use_cache=False).logits
        assert torch.allclose(compiled(IDS, use_cache=False).logits, want, atol=1e-5)
        assert torch.allclose(compiled(IDS, use_cache=False).logits, want, atol=1e-5)
    assert sum("bitline.linear" in str(n.target) for g in graphs for n in g.graph.nodes) == 8


def test_a_sibling_of_another_scheme_stays_alone(tmp_path):
    """By its scale's dtype here: q and v are merged, k is not."""
    from tiny import rewrite

    folder, _ = compressed(tmp_path, llama())

    def change(tensors):
        for name in tensors:
            if name.endswith("k_proj.weight_scale"):
                tensors[name] = tensors[name].half().float() if tensors[name].dtype != torch.float32 else tensors[name].half()

    rewrite(folder, change)
    apart, together = loaded(folder, merge=False), loaded(folder, merge=True)
    assert {"q_proj_v_proj", "k_proj", "gate_up_proj"} <= merged_names(together)
    assert torch.allclose(logits(apart), logits(together), atol=1e-5)


# ---- which modules -------------------------------------------------------------------------------------------------------------


class _Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 4), nn.Linear(4, 4)


class Plain(_Base):
    def forward(self, x):
        return self.gate_proj(x) * self.up_proj(x)


class Lines(_Base):
    def forward(self, x):
        a = self.gate_proj(x).view(-1)
        n = x.shape[0]
        b = self.up_proj(x)
        x = a + n
        return x * b


class OtherInput(_Base):
    def forward(self, x, y):
        return self.gate_proj(x) * self.up_proj(y)


class Reassigned(_Base):
    def forward(self, x):
        a = self.gate_proj(x)
        x = x + 1
        return a * self.up_proj(x)


class ChangedInPlace(_Base):
    def forward(self, x):
        a = self.gate_proj(x)
        x.add_(1)
        return a * self.up_proj(x)


class ElementChanged(_Base):
    def forward(self, x):
        a = self.gate_proj(x)
        x[0] = 1
        return a * self.up_proj(x)


class Twice(_Base):
    def forward(self, x):
        return self.gate_proj(x) * self.up_proj(x) + self.up_proj(x)


class Weight(_Base):
    def forward(self, x):
        return self.gate_proj(x) * self.up_proj(x) + self.up_proj.weight.sum()


class Expression(_Base):
    def forward(self, x):
        return self.gate_proj(x + 1) * self.up_proj(x + 1)


@pytest.mark.parametrize("cls", [Plain, Lines])
def test_the_source_shows_one_input(cls):
    assert merge.sibling_names(cls()) == [("gate_proj", "up_proj")]


@pytest.mark.parametrize("cls", [OtherInput, Reassigned, ChangedInPlace, ElementChanged, Twice, Weight, Expression])
def test_the_source_shows_more_than_one_input(cls):
    assert merge.sibling_names(cls()) == []


def test_a_module_with_a_forward_of_its_own_is_left_alone():
    module = Plain()
    module.forward = lambda x: x
    assert merge.sibling_names(module) == []
