"""Attention of latents (MLA, DeepSeek-V3) over ranks: its heads are cut, in every form of its layers on disk."""

import pytest
import ranks
import torch
from forms import FORMS, everything, with_changes
from moe_files import write
from moe_models import CLASSES, SIZES, make
from test_parallel import case, check, check_plan, packed_bytes

import bitline
from bitline.model.rank_plan import RankPlan
from tiny import compressed, random_model

pytestmark = pytest.mark.xdist_group("parallel")

LORA, W4 = {"q_lora_rank": 96}, everything("W4A16", 32)
MADE = {
    "gptq": ("gptq", W4, {}),
    "gptq act-order": ("gptq", with_changes(W4, act_order="own"), LORA),
    "awq": ("awq", everything("W4A16_ASYM", 32), LORA),
    "pack-quantized, biases": ("compressed-tensors", everything("W4A16", 32, torch.bfloat16), LORA | {"attention_bias": True}),
    "int8": ("compressed-tensors", everything("W8A8", dtype=torch.float32), LORA),
    "mxfp4": ("compressed-tensors", everything("MXFP4A16"), LORA),
    "fp8": ("modelopt", everything("FP8"), LORA),
    "nvfp4": ("modelopt", everything("NVFP4"), LORA),
    "fp8 blocks": ("fp8", everything("FP8_BLOCK", dtype=torch.bfloat16), {"q_lora_rank": 128}),
    "three heads": ("gptq", W4, LORA | {"num_attention_heads": 3, "num_key_value_heads": 3}),
}  # fmt: skip
SPARSE = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4}
ARCHS = {"DeepseekV2": {}, "DeepseekV32": SPARSE, "Glm4MoeLite": {}}
OWN = [name for name in FORMS if name.startswith("deepseek")]
NAMES = [*MADE, *ARCHS, *OWN]


def architecture(name, folder):
    """As compressed-tensors W4A16."""
    own = CLASSES["deepseek_v3"][1] | {"q_lora_rank": 64} | ARCHS[name]
    return compressed(folder, random_model(name, SIZES | own))[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Every form's path."""
    root, paths = tmp_path_factory.mktemp("latents"), {}
    for name in NAMES:
        folder = root / name.replace(" ", "_").replace(",", "")
        folder.mkdir()
        if name in MADE:
            target, plan, changes = MADE[name]
            paths[name] = write(folder, "deepseek_v3", make("deepseek_v3", **changes), target, plan)
        elif name in ARCHS:
            paths[name] = architecture(name, folder)
        else:
            paths[name] = FORMS[name](folder)[0]
    return paths


@pytest.fixture(scope="module", params=[2, 3])
def found(request, written, tmp_path_factory):
    """What ranks find of all forms."""
    cases = {name: case(path, tokens=6 if name == "gptq act-order" else 0) for name, path in written.items()}
    return ranks.run(tmp_path_factory.mktemp("run") / "ranks", request.param, cases)


@pytest.mark.parametrize("name", NAMES)
def test_every_form(name, found, written):
    y, model = ranks.logits(str(written[name]), None, torch.float32, "ReferenceLinearKernel")
    check(found, name, written[name], lambda _path: (y, ranks.held(model), model))
    plan = RankPlan(bitline.open_checkpoint(written[name]), torch.float32, len(found))
    check_plan(plan, found, name)
    if name == "deepseek router quantized":  # routers are dequantized, and counted as what they are then
        assert not any(layer.module.endswith("mlp.gate") for layer in plan.layers())
        for rank, (_, said) in enumerate(found):
            packed = sum(packed_bytes(layer.specs[rank]) for layer in plan.layers())
            assert packed + plan.unquantized_bytes(rank) == said[name]["bytes"]
    check_heads(model, [said[name]["shapes"] for _, said in found])
    if name == "gptq act-order":
        want = ranks.greedy(model, 6)
        assert all(said[name]["tokens"] == said[name]["static"] == want for _, said in found)


def check_heads(model, shapes):
    """Ranks share the heads; the latents are whole on each."""
    config, of_whole = model.config, ranks.shapes(model)
    attention = [name for name in of_whole if ".self_attn." in name]
    assert len(attention) >= config.num_hidden_layers * (5 if config.q_lora_rank else 4)
    per_head = {
        "q_proj": config.qk_head_dim, "q_b_proj": config.qk_head_dim, "o_proj": config.v_head_dim,
        "kv_b_proj": config.qk_nope_head_dim + config.v_head_dim,
    }  # fmt: skip
    for name in attention:
        leaf = name.rpartition(".")[2]
        dim = int(leaf == "o_proj")
        if leaf not in per_head:
            assert all(of_rank[name] == of_whole[name] for of_rank in shapes)
            continue
        heads = [of_rank[name][dim] // per_head[leaf] for of_rank in shapes]
        assert sum(heads) == config.num_attention_heads and max(heads) - min(heads) <= 1
        assert all(of_rank[name][dim] == per_head[leaf] * h for of_rank, h in zip(shapes, heads, strict=True))
        assert all(of_rank[name][1 - dim] == of_whole[name][1 - dim] for of_rank in shapes)


def test_more_ranks_than_heads(written):
    with pytest.raises(bitline.InputError, match=r"cut over 4 ranks: attention heads cannot be cut.*at most 3 ranks"):
        RankPlan(bitline.open_checkpoint(written["three heads"]), torch.float32, 4)
