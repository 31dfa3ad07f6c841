"""inspect, explain and run on mixture-of-experts checkpoints."""

import json

import pytest
from forms import FORMS
from moe_gguf import write_gguf
from moe_models import make
from typer.testing import CliRunner

from bitline.cli.main import app
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


def test_run(checkpoint):
    report = json.loads(command("run", checkpoint, "--prompt", "w5 w9", "-n", 3, "--json", "--dtype", "float32"))
    assert 1 <= report["new_tokens"] <= 3 and report["plan"]
    assert report["checks"] and all(check["ok"] for check in report["checks"])
    assert "FAILED" not in command("run", checkpoint, "--prompt", "w5 w9", "-n", 3)
