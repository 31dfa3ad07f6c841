"""One token through layers with experts on a CPU: router, experts and shared expert in the native call of all layers."""

import ctypes

import pytest
import torch
from forms import FORMS, everything
from moe_files import write
from moe_models import make

import bitline
from bitline import native
from bitline.model import decode_step, decoder_layer, decoder_stack
from bitline.model.decoder_layer import ROUTED, LayerFields
from bitline.model.token_step import TokenStep
from decoding import generated_tokens, prompt_cache, record_calls, token_logits

pytestmark = [
    pytest.mark.skipif(native.core() is None, reason="needs the native core"),
    pytest.mark.usefixtures("one_thread_inference"),
]
transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16
IDS = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(1))
GATE = 18  # field of a described layer


def mlp_of(address):
    fields = LayerFields.from_address(address)
    return "experts" if fields[ROUTED] else "dense" if fields[GATE] else "none"


@pytest.fixture
def native_calls(monkeypatch):
    """Of each native call, which MLP it computes in each layer."""
    size = ctypes.sizeof(LayerFields)
    return record_calls(
        monkeypatch,
        decode_layer=lambda at, *_: [mlp_of(at)],
        decode_layers=lambda at, _scalars, n, *_: [mlp_of(at + i * size) for i in range(n)],
    )


def load(folder, dtype=BF16, **options):
    return bitline.load_model(folder, dtype=dtype, **options)


def assert_close(found, exact, plain):
    """Medians over tokens: where rounding makes a router choose another expert a token is far off, in either model."""
    for of_token in (lambda error: error.mean(1), lambda error: error.amax(1)):
        assert of_token((found - exact).abs()).median() <= 1.5 * of_token((plain - exact).abs()).median()


def one_by_one(model):
    """Give each layer a call of its own; returns the model."""
    for layer in model.model.layers:
        layer.__dict__.pop(decoder_stack._PLACE)
    return model


def without_native_experts(model, monkeypatch):
    """Let modules compute each layer's MLP; returns the model."""
    one_by_one(model)
    monkeypatch.setattr(decoder_layer, "described_experts", lambda *_: None)
    return model


def exact_router(weight):
    """One column for each expert, so that its sum has no order."""
    weight.zero_()
    experts = weight.shape[0]
    weight[torch.arange(experts), torch.arange(experts)] = (2.0 ** (torch.arange(experts) % 3)).to(BF16)


def shared(folder, quantized=True):
    """A Qwen2-MoE; its shared expert is quantized or not."""
    plan = everything("W4A16", 32)
    own = lambda m: m.name.endswith("shared_expert_gate") or (not quantized and "shared_expert" in m.name)
    return write(folder, "qwen2_moe", make("qwen2_moe"), "compressed-tensors", lambda m: None if own(m) else plan(m))


NATIVE = ["qwen3 gptq", "qwen3 awq", "qwen3 int8", "qwen3 mxfp4", "qwen3 gguf q4_k", "qwen3 gguf q4_0", "qwen3 stacked fp8",
          "mixtral gptq", "qwen3 all experts", "qwen3 one expert", "qwen3 gptq act-order"]  # fmt: skip
CALLED = {  # MLPs that modules compute
    "qwen3 mixed stack": ["none", "none"], "qwen3 up unquantized": ["none", "none"], "qwen3 gguf mixed": ["none", "none"],
    "mixtral gptq act-order": ["none", "none"], "qwen3 layer unquantized": ["experts", "none"], "qwen3 experts only": [],
}  # fmt: skip


@pytest.mark.parametrize("form", [*NATIVE, "shared quantized", "shared plain", *CALLED])
def test_whole_models(form, tmp_path, native_calls):
    folder = shared(tmp_path, "plain" not in form) if form.startswith("shared") else FORMS[form](tmp_path)[0]
    exact = token_logits(load(folder, torch.float32, policy=bitline.Policy(kernel="ReferenceLinearKernel")), IDS)
    plain = token_logits(load(folder, native_step=False), IDS)
    assert not native_calls
    fast = token_logits(load(folder), IDS)
    assert native_calls == ([["experts", "experts"]] * 37 if form not in CALLED else [[kind] for kind in CALLED[form]] * 37)
    assert_close(fast, exact, plain)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_all_layers_are_one_call_with_the_same_bits(kind, threads, tmp_path, native_calls):
    model = load(shared(tmp_path) if kind == "qwen2_moe" else FORMS[f"{kind.split('_')[0]} gptq"](tmp_path)[0])
    torch.set_num_threads(threads)
    together = token_logits(model, IDS)
    assert native_calls == [["experts", "experts"]] * 37
    apart = token_logits(one_by_one(model), IDS)
    assert native_calls == [["experts", "experts"]] * 37 + [["experts"]] * 2 * 37
    assert torch.equal(together, apart)


@pytest.mark.parametrize("form", ["qwen3 gptq", "qwen3 int8", "qwen3 mxfp4", "qwen3 gguf q4_k", "mixtral gptq", "qwen2"])
def test_bits_of_the_modules(form, tmp_path, native_calls, monkeypatch):
    """Behind a router whose logits are exact. The last bits of its softmax may differ."""
    model = load(shared(tmp_path) if form == "qwen2" else FORMS[form](tmp_path)[0])
    for layer in model.model.layers:
        exact_router(layer.mlp.gate.weight)
    fast = token_logits(model, IDS)
    by_modules = token_logits(without_native_experts(model, monkeypatch), IDS)
    assert native_calls == [["experts", "experts"]] * 37 + [["none"]] * 2 * 37
    same = (fast == by_modules).all(1)
    assert same.float().mean() >= 0.9 and (fast - by_modules).abs().max() <= 0.05 * by_modules.abs().max()


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}])
def test_dense_layers_among_them_are_in_the_same_call(changes, tmp_path, native_calls):
    folder = write(tmp_path, "qwen3_moe", make("qwen3_moe", **changes), "gptq", everything("W4A16", 32))
    model = load(folder)
    together = token_logits(model, IDS)
    kinds = ["experts", "dense"] if changes == {"mlp_only_layers": [1]} else ["dense", "experts"]
    assert native_calls == [kinds] * 37
    assert torch.equal(token_logits(one_by_one(model), IDS), together)
    assert all(map(decode_step.has_native_step, model.model.layers))


# ---- one token after another -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_a_token_step_has_the_bits_of_the_forward(kind, tmp_path):
    model = load(shared(tmp_path) if kind == "qwen2_moe" else FORMS[f"{kind.split('_')[0]} gptq"](tmp_path)[0])
    cache, other = prompt_cache(model, IDS[:, :5]), prompt_cache(model, IDS[:, :5])
    step = TokenStep.of(model, cache)
    for i in range(5, IDS.shape[1]):
        expected = model(input_ids=IDS[:, i : i + 1], past_key_values=other, use_cache=True).logits
        assert torch.equal(step.logits(IDS[:, i : i + 1]), expected)


def test_generation_is_that_of_transformers(tmp_path, native_calls):
    model = load(FORMS["qwen3 gptq"](tmp_path)[0])
    expected = model.generate(IDS[:, :5], max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    assert list(generated_tokens(model, IDS[:, :5])) == expected
    assert native_calls == [["experts", "experts"]] * 2 * 19


def test_hooks_on_parts_are_called_for_each_token_of_a_text(tmp_path):
    model, calls = load(shared(tmp_path)), []
    expected = generated_tokens(model, IDS[:, :5])
    for name in ("", "model", "model.norm", "model.layers.1.mlp", "model.layers.0.mlp.gate", "model.layers.1.mlp.shared_expert"):
        handle = model.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
        tokens = generated_tokens(model, IDS[:, :5])
        handle.remove()
        assert len(calls) == 20 and ("mlp" in name or tokens == expected), name
        calls.clear()


# ---- what modules compute --------------------------------------------------------------------------------------------------

PARTS = ["mlp", "mlp.gate", "mlp.experts", "mlp.shared_expert", "mlp.shared_expert.act_fn", "mlp.shared_expert.down_proj",
         "mlp.shared_expert_gate", "self_attn", "self_attn.o_proj", "input_layernorm"]  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_hooked_and_replaced_parts_are_called(name, tmp_path):
    model = load(shared(tmp_path))
    part, calls = model.model.layers[0].get_submodule(name), []
    expected = token_logits(model, IDS)
    for register in (part.register_forward_hook, part.register_forward_pre_hook):
        handle = register(lambda *_: calls.append(1))
        found = token_logits(model, IDS)
        handle.remove()
        assert len(calls) == 38
        assert (found - expected).abs().amax(1).median() <= 0.05 * expected.abs().max()
        calls.clear()
    before = part.forward
    part.forward = lambda *a, **k: calls.append(1) or before(*a, **k)
    token_logits(model, IDS)
    del part.forward
    assert len(calls) == 38
    calls.clear()

    class Replaced(type(part)):
        def __call__(self, *a, **k):
            calls.append(1)
            return super().__call__(*a, **k)

    part.__class__ = Replaced
    token_logits(model, IDS)
    assert len(calls) == 38


CHANGES = {
    "the router's values": lambda mlp: setattr(mlp.gate.weight, "data", mlp.gate.weight.flip(0)),
    "the router's weight": lambda mlp: setattr(mlp.gate, "weight", torch.nn.Parameter(mlp.gate.weight.flip(0), False)),
    "top_k": lambda mlp: setattr(mlp.gate, "top_k", 1),
    "the renormalization": lambda mlp: setattr(mlp.gate, "norm_topk_prob", not mlp.gate.norm_topk_prob),
    "the experts' order": lambda mlp: mlp.experts.up[0]._set([mlp.experts.up[0].packed[0].flip(0)]),
    "a packed tensor": lambda mlp: mlp.experts.down.packed.__setitem__(0, mlp.experts.down.packed[0].flip(0)),
    "a bias": lambda mlp: setattr(mlp.experts.down, "bias", torch.ones(mlp.experts.num_experts, 128, dtype=BF16)),
    "the shared expert": lambda mlp: mlp.shared_expert.up_proj.reload(
        bitline.quantize(torch.ones(96, 128).half(), "W4A16", group_size=32)),
    "the shared expert's gate": lambda mlp: mlp.shared_expert_gate.weight.data.copy_(mlp.shared_expert_gate.weight.flip(1)),
    "the bias of the shared expert's gate": lambda mlp: setattr(mlp.shared_expert_gate, "bias", torch.nn.Parameter(
        torch.full((1,), -3.0, dtype=BF16), False)),
    "a child": lambda mlp: setattr(mlp.shared_expert, "act_fn", torch.nn.Tanh()),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_tokens_are_seen(change, tmp_path):
    """As if each token's call were described anew, and unlike the unchanged model."""
    folder, outputs = shared(tmp_path), []
    for prepare in (lambda m: m, one_by_one):
        model = prepare(load(folder))
        cache = prompt_cache(model, IDS[:, :5])
        before = model(input_ids=IDS[:, 5:6], past_key_values=cache).logits[0, -1]
        cache.crop(-1)
        CHANGES[change](model.model.layers[1].mlp)
        after = model(input_ids=IDS[:, 5:6], past_key_values=cache).logits[0, -1]
        assert not torch.equal(before, after)
        outputs.append(torch.stack((before, after)))
    assert torch.equal(*outputs)


def test_batches_prompts_and_masks_run_in_modules(tmp_path, native_calls):
    model, plain = load(shared(tmp_path)), load(shared(tmp_path), native_step=False)
    token_logits(model, IDS.repeat(2, 1))
    assert not native_calls
    assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    cache = prompt_cache(model, IDS[:, :5])
    model(input_ids=IDS[:, 5:6], past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    assert not native_calls


def test_router_logits_are_recorded(tmp_path):
    model, plain = load(shared(tmp_path)), load(shared(tmp_path), native_step=False)
    token_logits(model, IDS[:, :6])  # the call of all layers is prepared
    found = [
        m(input_ids=IDS[:, 5:6], past_key_values=prompt_cache(m, IDS[:, :5]), output_router_logits=True).router_logits
        for m in (model, plain)
    ]
    assert len(found[0]) == len(found[1]) == 2
    assert all((a - b).abs().max() <= 0.1 for a, b in zip(*found, strict=True))


def test_non_finite_hidden_states_come_out_as_such(tmp_path):
    """A NaN reaches every logit of the router; it must choose experts all the same."""
    model = load(shared(tmp_path))
    cache = prompt_cache(model, IDS[:, :5])
    model.model.embed_tokens.weight[7] = torch.nan
    found = model(input_ids=torch.tensor([[7]]), past_key_values=cache).logits
    assert bool(found.isnan().all())


# ---- the router ------------------------------------------------------------------------------------------------------------


def routed(x, weight, top_k, *, renormalize, rounded):
    experts, hidden = weight.shape
    index, weights = torch.full((top_k,), -1), torch.empty(top_k)
    at = x.data_ptr(), weight.data_ptr(), hidden, experts, top_k, int(renormalize), int(rounded), index.data_ptr()
    assert native.core().route(*at, weights.data_ptr()) == 0
    return index, weights


def router(kind, experts, top_k, hidden, *, renormalize=True):
    if kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as Router
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as Router
    config = transformers.PretrainedConfig(num_experts_per_tok=top_k, num_experts=experts, num_local_experts=experts,
                                           norm_topk_prob=renormalize, hidden_size=hidden)  # fmt: skip
    return Router(config).to(BF16)


SIZES = [(1, 1), (4, 2), (8, 8), (17, 3), (60, 4), (128, 8), (512, 8), (513, 10)]


def check_routing(x, own, index, weights, *, unit=2.0**-8):
    _, expected, expected_index = own(x)
    assert torch.equal(index[None], expected_index)
    same = (weights == expected[0]) | (weights.isnan() & expected[0].isnan())
    close = (weights - expected[0].float()).abs() <= unit * expected[0].float()
    assert bool((same | close).all())


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_routing(experts, top_k, renormalize, level):
    """Of logits that are exact in any order of the sum: the same experts, and weights within the last bits."""
    torch.manual_seed(experts)
    for trial in range(20):
        own = router("qwen3", experts, top_k, experts, renormalize=renormalize)
        own.weight.data.copy_(torch.eye(experts))
        x = (torch.randn(1, experts) * 3).to(BF16) if trial % 2 else (torch.randint(8, (1, experts)) / 2).to(BF16)  # ties
        index, weights = routed(x, own.weight, top_k, renormalize=renormalize, rounded=True)
        check_routing(x, own, index, weights)
        if renormalize:
            own = router("mixtral", experts, top_k, experts)
            own.weight.data.copy_(torch.eye(experts))
            index, weights = routed(x, own.weight, top_k, renormalize=True, rounded=False)
            check_routing(x, own, index, weights, unit=1e-6)


def hard_orders(n):
    """Logits in orders that are the worst cases of quickselect and heaps, with and without equals."""
    rising = ((torch.arange(1024) + 0x3C80) << 16).int().view(torch.float32)[torch.arange(n) * 1024 // n].to(BF16)  # 1/64...4
    killer = torch.empty(n, dtype=BF16)  # of the median of three: each partition takes two elements off
    half, sorted_ = n // 2, rising.flip(0)
    killer[: 2 * half] = torch.stack([sorted_[:half], sorted_[half : 2 * half]], 1).flatten()
    killer[2 * half :] = sorted_[2 * half :]
    evens = torch.cat([sorted_[: 2 * half : 2], sorted_[1 : 2 * half : 2], sorted_[2 * half :]])
    pipe = torch.cat([rising[::2], rising[1::2].flip(0)])
    yield from (rising, sorted_, killer, killer.flip(0), evens, pipe, torch.ones(n, dtype=BF16))
    for values in (2, 3, n // 2 + 1):
        yield torch.randint(values, (n,)).to(BF16) / max(1, values / 8)
    yield rising[torch.randperm(n)]


@pytest.mark.parametrize("n", [*range(1, 41), 64, 127, 128, 129, 512, 1000])
def test_routing_chooses_what_topk_chooses(n, level):
    """Also among equals, whose order torch takes from the C++ library."""
    torch.manual_seed(n)
    x = torch.ones(1, 1, dtype=BF16)
    for logits in hard_orders(n):
        probabilities = logits.float().softmax(0)
        for top_k in sorted({1, 2, 3, 4, 8, 17, 40, n // 64, n // 64 + 1, n // 2, n - 1, n} & set(range(1, n + 1))):
            index, _ = routed(x, logits[:, None].contiguous(), top_k, renormalize=True, rounded=True)
            assert torch.equal(index, probabilities.topk(top_k).indices), (top_k, logits)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_routing_of_non_finite_logits(experts, top_k, bad, level):
    own = router("qwen3", experts, top_k, 1)
    own.weight.data.copy_(torch.randn(experts, 1))
    own.weight.data[:: max(1, experts // 3)] = bad
    x = torch.ones(1, 1, dtype=BF16)
    check_routing(x, own, *routed(x, own.weight, top_k, renormalize=True, rounded=True))


@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(8, 2, 576), (60, 4, 333), (128, 8, 2048)])
def test_routing_of_random_tokens(experts, top_k, hidden, level):
    """Logits are sums in another order than torch's: off by a unit in the last place where they are rounded at most."""
    torch.manual_seed(0)
    own = router("qwen3", experts, top_k, hidden)
    own.weight.data.normal_(std=0.05)
    for _ in range(20):
        x = torch.randn(1, hidden).to(BF16)
        index, weights = routed(x, own.weight, top_k, renormalize=True, rounded=True)
        exact = own.weight.double() @ x[0].double()
        chosen = exact[index]
        slack = 2.0**-7 * exact.abs().max()
        assert len(set(index.tolist())) == top_k
        assert chosen.min() >= exact.topk(top_k).values[-1] - slack
        assert ((chosen - chosen.max()).softmax(0) - weights).abs().max() <= 0.02


def test_routing_refuses_other_numbers_of_experts():
    x = torch.zeros(4, dtype=BF16)
    for top_k in (0, 3, -1):
        assert native.core().route(x.data_ptr(), x.data_ptr(), 1, 2, top_k, 1, 1, 0, 0) == -4


def test_the_router_has_the_same_bits_at_every_isa_level_and_thread_count():
    found, before, threads = [], native.isa(), torch.get_num_threads()
    torch.manual_seed(0)
    x, weight = torch.randn(1, 333).to(BF16), torch.randn(130, 333).to(BF16)
    try:
        for name in native.isas():
            for count in (1, 2):
                native.use_isa(name)
                torch.set_num_threads(count)
                index, weights = routed(x, weight, 9, renormalize=True, rounded=False)
                found.append(torch.cat((index.float(), weights)))
    finally:
        native.use_isa(before)
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])
