"""Mixture-of-experts checkpoints in every form: the logits and the routing of transformers' model of the dequantized weights."""

import copy
import json
from contextlib import contextmanager

import pytest
import torch
from forms import FORMS
from moe_models import IDS
from safetensors.torch import load_file, save_file

import bitline
from bitline.experts import ExpertStack, QuantExperts
from bitline.testing.oracle import transformers_gguf_model
from thinning import thinned

REFERENCE = bitline.Policy(kernel="ReferenceLinearKernel")
UNQUANTIZED = ("qwen3 layer unquantized",)  # one layer's experts are transformers' own module
VARIANTS = {  # run by `make test-all`: others are close to them
    "qwen3 gptq asymmetric", "qwen3 experts only", "qwen3 modelopt nvfp4 joint", "qwen3 modelopt nvfp4 expert 0 apart",
    "qwen3 modelopt fp8 expert 0 apart", "qwen3 modelopt fp8", "mixtral gptq", "mixtral gptq act-order", "qwen3 gguf q4_0",
    "qwen3 gptq router quantized", "deepseek router quantized", "qwen3 modelopt nvfp4 input scales of gate and up",
}  # fmt: skip
MARKS = dict.fromkeys(VARIANTS, pytest.mark.exhaustive)
EVERY = [pytest.param(form, marks=MARKS.get(form, ())) for form in FORMS]
APART = {  # gate and up are a stack each
    "qwen3 gptq act-order of gate and up", "mixtral gptq act-order", "qwen3 modelopt nvfp4", "deepseek fp8 cut blocks",
    "qwen3 modelopt nvfp4 input scales of gate and up", "qwen3 modelopt fp8 input scales of gate and up", "qwen3 gguf mixed",
    "qwen3 modelopt nvfp4 expert 0 joint", "qwen3 modelopt nvfp4 expert 0 apart", "qwen3 modelopt fp8 expert 0 joint",
    "qwen3 modelopt fp8 expert 0 apart", "qwen3 mixed stack",
}  # fmt: skip
NO_STACKS = {  # by layer: which parts are stacks, of the first projection's one or two and the second
    "qwen3 mixed stack": [[True, False, True], [True, False, False]], "qwen3 up unquantized": [[False, True]] * 2,
}  # fmt: skip


@contextmanager
def routes(model):
    """The experts of each token of each layer, in the order of the calls."""
    seen, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
            hooks.append(module.register_forward_hook(lambda _m, _args, out: seen.append(out[2])))
    yield seen
    for hook in hooks:
        hook.remove()


def run(model, ids=IDS):
    """Logits, and the experts of each token of each layer."""
    with torch.inference_mode(), routes(model) as seen:
        return model(ids, use_cache=False).logits, seen


def experts_of(model):
    return [m for m in model.modules() if isinstance(m, QuantExperts)]


def check_close(ours, theirs):
    """Logits of float32 models whose products may be summed in another order."""
    assert float((ours - theirs).abs().max()) <= 2e-6 * float(theirs.abs().max())


@pytest.mark.parametrize("form", EVERY)
def test_same_logits_and_routing_as_transformers(form, tmp_path):
    folder, oracle = FORMS[form](tmp_path)
    model = bitline.load_model(folder, dtype=torch.float32, policy=REFERENCE)
    for ids in (IDS, IDS[:, 3:4], torch.randint(0, 128, (3, 17), generator=torch.Generator().manual_seed(1))):
        (ours, mine), (theirs, wanted) = run(model, ids), run(oracle, ids)
        assert len(mine) == len(wanted) > 0 and all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
        assert float(theirs.std()) > 0.1
        check_close(ours, theirs)
    layers = sum(1 for m in oracle.modules() if "gate_up_proj" in m._parameters)
    assert len(experts_of(model)) == layers - (form in UNQUANTIZED)
    assert not any(p.is_meta for p in model.parameters())
    stacks = [[isinstance(part, ExpertStack) for part in (*m.up, m.down)] for m in experts_of(model)]
    assert {len(parts) for parts in stacks} == {3 if form in APART or form == "qwen3 gguf other width" else 2}
    assert stacks == NO_STACKS[form] if form in NO_STACKS else all(map(all, stacks))


@pytest.mark.parametrize("form", thinned(["qwen3 gguf mixed", "qwen3 gguf q4_0", "qwen3 gguf q4_k"], 3))
def test_same_logits_as_transformers_own_gguf_loader(form, tmp_path):
    folder, _ = FORMS[form](tmp_path)
    (path,) = folder.iterdir() if folder.is_dir() else (folder,)
    theirs = transformers_gguf_model(path, torch.float32)
    theirs.config._experts_implementation = "eager"
    model = bitline.load_model(path, dtype=torch.float32, policy=REFERENCE)
    check_close(run(model)[0], run(theirs)[0])


def test_no_tokens(tmp_path):
    folder, _ = FORMS["qwen3 pack-quantized"](tmp_path)
    (first, _) = experts_of(bitline.load_model(folder, dtype=torch.float32, policy=REFERENCE))
    y = first(torch.empty(0, 128), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert y.shape == (0, 128) and y.dtype == torch.float32


def test_shards_that_cut_a_layers_experts(tmp_path):
    """Experts of one layer in several files, in no order."""
    folder, oracle = FORMS["qwen3 gptq"](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors, key=lambda name: name[::-1])
    files = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in files.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    model = bitline.load_model(folder, dtype=torch.float32, policy=REFERENCE)
    check_close(run(model)[0], run(oracle)[0])


@pytest.mark.parametrize("form", thinned(["deepseek fp8 blocks", "deepseek router quantized"], 2))
def test_layers_for_prediction_are_left_out(form, tmp_path):
    """DeepSeek-V3's files have a layer 61 for multi-token prediction, which transformers does not run."""
    folder, oracle = FORMS[form](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    more = {n.replace("layers.1.", "layers.61."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    assert any("experts" in n for n in more)
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    model = bitline.load_model(folder, dtype=torch.float32, policy=REFERENCE)
    check_close(run(model)[0], run(oracle)[0])


def test_a_deep_copy_and_a_second_load_are_equal(tmp_path):
    folder, _ = FORMS["qwen3 gptq"](tmp_path)
    model = bitline.load_model(folder, dtype=torch.bfloat16)
    again, copied = bitline.load_model(folder, dtype=torch.bfloat16), copy.deepcopy(model)
    wanted = run(model)[0]
    assert torch.equal(run(again)[0], wanted) and torch.equal(run(copied)[0], wanted)
    pointers = [{t.data_ptr() for s in m.modules() if isinstance(s, ExpertStack) for t in s.packed} for m in (model, copied)]
    assert pointers[0] and not pointers[0] & pointers[1]


@pytest.mark.parametrize("form", ["qwen3 pack-quantized", "gpt-oss mxfp4"])
def test_default_kernels_stay_close(form, tmp_path):
    """In bfloat16, on the kernels that selection takes: at most twice the error of transformers' own bfloat16 model."""
    folder, oracle = FORMS[form](tmp_path)
    (exact, wanted), (ours, mine) = run(oracle), run(bitline.load_model(folder, dtype=torch.bfloat16))
    theirs, rounded = run(copy.deepcopy(oracle).bfloat16())
    assert all(torch.equal(a, w) and torch.equal(b, w) for a, b, w in zip(mine, rounded, wanted, strict=True))
    assert float((ours.float() - exact).abs().max()) <= 2 * float((theirs.float() - exact).abs().max()) + 0.01
