"""bitline verify and bitline.verify on mixture-of-experts checkpoints: every expert, whole and on each rank."""

import json

import pytest
import torch
from forms import FORMS
from typer.testing import CliRunner

import bitline
from bitline.cli.main import app
from bitline.model.plan import expert_stacks
from bitline.model.rank_plan import RankPlan

NAMES = ["qwen3 gguf mixed", "qwen3 pack-quantized", "gpt-oss mxfp4", "qwen3 modelopt nvfp4"]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory):
    return FORMS[request.param](tmp_path_factory.mktemp("checkpoint"))[0]


def report(*words, code=0):
    done = CliRunner().invoke(app, ["verify", *map(str, words), "--device", "cpu", "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_the_command(checkpoint):
    found = report(checkpoint, "--m", "1,4")
    records = bitline.open_checkpoint(checkpoint).layers()
    assert found["ok"] and {c["layer"] for c in found["checks"]} == {record.name for record in records}


def test_the_command_on_two_ranks(checkpoint):
    found = report(checkpoint, "--m", "2", "--tp", 2)
    assert found["ok"]
    experts = {c["layer"] for c in found["checks"] if "experts" in c["layer"] or "_exps" in c["layer"]}
    assert experts and all({c["rank"] for c in found["checks"] if c["layer"] == name} == {0, 1} for name in experts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_command_on_ranks_with_whole_experts(checkpoint, ranks):
    """Each expert is checked on the rank that has it, and the experts of each rank as one call."""
    found = report(checkpoint, "--m", "2", "--tp", ranks, "--expert-parallel")
    plan = RankPlan(bitline.open_checkpoint(checkpoint), torch.bfloat16, ranks, expert_parallel=True)
    owners = {layer.record.name: layer.rank for layer in plan.layers() if layer.rank is not None}
    assert found["ok"] and found["expert_parallel"] and set(owners.values()) == set(range(ranks))
    checked = {name: {c["rank"] for c in found["checks"] if c["layer"] == name} for name in owners}
    assert checked == {name: {rank} for name, rank in owners.items()}
    whole = report(checkpoint, "--m", "2")["fused"]
    expected = {(c["layer"], rank) for c in whole if "experts" in c["layer"] for rank in range(ranks)}
    assert {(c["layer"], c["rank"]) for c in found["fused"]} == expected and found["skipped"] == []


def test_more_ranks_than_experts(checkpoint):
    done = CliRunner().invoke(app, ["verify", str(checkpoint), "--device", "cpu", "--tp", "7", "--expert-parallel"])
    assert done.exit_code == 1 and "more ranks than experts" in str(done.exception)


def test_one_wrong_bit_in_the_last_expert(checkpoint):
    model = bitline.load_model(checkpoint, dtype=torch.float32)
    bitline.verify(model)
    name, stack = list(expert_stacks(model))[-1]
    held = next(t for t in stack.packed if t.numel())[stack.num_experts - 1]
    held.view(-1).view(torch.uint8)[held.nbytes // 2] ^= 1
    with pytest.raises(bitline.VerificationError) as caught:
        bitline.verify(model)
    assert caught.value.tensor == f"{name}.{stack.num_experts - 1}" and "1 of" in caught.value.found


def test_one_wrong_bit_in_a_quantized_table(tmp_path):
    model = bitline.load_model(FORMS["qwen3 gguf mixed"](tmp_path)[0])
    table = model.get_input_embeddings()
    table.get_buffer("codes").view(-1)[5] ^= 1
    with pytest.raises(bitline.VerificationError, match=r"embed_tokens.*packed tensor codes differs.*1 of"):
        bitline.verify(model)
