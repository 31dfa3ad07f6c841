"""The native decode step: its arithmetic against transformers' modules, and when it hands over to them."""

import concurrent.futures
import copy
import warnings

import pytest
import torch
from torch import nn

import bitline
from bitline import native
from bitline.linear import QuantLinear
from bitline.model import decode_step, decoder_stack
from bitline.model.decoder_layer import rms_norm_forward
from bitline.model.known_modules import class_kind
from bitline.model.kv_cache import kv_cache_layer_class
from bitline.model.load import load_model
from decoding import record_calls, token_logits, write_family

pytestmark = [
    pytest.mark.skipif(native.core() is None, reason="needs the native core"),
    pytest.mark.usefixtures("one_thread_inference"),
]
transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16


def ulps_apart(a, b):
    """Distance of each pair in bfloat16 units in the last place."""
    order = lambda t: torch.where(t.view(torch.int16) < 0, -(t.view(torch.int16).int() & 0x7FFF), t.view(torch.int16).int())
    return (order(a.contiguous()) - order(b.contiguous())).abs()


def norm_of(n, epsilon=1e-6):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(n, epsilon).to(BF16)
    norm.weight.data = torch.randn(n).to(BF16)
    return norm


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_rms_norm(n, rows, level):
    norm, x = norm_of(n), (torch.randn(1, rows, n) * 3).to(BF16)
    apart = ulps_apart(rms_norm_forward(norm, x), norm(x))
    # Another reduction order may move the first of two roundings by one unit; the weight makes up to two of it.
    assert apart.max() <= 2 and (apart > 0).float().mean() <= 0.02


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_rms_norm_of_non_finite_values(bad, level):
    norm, x = norm_of(40), torch.randn(1, 40).to(BF16)
    x[0, 3] = bad
    assert torch.equal(rms_norm_forward(norm, x).isnan(), norm(x).isnan())


@pytest.mark.parametrize("n", [1, 15, 16, 33, 1536])
def test_silu_and_mul(n, level):
    gate, up = (torch.randn(n) * 6).to(BF16), torch.randn(n).to(BF16)
    gate[: min(n, 8)] = torch.tensor([0, -0.0, 200, -200, torch.inf, torch.nan, 88.5, -87.5])[:n].to(BF16)
    y = torch.empty_like(up)
    native.core().silu_and_mul(gate.data_ptr(), up.data_ptr(), y.data_ptr(), n)
    expected = nn.functional.silu(gate) * up
    same = (y == expected) | (y.isnan() & expected.isnan())
    small = expected.abs() < 1e-30
    assert bool((same | small | (ulps_apart(y, expected) <= 2)).all()) and bool((y[small].abs() < 1e-30).all())
    assert same.float().mean() >= 0.95 or n < 20


def rotated(x, cos, sin):
    from transformers.models.llama.modeling_llama import rotate_half

    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize("dim", [16, 48, 64, 128, 256])
@pytest.mark.parametrize(("kv_heads", "q_per_kv"), [(1, 1), (3, 3), (2, 8)])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_attention(dim, kv_heads, q_per_kv, length, level):
    torch.manual_seed(length)
    capacity, scale = length + 3, dim**-0.5
    keys, values = ((torch.randn(kv_heads, capacity, dim) * 2).to(BF16) for _ in range(2))
    q, k, v = ((torch.randn(count, dim) * 2).to(BF16) for count in (kv_heads * q_per_kv, kv_heads, kv_heads))
    angle = torch.randn(dim)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    before, y = (keys.clone(), values.clone()), torch.empty(kv_heads * q_per_kv, dim, dtype=BF16)
    qkv = torch.cat((q, k, v))
    pointers = [t.data_ptr() for t in (qkv, cos, sin, keys, values, y)]
    assert native.core().decode_attention(*pointers, kv_heads, q_per_kv, dim, capacity, length - 1, scale) == 0
    for cache, expected, new in zip((keys, values), before, (rotated(k, cos, sin), v), strict=True):
        expected[:, length - 1] = new
        assert torch.equal(cache, expected)  # bit for bit, and nothing else is written
    full = [t[:, :length].repeat_interleave(q_per_kv, 0) for t in (keys, values)]
    query = rotated(q, cos, sin)[:, None]
    sdpa = nn.functional.scaled_dot_product_attention
    exact = sdpa(query.double(), *(t.double() for t in full), scale=scale)[:, 0]
    torchs = sdpa(query, *full, scale=scale)[:, 0]
    error, allowed = (y.double() - exact).abs().max(), (torchs.double() - exact).abs().max()
    assert error <= 2 * allowed + 2**-9 * exact.abs().max()


def test_attention_refuses_unsupported_sizes():
    x = torch.zeros(4096, dtype=BF16)
    at = x.data_ptr()
    sizes = ((1, 1, 24, 4, 0), (1, 1, 272, 4, 0), (1, 33, 16, 4, 0), (1, 1, 16, 4, 4), (1, 1, 16, 4, -1))
    for kv_heads, q_per_kv, dim, capacity, position in sizes:
        assert native.core().decode_attention(at, at, at, at, at, at, kv_heads, q_per_kv, dim, capacity, position, 1.0) == -4


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 16), (63, 17), (64, 31), (130, 576), (1001, 100)])
def test_gemv_bf16(n, k, level):
    w, x, y = torch.randn(n, k).to(BF16), torch.randn(k).to(BF16), torch.empty(n, dtype=BF16)
    assert native.core().gemv_bf16(x.data_ptr(), w.data_ptr(), y.data_ptr(), n, k) == 0
    exact = w.double() @ x.double()
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18 * (w.abs().double() @ x.abs().double())).all()


def test_same_bits_at_every_isa_level_and_thread_count():
    found, before, threads = [], native.isa(), torch.get_num_threads()
    try:
        for name in native.isas():
            for count in (1, 2):
                native.use_isa(name)
                torch.set_num_threads(count)
                torch.manual_seed(0)
                kv_heads, q_per_kv, dim, length = 3, 3, 64, 500
                data = [
                    torch.randn(*s).to(BF16)
                    for s in ((15, dim), (dim,), (dim,), (kv_heads, length, dim), (kv_heads, length, dim))
                ]
                y, z, g = torch.empty(9, dim, dtype=BF16), torch.empty(999, dtype=BF16), torch.empty(999, dtype=BF16)
                native.core().decode_attention(
                    *(t.data_ptr() for t in (*data, y)), kv_heads, q_per_kv, dim, length, length - 1, 0.125
                )
                w, x = torch.randn(999, 333).to(BF16), torch.randn(333).to(BF16)
                native.core().gemv_bf16(x.data_ptr(), w.data_ptr(), z.data_ptr(), 999, 333)
                native.core().silu_and_mul(z.data_ptr(), w.data_ptr(), g.data_ptr(), 999)
                found.append(torch.cat((y.flatten(), z, g, rms_norm_forward(norm_of(333), x[None])[0])))
    finally:
        native.use_isa(before)
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("schemes", [("W4A16", "W4A16"), ("W4A16_ASYM", "W8A16", "W4A16"), ("W8A8", "W4A16", "FP8_DYNAMIC"),
                                     ("MXFP4A16", "W3A16", "W8A8"), ("FP8_BLOCK", "FP8_BLOCK", "W4A16"),
                                     ("MXFP4", "NVFP4")])  # fmt: skip
def test_fused_gemv_equals_separate_layers(schemes, level):
    if level == "portable":
        pytest.skip("no linear kernels at this ISA level")
    torch.manual_seed(1)
    layers = []
    for i, scheme in enumerate(schemes):
        w, bias = torch.randn(33 + 160 * i, 256).to(BF16), torch.randn(33 + 160 * i).to(BF16)
        layer = QuantLinear(bitline.quantize(w, scheme), bias if i else None, kernel="CPUWNA16LinearKernel")
        layers.append(layer)
    x = torch.randn(1, 256).to(BF16)
    y = torch.empty(sum(layer.out_features for layer in layers), dtype=BF16)
    at = [t if t is None else t.data_ptr() for layer in layers for t in layer._direct[1][:2]] + [None, None]
    assert native.core().fused_gemv(x.data_ptr(), 256, *at[:6], y.data_ptr(), 2) == 0
    assert torch.equal(y, torch.cat([layer(x)[0] for layer in layers]))


@pytest.fixture
def pair(tmp_path):
    """A model with the native decode step and the same one without."""

    def make(name="Llama", **changes):
        folder = write_family(tmp_path / name, name, **changes)
        with torch.inference_mode(mode=False):
            return load_model(folder, dtype=BF16), load_model(folder, dtype=BF16, native_step=False)

    return make


def native_forwards(model):
    return {name for name, module in model.named_modules() if "forward" in module.__dict__}


def install_kv_cache(model, cache):
    """Give a new DynamicCache the layers that native steps append to, before the prompt does."""
    if any(decode_step.has_native_step(module) for module in model.modules()):
        cache.layers = [kv_cache_layer_class()() for _ in cache.layers]


def logits(model, ids, *, native_cache=True):
    cache = transformers.DynamicCache(config=model.config)
    if native_cache:
        install_kv_cache(model, cache)
    return token_logits(model, ids, cache)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_whole_models(name, pair, tmp_path, level):
    if level == "portable":
        pytest.skip("no linear kernels at this ISA level")
    fast, plain = pair(name)
    assert {"model.layers.0", "model.layers.1", "model.layers.1.input_layernorm", "model.norm"} <= native_forwards(fast)
    assert not native_forwards(plain)
    exact = load_model(tmp_path / name, dtype=torch.float32)
    assert not native_forwards(exact)
    ids = torch.randint(3, 100, (1, 300))
    reference, fast_logits, plain_logits = (logits(model, ids) for model in (exact, fast, plain))
    error, allowed = (fast_logits - reference).abs(), (plain_logits - reference).abs()
    assert error.mean() <= 1.5 * allowed.mean() and error.max() <= 2 * allowed.max()


def called(model, monkeypatch):
    """Names of the core's functions that a model calls for one token."""
    functions = ("rms_norm", "decode_layer", "decode_layers", "gemv_bf16")
    names = record_calls(monkeypatch, **{name: lambda *_, name=name: name for name in functions})
    logits(model, torch.tensor([[1, 5, 9, 33]]))
    monkeypatch.undo()
    return set(names)


def test_a_token_runs_in_the_core(pair, monkeypatch):
    fast, plain = pair()
    assert called(fast, monkeypatch) == {"rms_norm", "decode_layers"}
    assert called(plain, monkeypatch) == set()


def test_an_unquantized_lm_head(monkeypatch):
    head = nn.Linear(1024, 1030, bias=False).to(BF16)
    x = torch.randn(1, 1, 1024).to(BF16)
    error = (decode_step._lm_head_forward(head, x).double() - head.double()(x.double())).abs().max()
    assert error <= 2 * 2**-8


def test_hooks_are_called(pair):
    fast, plain = pair()
    layer = fast.model.layers[0]
    names = ["", *(name for name, _ in layer.named_modules() if name)]
    assert len(names) == 13
    ids = torch.tensor([[1, 5, 9, 33, 7]])
    for name in names:
        seen = []
        for model in (fast, plain):
            module = model.model.layers[0].get_submodule(name)
            handle = module.register_forward_hook(lambda module, args, out, seen=seen: seen.append(type(module)))
            logits(model, ids)
            handle.remove()
            handle = module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(type(module)))
            logits(model, ids)
            handle.remove()
        assert len(seen) == 12 and len(set(seen)) == 1, name


@pytest.mark.parametrize("name", ["self_attn", "mlp", "mlp.act_fn", "mlp.down_proj", "self_attn.k_proj", "input_layernorm"])
def test_replaced_parts_are_called(name, pair):
    fast, _ = pair()
    layer, count = fast.model.layers[1], []
    module = layer.get_submodule(name)
    before = module.forward
    module.forward = lambda *a, **k: (count.append(1), before(*a, **k))[1]
    logits(fast, torch.tensor([[1, 5, 9, 33]]))
    assert len(count) == 2
    del module.forward

    class Replaced(type(module)):
        def __call__(self, *a, **k):
            count.append(2)
            return super().__call__(*a, **k)

    module.__class__ = Replaced
    logits(fast, torch.tensor([[1, 5, 9, 33]]))
    assert count.count(2) == 2


def test_a_global_hook_is_called(pair):
    fast, plain = pair()
    counts = []
    for model in (fast, plain):
        seen = []
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out, seen=seen: seen.append(type(module)))
        logits(model, torch.tensor([[1, 5, 9, 33]]))
        handle.remove()
        counts.append(seen)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "run",
    [
        lambda m: m(input_ids=torch.tensor([[1, 5, 9, 33] * 4])).logits,  # more rows than a decode step
        lambda m: (
            m(input_ids=torch.tensor([[1, 5, 9, 33] * 4] * 3), attention_mask=torch.tensor([[0] * 4 + [1] * 12] * 3)).logits
        ),
    ],
)
def test_prompts_run_in_transformers(run, pair):
    fast, plain = pair()
    assert torch.equal(run(fast), run(plain))


def test_masks_batches_and_other_caches_run_in_transformers(pair, monkeypatch):
    fast, _ = pair()
    core, count = native.core(), []
    for name in ("decode_layer", "decode_layers"):
        monkeypatch.setattr(core, name, lambda *a: count.append(1))
    ids = torch.tensor([[1, 5, 9, 33]])
    logits(fast, ids.repeat(2, 1))
    for other in (transformers.DynamicCache(), transformers.StaticCache(config=fast.config, max_cache_len=8)):
        fast(input_ids=ids[:, :3], past_key_values=other)
        fast(input_ids=ids[:, 3:], past_key_values=other)
    cache = transformers.DynamicCache(config=fast.config)
    install_kv_cache(fast, cache)
    fast(input_ids=ids[:, :3], past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1]]))
    fast(input_ids=ids[:, 3:], past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    assert not count


def test_empty_dynamic_caches_get_native_layers(pair, monkeypatch):
    fast, plain = pair()
    ids = torch.tensor([[1, 5, 9, 33, 7]])
    with_install, without = logits(fast, ids), logits(fast, ids, native_cache=False)
    assert torch.equal(with_install, without)
    cache = transformers.DynamicCache(config=plain.config)
    plain(input_ids=ids[:, :3], past_key_values=cache)  # filled by transformers: stays transformers'
    fast(input_ids=ids[:, 3:4], past_key_values=cache)
    assert all(type(layer) is transformers.cache_utils.DynamicLayer for layer in cache.layers)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_generate_of_transformers_takes_native_steps(options, pair, monkeypatch):
    fast, plain = pair()
    count = record_calls(monkeypatch, decode_layers=lambda *_: 1)
    ids, outputs = torch.tensor([[1, 5, 9, 33]]), []
    for model in (fast, plain):
        torch.manual_seed(0)
        outputs.append(model.generate(ids, max_new_tokens=20, min_new_tokens=20, pad_token_id=0, **options))
    assert torch.equal(*outputs)
    assert len(count) == (0 if options else 19)


def test_cache_layers_change_with_their_batch(pair):
    pair()
    layer, other = kv_cache_layer_class()(), transformers.cache_utils.DynamicLayer()
    keys, values = torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    for cache in (layer, other):
        cache.update(keys, values)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2, 3]))
        cache.update(torch.ones(3, 2, 1, 16), torch.zeros(3, 2, 1, 16))
        with pytest.raises(ValueError, match="crop"):
            cache.crop(2)
    assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


def test_observed_calls_run_in_torch(pair, monkeypatch):
    fast, plain = pair()
    norm = fast.model.norm
    x = torch.randn(1, 1, 64).to(BF16)
    monkeypatch.setattr(native.core(), "rms_norm", None)  # to call it would be a TypeError
    with torch.inference_mode(mode=False):
        y = torch.ones(1, 1, 64, dtype=BF16, requires_grad=True)
        norm(y).sum().backward()
        assert y.grad is not None
        compiled = torch.compile(lambda x: norm(x), backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x.clone()), plain.model.norm(x))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                traced = torch.jit.trace(lambda x: norm(x), (x.clone(),), check_trace=False)
            z = torch.randn(1, 1, 64).to(BF16)
            assert torch.equal(traced(z), plain.model.norm(z))
            assert torch.equal(torch.vmap(norm)(z), plain.model.norm(z))
            with torch.profiler.profile() as profile:
                norm(z)
            assert any(event.name == "aten::rsqrt" for event in profile.events())


def test_a_copy_has_native_forwards_of_its_own(pair):
    fast, _ = pair()
    other = copy.deepcopy(fast.model.layers[0])
    assert all(m.__dict__["forward"].__self__ is m for m in other.modules() if "forward" in m.__dict__)
    other.input_layernorm.weight.data.zero_()
    x = torch.ones(1, 1, 64, dtype=BF16)
    assert other.input_layernorm(x).abs().max() == 0 and fast.model.layers[0].input_layernorm(x).abs().max() > 0


def test_new_weights_are_seen(pair):
    fast, plain = pair()
    for model in (fast, plain):
        torch.manual_seed(3)
        norm = model.model.layers[0].post_attention_layernorm
        norm.weight.data = torch.rand(64).to(BF16)  # at another address
        q = model.model.layers[0].self_attn.q_proj
        q.reload(bitline.quantize(torch.randn(64, 64), "W4A16", group_size=32))
    ids = torch.tensor([[1, 5, 9, 33]])
    a, b = logits(fast, ids), logits(plain, ids)
    assert (a - b).abs().max() <= 0.1 * b.abs().max()


def test_classes_are_recognized_by_their_source():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    assert [class_kind(c) for c in (LlamaRMSNorm, LlamaMLP, LlamaAttention)] == ["rms_norm", "mlp", "attention"]
    assert class_kind(Qwen3Attention) == "attention_qk_norm" and class_kind(LlamaDecoderLayer) == "decoder_layer"

    class Modified(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1

    for cls in (Gemma2Attention, Gemma2RMSNorm, nn.Linear, Modified):
        assert class_kind(cls) == ""


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_run_in_transformers(activation, pair, native_calls):
    """Native code computes such a layer up to its MLP."""
    fast, plain = pair(hidden_act=activation)
    calls = []
    assert not any(decode_step.has_native_step(layer) for layer in fast.model.layers)
    fast.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    a, b = logits(fast, IDS), logits(plain, IDS)
    assert native_calls == [1] * 18 and len(calls) == 10 and (a - b).abs().max() <= 0.05 * b.abs().max()


def test_without_the_core_nothing_is_installed(pair, monkeypatch):
    fast, plain = pair()
    monkeypatch.setattr(native, "core", lambda: None)
    assert decode_step.install(plain) == 0
    ids = torch.tensor([[1, 5, 9, 33]])
    assert torch.equal(logits(fast, ids, native_cache=False)[:, :3], logits(plain, ids)[:, :3])


def test_it_can_be_turned_off(pair, tmp_path, monkeypatch):
    fast, _ = pair()
    assert native_forwards(fast)
    monkeypatch.setenv("BITLINE_NO_STEP", "1")
    assert not native_forwards(load_model(tmp_path / "Llama", dtype=BF16))
    assert native_forwards(load_model(tmp_path / "Llama", dtype=BF16, native_step=True))
    monkeypatch.delenv("BITLINE_NO_STEP")
    assert not native_forwards(load_model(tmp_path / "Llama", dtype=BF16, policy="batch_invariant"))


@pytest.mark.parametrize("updates", [(1,), (3, 1, 1), (300, 1, 250), (255, 1, 1, 1)])
def test_the_kv_cache_holds_what_a_dynamic_layer_holds(updates):
    from transformers.cache_utils import DynamicLayer

    cache_layer, layer = kv_cache_layer_class()(), DynamicLayer()
    assert cache_layer.get_seq_length() == 0 and cache_layer.keys is None
    for count in updates:
        k, v = torch.randn(2, 3, count, 16), torch.randn(2, 3, count, 16)
        for a, b in zip(cache_layer.update(k, v), layer.update(k, v), strict=True):
            assert torch.equal(a, b)
        assert cache_layer.get_mask_sizes(1) == layer.get_mask_sizes(1) and cache_layer.get_seq_length() == layer.get_seq_length()
    assert not cache_layer.reserve(3, 16, torch.float32, 1)  # two sequences
    cache_layer.reset()
    assert cache_layer.get_seq_length() == 0 and cache_layer.reserve(3, 16, torch.float32, 1)
    assert not cache_layer.reserve(4, 16, torch.float32, 1) and not cache_layer.reserve(3, 16, BF16, 1)


# ---- all layers as one call ----------------------------------------------------------------------------------------------

IDS = torch.randint(3, 100, (1, 12), generator=torch.Generator().manual_seed(5))


def one_by_one(model):
    """Give each layer a call of its own; returns the model."""
    for layer in model.model.layers:
        layer.__dict__.pop(decoder_stack._PLACE)
    return model


def stack_of(model):
    return model.model.layers[0].__dict__[decoder_stack._PLACE].stack


@pytest.fixture
def native_calls(monkeypatch):
    """Numbers of layers of the native calls."""
    return record_calls(monkeypatch, decode_layers=lambda *a: a[2], decode_layer=lambda *_: 1)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_layers_are_one_call_with_the_same_bits(name, threads, pair, native_calls):
    fast, _ = pair(name)
    torch.set_num_threads(threads)
    together = logits(fast, IDS)
    assert native_calls == [2] * 9
    apart = logits(one_by_one(fast), IDS)
    assert native_calls == [2] * 9 + [1] * 18
    assert torch.equal(together, apart)


def test_hidden_states_are_those_of_each_layer(pair, native_calls):
    fast, _ = pair()
    cache = transformers.DynamicCache(config=fast.config)
    fast(input_ids=IDS[:, :3], past_key_values=cache)
    other = copy.deepcopy(cache)
    states = fast(input_ids=IDS[:, 3:4], past_key_values=cache, output_hidden_states=True).hidden_states
    expected = one_by_one(fast)(input_ids=IDS[:, 3:4], past_key_values=other, output_hidden_states=True).hidden_states
    assert len(states) == 3 and all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))


def halve_in_place(_module, *arguments):
    """A hook that changes what it gets without returning anything."""
    tensor = arguments[-1] if isinstance(arguments[-1], torch.Tensor) else arguments[0][0]
    tensor[..., ::2] *= 0.5


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("index", [0, 1])
def test_hooks_that_change_hidden_states_in_place_act(register, index, pair):
    outputs = [logits(pair()[0], IDS)]
    for prepare in (lambda m: m, one_by_one):
        model = prepare(pair()[0])
        logits(model, IDS[:, :5])  # the call of all layers is prepared
        getattr(model.model.layers[index], register)(halve_in_place)
        outputs.append(logits(model, IDS))
    without, together, apart = outputs
    assert torch.equal(together, apart) and not torch.equal(together, without)


CHANGES = {
    "a child": lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
    "a forward": lambda layer: setattr(layer.mlp, "forward", lambda x: x),
    "a norm's forward": lambda layer: setattr(layer.input_layernorm, "forward", lambda x: x),
    "a layer's forward": lambda layer: setattr(layer, "forward", lambda x, **_: x + 1),
    "a weight": lambda layer: layer.mlp.up_proj.reload(bitline.quantize(torch.ones(160, 64), "W4A16", group_size=32)),
    "a norm's weight": lambda layer: setattr(layer.input_layernorm, "weight", nn.Parameter(torch.arange(64).to(BF16))),
    "a norm's values": lambda layer: setattr(layer.input_layernorm.weight, "data", torch.full((64,), 3.0, dtype=BF16)),
    "an epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 9.0),
    "the scale of attention": lambda layer: setattr(layer.self_attn, "scaling", 5.0),
    "a linear layer's hook": lambda layer: layer.self_attn.v_proj.register_forward_hook(lambda m, a, y: 2 * y),
    "a class": lambda layer: setattr(layer.mlp, "__class__", type("M", (type(layer.mlp),), {"forward": lambda self, x: x})),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("index", [0, 1])
def test_changes_between_tokens_are_seen(change, index, pair):
    """Of a cache in use: the same as a model whose layers are called one by one."""
    outputs = []
    for prepare in (lambda m: m, one_by_one):
        model = prepare(pair()[0])
        cache = transformers.DynamicCache(config=model.config)
        rows = [model(input_ids=ids, past_key_values=cache).logits[0, -1] for ids in (IDS[:, :3], IDS[:, 3:4], IDS[:, 4:5])]
        CHANGES[change](model.model.layers[index])
        rows += [model(input_ids=IDS[:, i : i + 1], past_key_values=cache).logits[0, -1] for i in (5, 6)]
        outputs.append(torch.stack(rows))
    assert torch.equal(*outputs)
    torch.manual_seed(0)
    unchanged = logits(pair()[0], IDS[:, :7])[-2:]
    assert not torch.equal(outputs[0][-2:].double(), unchanged)


def test_a_layer_called_with_another_input_computes(pair, native_calls):
    """As in a loop that skips, repeats or reorders layers."""
    fast, plain = pair()
    rotation = fast.model.rotary_emb(torch.zeros(1, 1, 64, dtype=BF16), torch.tensor([[0]]))
    for order in ((0, 1), (1, 0), (0, 0, 1), (1, 1), (0, 1, 1)):
        results = []
        for model in (fast, plain):
            x = torch.ones(1, 1, 64, dtype=BF16) / 3
            cache = transformers.DynamicCache(config=model.config)
            install_kv_cache(model, cache)
            for index in order:
                x = model.model.layers[index](x, past_key_values=cache, position_embeddings=rotation)
            results.append((x.double(), [layer.get_seq_length() for layer in cache.layers]))
        (a, lengths), (b, expected) = results
        assert (a - b).abs().max() <= 0.1 * b.abs().max() and lengths == expected
    assert 2 in native_calls and 1 in native_calls


def test_copies_compute_their_own(pair):
    fast, _ = pair()
    expected = logits(fast, IDS)
    other = copy.deepcopy(fast)
    assert torch.equal(logits(other, IDS), expected)
    other.model.layers[1].mlp.down_proj.reload(bitline.quantize(torch.zeros(64, 160), "W4A16", group_size=32))
    assert not torch.equal(logits(other, IDS), expected) and torch.equal(logits(fast, IDS), expected)
    fast.model.layers[1] = copy.deepcopy(fast.model.layers[1])
    assert torch.equal(logits(fast, IDS), expected)


def test_a_failed_call_of_all_layers_changes_nothing(pair, monkeypatch):
    fast, _ = pair()
    expected = logits(fast, IDS)
    monkeypatch.setattr(native.core(), "decode_layers", lambda *a: -2)  # no memory
    assert torch.equal(logits(fast, IDS), expected)


def test_two_caches_in_turns(pair):
    fast, _ = pair()
    expected = logits(fast, IDS)
    caches, rows = [transformers.DynamicCache(config=fast.config) for _ in range(2)], ([], [])
    for start, end in ((0, 3), *((i, i + 1) for i in range(3, IDS.shape[1]))):
        for cache, found in zip(caches, rows, strict=True):
            found.append(fast(input_ids=IDS[:, start:end], past_key_values=cache).logits[:, -1])
    assert all(torch.equal(torch.cat(found).double(), expected) for found in rows)


def test_threads_that_share_a_model_have_their_own_caches(pair):
    """Native calls run without Python's lock, so that one thread's call is described while another's runs."""
    fast, _ = pair()
    prompts = [torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    expected = [logits(fast, ids) for ids in prompts]

    def run(ids):
        with torch.inference_mode():
            return [logits(fast, ids) for _ in range(4)]

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
        for found, one in zip(threads.map(run, prompts), expected, strict=True):
            assert all(torch.equal(each, one) for each in found)


def test_forgotten_positions_are_computed_again(pair):
    fast, _ = pair()
    expected = logits(fast, IDS)
    cache = transformers.DynamicCache(config=fast.config)
    fast(input_ids=IDS[:, :3], past_key_values=cache)
    fast(input_ids=IDS[:, :1], past_key_values=cache)  # a wrong guess
    cache.crop(-1)
    rows = [fast(input_ids=IDS[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(3, IDS.shape[1])]
    assert torch.equal(torch.cat(rows).double(), expected[1:])
