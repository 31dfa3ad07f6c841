"""inspect, explain and run on mixture-of-experts checkpoints."""

import json

import pytest
from forms import FORMS
from moe_gguf import write_gguf
from moe_models import make
from typer.testing import CliRunner

from bitline.cli.main import app
from bitline.parallel import TensorParallel
from thinning import thinned

FORMS_RUN = ["gguf", "qwen3 mixed stack", "gpt-oss mxfp4", "qwen3 pack-quantized", "deepseek fp8 blocks", "qwen3 modelopt nvfp4"]


def command(*words):
    """Standard output of `bitline WORDS`, which has to succeed."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module", params=thinned(FORMS_RUN, 2))
def checkpoint(request, tmp_path_factory):
    """A checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param == "gguf":
        model = make("qwen3_moe", num_experts=4, moe_intermediate_size=768)
        return write_gguf(folder / "model.gguf", model, lambda _name: "Q4_1", tokenizer=True)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    FORMS[request.param](folder)
    words = Tokenizer(WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 128)}}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_inspect(checkpoint):
    report = json.loads(command("inspect", checkpoint, "--json"))
    assert report["layers"] == sum(kind["layers"] for kind in report["kinds"]) >= 2 * 4 * 2
    assert command("inspect", checkpoint).strip()


@pytest.mark.parametrize("platform", ["cpu:avx512,amx", "cuda:sm90"])
def test_explain(checkpoint, platform):
    report = json.loads(command("explain", checkpoint, "--platform", platform, "--m", "1,64", "--json"))
    assert report["plans"] and all(plan["candidates"][0]["ok"] for plan in report["plans"])
    assert command("explain", checkpoint, "--platform", platform).strip()


def test_explain_of_whole_experts_on_ranks(tmp_path):
    """Four experts on three ranks: what each holds, and that no scales of experts are exchanged."""
    folder = FORMS["gpt-oss mxfp4"](tmp_path)[0]
    words = ("explain", folder, "--platform", "cuda:sm90", "--m", "1,64", "--tp", 3)
    made, cut = (json.loads(command(*words, *more, "--json")) for more in (("--expert-parallel",), ()))
    of_experts = [p for p in made["plans"] if p["experts"]]
    assert made["expert_parallel"] and not cut["expert_parallel"]
    assert sorted((p["experts"], *p["ranks"]) for p in of_experts) == [(1, 0, 1), (1, 0, 1), (2, 2), (2, 2)]
    assert all((p["cut"], p["layers"], p["experts_of_layer"]) == ("E", 2, 4) for p in of_experts)
    assert all(p["shape"] == p["whole_shape"] for p in of_experts)
    one, other, two = (r["packed_bytes"] for r in made["tensor_parallel"]["ranks"])
    assert one == other and two == 2 * one == sum(2 * p["packed_bytes"] for p in of_experts if p["experts"] == 2)
    small, large = (sum(p["cost_seconds"]["64"] for p in of_experts if p["experts"] == count) for count in (1, 2))
    assert large == pytest.approx(2 * small)
    assert not made["tensor_parallel"]["whole"]
    shown = " ".join(command(*words, "--expert-parallel").split())
    assert "E/3 ranks 0-1" in shown and "E/3 rank 2" in shown and "that are expected to run on a rank with 2" in shown


def test_expert_parallelism_without_ranks_or_a_model(tmp_path):
    folder = FORMS["qwen3 gptq"](tmp_path)[0]
    done = CliRunner().invoke(app, ["explain", str(folder), "--expert-parallel"])
    assert done.exit_code == 2 and "--tp" in done.output
    (folder / "config.json").write_text(json.dumps({"quantization_config": json.loads(
        (folder / "config.json").read_text())["quantization_config"]}))  # fmt: skip
    done = CliRunner().invoke(app, ["explain", str(folder), "--tp", "2", "--expert-parallel"])
    assert done.exit_code == 1 and "expert parallelism is planned for models alone" in " ".join(str(done.exception).split())


@pytest.mark.parametrize("words", [(), ("--expert-parallel",)])
def test_run_asks_for_whole_experts(words, checkpoint, monkeypatch):
    asked = []
    monkeypatch.setattr(TensorParallel, "resolve", lambda _tp, _device, *, expert_parallel=False: asked.append(expert_parallel))
    command("run", checkpoint, "--prompt", "w5 w9", "-n", 1, "--no-check", "--dtype", "float32", *words)
    assert asked[0] == bool(words)


def test_run(checkpoint):
    report = json.loads(command("run", checkpoint, "--prompt", "w5 w9", "-n", 3, "--json", "--dtype", "float32"))
    assert 1 <= report["new_tokens"] <= 3 and report["plan"]
    assert report["checks"] and all(check["ok"] for check in report["checks"])
    assert "FAILED" not in command("run", checkpoint, "--prompt", "w5 w9", "-n", 3)
