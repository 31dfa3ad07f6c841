"""Native steps between linear layers: their arithmetic beside transformers' own modules, and when they stay out of the way."""

import copy
import warnings

import pytest
import torch
from torch import nn

import bitline
import tiny
from bitline import native
from bitline.linear import QuantLinear
from bitline.model import decode_step
from bitline.model.load import load_model

pytestmark = pytest.mark.skipif(native.core() is None, reason="needs the native core")
transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def inference():
    """On one thread: a second one would wait for other tests' processes at each of thousands of steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def steps_apart(a, b):
    """How many bfloat16 numbers lie between each pair."""
    order = lambda t: torch.where(t.view(torch.int16) < 0, -(t.view(torch.int16).int() & 0x7FFF), t.view(torch.int16).int())
    return (order(a.contiguous()) - order(b.contiguous())).abs()


def norm_of(n, epsilon=1e-6):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(n, epsilon).to(BF16)
    norm.weight.data = torch.randn(n).to(BF16)
    return norm


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_norm(n, rows, level):
    norm, x = norm_of(n), (torch.randn(1, rows, n) * 3).to(BF16)
    apart = steps_apart(decode_step._norm(norm, x), norm(x))
    assert apart.max() <= 1 and (apart > 0).float().mean() <= 0.02  # the sums are added up in another order


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_norm_of_what_is_no_number(bad, level):
    norm, x = norm_of(40), torch.randn(1, 40).to(BF16)
    x[0, 3] = bad
    assert torch.equal(decode_step._norm(norm, x).isnan(), norm(x).isnan())


@pytest.mark.parametrize("n", [1, 15, 16, 33, 1536])
def test_gate(n, level):
    gate, up = (torch.randn(n) * 6).to(BF16), torch.randn(n).to(BF16)
    gate[: min(n, 8)] = torch.tensor([0, -0.0, 200, -200, torch.inf, torch.nan, 88.5, -87.5])[:n].to(BF16)
    y = torch.empty_like(up)
    native.core().step_gate(gate.data_ptr(), up.data_ptr(), y.data_ptr(), n)
    expected = nn.functional.silu(gate) * up
    same = (y == expected) | (y.isnan() & expected.isnan())
    small = expected.abs() < 1e-30
    assert bool((same | small | (steps_apart(y, expected) <= 1)).all()) and bool((y[small].abs() < 1e-30).all())
    assert same.float().mean() >= 0.95 or n < 20


def rotated(x, cos, sin):
    from transformers.models.llama.modeling_llama import rotate_half

    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize("dim", [16, 48, 64, 128, 256])
@pytest.mark.parametrize(("heads", "repeat"), [(1, 1), (3, 3), (2, 8)])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_attention(dim, heads, repeat, length, level):
    torch.manual_seed(length)
    place, scale = length + 3, dim**-0.5
    keys, values = ((torch.randn(heads, place, dim) * 2).to(BF16) for _ in range(2))
    q, k, v = ((torch.randn(count, dim) * 2).to(BF16) for count in (heads * repeat, heads, heads))
    angle = torch.randn(dim)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    before, y = (keys.clone(), values.clone()), torch.empty(heads * repeat, dim, dtype=BF16)
    qkv = torch.cat((q, k, v))
    pointers = [t.data_ptr() for t in (qkv, cos, sin, keys, values, y)]
    assert native.core().step_attention(*pointers, heads, repeat, dim, place, length - 1, scale) == 0
    for held, old, new in zip((keys, values), before, (rotated(k, cos, sin), v), strict=True):
        old[:, length - 1] = new
        assert torch.equal(held, old)  # bit for bit, and nothing else is touched
    full = [t[:, :length].repeat_interleave(repeat, 0) for t in (keys, values)]
    query = rotated(q, cos, sin)[:, None]
    sdpa = nn.functional.scaled_dot_product_attention
    exact = sdpa(query.double(), *(t.double() for t in full), scale=scale)[:, 0]
    theirs = sdpa(query, *full, scale=scale)[:, 0]
    error, allowed = (y.double() - exact).abs().max(), (theirs.double() - exact).abs().max()
    assert error <= 2 * allowed + 2**-9 * exact.abs().max()


def test_attention_refuses_sizes_that_it_has_no_code_for():
    x = torch.zeros(4096, dtype=BF16)
    at = x.data_ptr()
    sizes = ((1, 1, 24, 4, 0), (1, 1, 272, 4, 0), (1, 33, 16, 4, 0), (1, 1, 16, 4, 4), (1, 1, 16, 4, -1))
    for heads, repeat, dim, place, position in sizes:
        assert native.core().step_attention(at, at, at, at, at, at, heads, repeat, dim, place, position, 1.0) == -4


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 16), (63, 17), (64, 31), (130, 576), (1001, 100)])
def test_plain_rows(n, k, level):
    w, x, y = torch.randn(n, k).to(BF16), torch.randn(k).to(BF16), torch.empty(n, dtype=BF16)
    assert native.core().step_rows(x.data_ptr(), w.data_ptr(), y.data_ptr(), n, k) == 0
    exact = w.double() @ x.double()
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18 * (w.abs().double() @ x.abs().double())).all()


def test_all_levels_and_numbers_of_threads_give_the_same_bits():
    found, before, threads = [], native.isa(), torch.get_num_threads()
    try:
        for name in native.isas():
            for count in (1, 2):
                native.use_isa(name)
                torch.set_num_threads(count)
                torch.manual_seed(0)
                heads, repeat, dim, length = 3, 3, 64, 500
                data = [torch.randn(*s).to(BF16) for s in ((15, dim), (dim,), (dim,), (heads, length, dim), (heads, length, dim))]
                y, z, g = torch.empty(9, dim, dtype=BF16), torch.empty(999, dtype=BF16), torch.empty(999, dtype=BF16)
                native.core().step_attention(*(t.data_ptr() for t in (*data, y)), heads, repeat, dim, length, length - 1, 0.125)
                w, x = torch.randn(999, 333).to(BF16), torch.randn(333).to(BF16)
                native.core().step_rows(x.data_ptr(), w.data_ptr(), z.data_ptr(), 999, 333)
                native.core().step_gate(z.data_ptr(), w.data_ptr(), g.data_ptr(), 999)
                found.append(torch.cat((y.flatten(), z, g, decode_step._norm(norm_of(333), x[None])[0])))
    finally:
        native.use_isa(before)
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("schemes", [("W4A16", "W4A16"), ("W4A16_ASYM", "W8A16", "W4A16"), ("W8A8", "W4A16", "FP8_DYNAMIC"),
                                     ("MXFP4A16", "W3A16", "W8A8")])  # fmt: skip
def test_products_of_one_row_are_those_of_each_layer(schemes, level):
    if level == "portable":
        pytest.skip("no products at this level")
    torch.manual_seed(1)
    layers = []
    for i, scheme in enumerate(schemes):
        w, bias = torch.randn(33 + 160 * i, 256).to(BF16), torch.randn(33 + 160 * i).to(BF16)
        layer = QuantLinear(bitline.quantize(w, scheme), bias if i else None, kernel="CPUWNA16LinearKernel")
        layers.append(layer)
    x = torch.randn(1, 256).to(BF16)
    y = torch.empty(sum(layer.out_features for layer in layers), dtype=BF16)
    at = [t if t is None else t.data_ptr() for layer in layers for t in layer._direct[1][:2]] + [None, None]
    assert native.core().gemm_row(x.data_ptr(), 256, *at[:6], y.data_ptr(), 2) == 0
    assert torch.equal(y, torch.cat([layer(x)[0] for layer in layers]))


def family(name, **changes):
    more = {"Qwen3": {"head_dim": 32}, "Mistral": {"sliding_window": None}}.get(name, {})
    settings = tiny.SETTINGS | {"max_position_embeddings": 1024}
    torch.manual_seed(0)
    with torch.inference_mode(mode=False):
        config = getattr(transformers, f"{name}Config")(**(settings | more | changes))
        return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()


@pytest.fixture
def pair(tmp_path):
    """A model with native steps and the same one without."""

    def make(name="Llama", **changes):
        with torch.inference_mode(mode=False):
            folder, _ = tiny.compressed(tmp_path / name, family(name, **changes))
            return load_model(folder, dtype=BF16), load_model(folder, dtype=BF16, native_step=False)

    return make


def steps(model):
    return {name for name, module in model.named_modules() if "forward" in module.__dict__}


def logits(model, ids, *, room=True):
    """Of every position, given one by one after the first three."""
    cache = transformers.DynamicCache(config=model.config)
    if room:
        decode_step.make_room(model, cache)
    rows = [model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True).logits[:, -1]]
    for i in range(3, ids.shape[1]):
        rows.append(model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits[:, -1])
    return torch.cat(rows).double()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_whole_models(name, pair, tmp_path, level):
    if level == "portable":
        pytest.skip("no products at this level")
    fast, plain = pair(name)
    assert {"model.layers.0", "model.layers.1", "model.layers.1.input_layernorm", "model.norm"} <= steps(fast)
    assert not steps(plain)
    exact = load_model(tmp_path / name, dtype=torch.float32)
    assert not steps(exact)
    ids = torch.randint(3, 100, (1, 300))
    truth, ours, theirs = (logits(model, ids) for model in (exact, fast, plain))
    assert (ours - truth).abs().mean() <= 1.5 * (theirs - truth).abs().mean()
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()


def called(model, monkeypatch):
    """Names of the core's functions that a model calls for one token."""
    core, names = native.core(), []
    for name in ("step_norm", "step_layer", "step_rows"):
        function = getattr(core, name)
        monkeypatch.setattr(core, name, lambda *a, name=name, function=function: (names.append(name), function(*a))[1])
    logits(model, torch.tensor([[1, 5, 9, 33]]))
    monkeypatch.undo()
    return set(names)


def test_a_token_goes_through_the_core(pair, monkeypatch):
    fast, plain = pair()
    assert called(fast, monkeypatch) == {"step_norm", "step_layer"}
    assert called(plain, monkeypatch) == set()


def test_a_large_plain_head(monkeypatch):
    head = nn.Linear(1024, 1030, bias=False).to(BF16)
    x = torch.randn(1, 1, 1024).to(BF16)
    error = (decode_step._dense(head, x).double() - head.double()(x.double())).abs().max()
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
def test_parts_that_somebody_replaced_are_used(name, pair):
    fast, _ = pair()
    layer, count = fast.model.layers[1], []
    module = layer.get_submodule(name)
    before = module.forward
    module.forward = lambda *a, **k: (count.append(1), before(*a, **k))[1]
    logits(fast, torch.tensor([[1, 5, 9, 33]]))
    assert len(count) == 2
    del module.forward

    class Own(type(module)):
        def __call__(self, *a, **k):
            count.append(2)
            return super().__call__(*a, **k)

    module.__class__ = Own
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


def bits_of_both(fast, plain, run):
    a, b = run(fast), run(plain)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "run",
    [
        lambda m: m(input_ids=torch.tensor([[1, 5, 9, 33] * 4])).logits,  # more rows than a step has
        lambda m: (
            m(input_ids=torch.tensor([[1, 5, 9, 33] * 4] * 3), attention_mask=torch.tensor([[0] * 4 + [1] * 12] * 3)).logits
        ),
    ],
)
def test_prompts_are_left_to_transformers(run, pair):
    bits_of_both(*pair(), run)


def test_masks_batches_and_other_caches_are_left_to_transformers(pair, monkeypatch):
    fast, _ = pair()
    core, count = native.core(), []
    monkeypatch.setattr(core, "step_layer", lambda *a: count.append(1))
    ids = torch.tensor([[1, 5, 9, 33]])
    logits(fast, ids, room=False)
    logits(fast, ids.repeat(2, 1))
    for other in (transformers.DynamicCache(), transformers.StaticCache(config=fast.config, max_cache_len=8)):
        fast(input_ids=ids[:, :3], past_key_values=other)
        fast(input_ids=ids[:, 3:], past_key_values=other)
    fast(input_ids=ids[:, :1])
    cache = transformers.DynamicCache(config=fast.config)
    decode_step.make_room(fast, cache)
    fast(input_ids=ids[:, :3], past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1]]))
    fast(input_ids=ids[:, 3:], past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    assert not count


def test_what_watches_torch_gets_torch(pair, monkeypatch):
    fast, plain = pair()
    norm = fast.model.norm
    x = torch.randn(1, 1, 64).to(BF16)
    monkeypatch.setattr(native.core(), "step_norm", None)  # to call it would be a TypeError
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


def test_a_copy_has_steps_of_its_own(pair):
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
        norm.weight.data = torch.rand(64).to(BF16)  # another memory
        q = model.model.layers[0].self_attn.q_proj
        q.reload(bitline.quantize(torch.randn(64, 64), "W4A16", group_size=32))
    ids = torch.tensor([[1, 5, 9, 33]])
    a, b = logits(fast, ids), logits(plain, ids)
    assert (a - b).abs().max() <= 0.1 * b.abs().max()


def test_classes_are_known_by_their_text():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    assert [decode_step._kind_of(c) for c in (LlamaRMSNorm, LlamaMLP, LlamaAttention)] == ["norm", "mlp", "attention"]
    assert (
        decode_step._kind_of(Qwen3Attention) == "attention of normed heads" and decode_step._kind_of(LlamaDecoderLayer) == "layer"
    )

    class Own(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1

    for cls in (Gemma2Attention, Gemma2RMSNorm, nn.Linear, Own):
        assert decode_step._kind_of(cls) == ""


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_gates_are_left_alone(activation, pair):
    fast, _ = pair(hidden_act=activation)
    assert steps(fast) and not any(name.endswith(("layers.0", "mlp")) for name in steps(fast))


def test_without_the_core_there_are_no_steps(pair, monkeypatch):
    fast, plain = pair()
    monkeypatch.setattr(native, "core", lambda: None)
    assert decode_step.install(plain) == 0
    ids = torch.tensor([[1, 5, 9, 33]])
    assert torch.equal(logits(fast, ids, room=False)[:, :3], logits(plain, ids)[:, :3])


def test_steps_can_be_turned_off(pair, tmp_path, monkeypatch):
    fast, _ = pair()
    assert steps(fast)
    monkeypatch.setenv("BITLINE_NO_STEP", "1")
    assert not steps(load_model(tmp_path / "Llama", dtype=BF16))
    assert steps(load_model(tmp_path / "Llama", dtype=BF16, native_step=True))
    monkeypatch.delenv("BITLINE_NO_STEP")
    assert not steps(load_model(tmp_path / "Llama", dtype=BF16, policy="batch_invariant"))


@pytest.mark.parametrize("pieces", [(1,), (3, 1, 1), (300, 1, 250), (255, 1, 1, 1)])
def test_room_holds_what_a_dynamic_layer_holds(pieces):
    from transformers.cache_utils import DynamicLayer

    room, layer = decode_step._room()(), DynamicLayer()
    assert room.get_seq_length() == 0 and room.keys is None
    for count in pieces:
        k, v = torch.randn(2, 3, count, 16), torch.randn(2, 3, count, 16)
        for a, b in zip(room.update(k, v), layer.update(k, v), strict=True):
            assert torch.equal(a, b)
        assert room.get_mask_sizes(1) == layer.get_mask_sizes(1) and room.get_seq_length() == layer.get_seq_length()
    assert not room.reserve(3, 16, torch.float32, 1)  # two sequences
    room.reset()
    assert room.get_seq_length() == 0 and room.reserve(3, 16, torch.float32, 1)
    assert not room.reserve(4, 16, torch.float32, 1) and not room.reserve(3, 16, BF16, 1)
