"""The command: every sub-command on a tiny checkpoint, as text and as JSON, and its exit codes."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
from rich.console import Console

from command import bitline
from tiny import compressed, llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    path, _ = compressed(tmp_path_factory.mktemp("tiny"), llama())
    words = Tokenizer(WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 100)}}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
    return path


def test_help_does_not_import_torch():
    code = "import sys; sys.argv=['bitline','--help']\nfrom bitline.cli.main import run\ntry: run()\nexcept SystemExit: pass\n"
    done = subprocess.run([sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True)
    assert done.stdout.strip().endswith("False"), done.stderr
    assert all(word in done.stdout for word in ("run", "inspect", "explain", "tune", "verify", "bench", "convert", "doctor"))


def test_run(folder):
    done = bitline("run", folder, "--prompt", "w5 w9", "-n", 5)
    assert done.returncode == 0, done.stderr
    for word in ("pack-quantized", "runner-up", "first token", "tokens/s", "in bf16", "against the reference", "ok"):
        assert word in done.stdout
    assert "FAILED" not in done.stdout


def test_run_as_json(folder):
    done = bitline("run", folder, "--prompt", "w5 w9", "-n", 5, "--json", "--dtype", "float32")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["prompt_tokens"] == 2 and 1 <= report["new_tokens"] <= 5
    assert report["memory_bytes"]["held"] > 0 and report["plan"] and all(c["ok"] for c in report["checks"])
    assert {(row["shape"][0], row["shape"][1]) for row in report["plan"]} == {(64, 64), (32, 64), (160, 64), (64, 160)}


def test_inspect(folder):
    report = json.loads(bitline("inspect", folder, "--json").stdout)
    assert report["format"] == "compressed-tensors" and report["layers"] == 14
    assert sum(k["layers"] for k in report["kinds"]) == 14
    assert {k["bits"] for k in report["kinds"]} == {4} and all(k["bits_per_weight"] > 4 for k in report["kinds"])
    text = bitline("inspect", folder)
    assert text.returncode == 0 and "160×64" in text.stdout


@pytest.mark.parametrize("platform", ["cpu", "cpu:avx512,amx", "cuda:sm90", "cuda:sm75", "rocm:gfx942", "rocm:gfx1100", "xpu"])
def test_explain_on_any_platform(folder, platform):
    report = json.loads(bitline("explain", folder, "--platform", platform, "--m", "1,16,512", "--json").stdout)
    assert report["plans"]
    for plan in report["plans"]:
        assert plan["candidates"][0]["ok"] and list(plan["candidates"][0]["cost_seconds"]) == ["1", "16", "512"]
        assert all(c["reason"] for c in plan["candidates"] if not c["ok"])


def test_doctor():
    done = bitline("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    reference = next(k for k in report["kernels"] if k["kernel"] == "ReferenceLinearKernel")
    assert reference["ran"] and reference["ok"] and report["devices"][0]["bandwidth"] > 1e8
    assert {p["package"] for p in report["packages"]} >= {"triton", "zentorch"}
    text = bitline("doctor").stdout
    assert all(
        f"\n{name}" in text for name in ("libraries", "C++ compiler", "native core", "optional packages", "zentorch", "kernels")
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "/no/such/folder"], 1, "no such file or folder"),
        (["inspect", "/no/such.gguf"], 1, "no such file or folder"),
        (["explain", "FOLDER", "--platform", "cuda:sm9x"], 2, "unknown word"),
        (["explain", "FOLDER", "--platform", "quantum"], 2, "unknown platform"),
        (["explain", "FOLDER", "--m", "0,1"], 2, "whole numbers"),
        (["explain", "FOLDER", "--kernel", "Nope"], 2, "not registered"),
        (["explain", "FOLDER", "--backend", "nope"], 2, "not registered"),
        (["explain", "FOLDER", "--tp", "4096"], 1, "cannot be cut over 4096 ranks"),
        (["explain", "FOLDER", "--disable", "Nope"], 2, "not registered"),
        (["explain", "FOLDER", "--policy", "fast"], 2, "unknown policy"),
        (["explain", "FOLDER", "--tp", "0"], 2, "Invalid value for"),
        (["explain", "FOLDER", "--m", "16,x"], 2, "whole numbers"),
        (["run", "FOLDER", "--dtype", "int3"], 2, "unknown dtype"),
        (["run", "FOLDER", "--device", "toaster"], 2, "not a device"),
        (["run", "FOLDER", "--prompt", ""], 1, "no tokens"),
        (["run", "FOLDER", "--chat"], 1, "no chat template"),
        (["run", "FOLDER", "-n", "5000"], 1, "longer than the model's context"),
        (["run", "FOLDER", "--top-k", "5"], 2, "give a temperature"),
        (["run", "FOLDER", "--temperature", "inf"], 2, "finite temperature"),
        (["run", "FOLDER", "--m", "0"], 2, "whole numbers"),
        (["convert", "FOLDER", "/no/such/place", "--to", "gtpq"], 2, "unknown format"),
        (["run"], 2, "Missing argument"),
        (["frobnicate"], 2, "No such command"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)
def test_errors_and_exit_codes(folder, words, code, message):
    done = bitline(*(str(folder) if w == "FOLDER" else w for w in words))
    output = " ".join((done.stderr + done.stdout).split())
    assert done.returncode == code and message in output, output
    assert "Traceback" not in output


def test_errors_as_json(folder):
    done = bitline("inspect", "/no/such/folder", "--json")
    error = json.loads(done.stdout)["error"]
    assert (
        done.returncode == 1 and error["type"] == "CheckpointError" and error["file"] == "/no/such/folder" and error["expected"]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "Missing argument"), (["frobnicate"], "No such command"), (["explain", "x", "--m", "0"], "whole numbers"),
        (["run", "smollm2", "--nosuch"], "No such option"), (["run", "smollm2", "-n", "none"], "Invalid value for"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)  # fmt: skip
def test_usage_errors_as_json(words, message):
    done = bitline(*words, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2 and message in error["message"] and error["type"] and not done.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c(as_json):
    """In the middle of `run`: one line, no traceback, and the exit code that shells know."""
    code = """
import sys, time
import bitline.cli.run as run
run.run_report = lambda *a, **k: (print("ready", file=sys.stderr, flush=True), time.sleep(60))
from bitline.cli.main import run
run()
"""
    words = ["--json"] if as_json else []
    child = subprocess.Popen(
        [sys.executable, "-c", code, "run", "model", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    assert child.stderr.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    if as_json:
        assert json.loads(out)["error"]["type"] == "Interrupted" and not err
    else:
        assert err == "Interrupted: stopped by Ctrl-C\n" and not out


def test_version():
    assert bitline("--version").stdout.startswith("bitline 0.")


def test_unsupported_kernel_request(folder):
    done = bitline("run", folder, "--prompt", "w5", "-n", 2, "--kernel", "TorchInt8PackLinearKernel")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0 and "TorchInt8PackLinearKernel was asked for and cannot run this layer" in said
    strict = bitline("run", folder, "--prompt", "w5", "--kernel", "TorchInt8PackLinearKernel", "--strict", "--json")
    assert strict.returncode == 1 and json.loads(strict.stdout)["error"]["type"] == "NoKernelError"


def test_the_command_overrules_the_environment(folder):
    chosen = [
        bitline("explain", folder, *words, "--json", BITLINE_KERNEL="ReferenceLinearKernel")
        for words in ([], ["--kernel", "auto"])
    ]
    first, second = (json.loads(done.stdout)["plans"][0]["kernel"] for done in chosen)
    assert first == "ReferenceLinearKernel" != second


def test_explain_has_the_activation_dtype_of_run(folder):
    dtypes = {p: json.loads(bitline("explain", folder, "--platform", p, "--json").stdout)["activations"]
              for p in ("cpu:avx2", "cpu:avx2,no_native", "cpu:avx512_bf16", "cuda:sm75", "cuda:sm90")}  # fmt: skip
    assert dtypes == {
        "cpu:avx2": "bfloat16",
        "cpu:avx2,no_native": "float32",
        "cpu:avx512_bf16": "bfloat16",
        "cuda:sm75": "float16",
        "cuda:sm90": "bfloat16",
    }


@pytest.mark.parametrize("name", ["m[/x]y", "m[red]z", "[bold]"])
def test_names_are_not_interpreted_as_markup(folder, tmp_path, name):
    strange = tmp_path / name
    shutil.copytree(folder, strange)
    for words in (["inspect"], ["explain"], ["run", "--prompt", "w5", "-n", "1"]):
        done = bitline(words[0], strange, *words[1:])
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert name.split("/")[-1] in done.stdout.replace("\n", "")


def test_terminal_without_unicode(folder):
    done = bitline("inspect", folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "160?64" in done.stdout


def test_unwritable_output(folder):
    code = f"{sys.executable} -m bitline inspect {folder}"
    full = subprocess.run(["bash", "-c", f"{code} > /dev/full"], capture_output=True, text=True)
    assert full.returncode == 1 and "Traceback" not in full.stderr and "cannot write" in full.stderr
    gone = subprocess.run(["bash", "-c", f"{code} | head -c 1 > /dev/null"], capture_output=True, text=True)
    assert "Traceback" not in gone.stderr


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_closed_pipe(folder, option):
    code = f"set -o pipefail; {sys.executable} -m bitline inspect {folder} {option} | true"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.returncode == 141 and not done.stderr, done


@pytest.mark.parametrize("name", ["CPUBatchInvariant", "cpubatchinvariant", "cpubatchinvariantlinearkernel"])
def test_kernels_by_the_names_that_tables_print(folder, name):
    report = json.loads(bitline("explain", folder, "--kernel", name, "--platform", "cpu:avx512", "--json").stdout)
    assert report["policy"]["kernel"] == "CPUBatchInvariantLinearKernel"
    assert {p["kernel"] for p in report["plans"]} == {"CPUBatchInvariantLinearKernel"}
    report = json.loads(bitline("explain", folder, "--disable", f"{name},cpuwna16", "--platform", "cpu:avx512", "--json").stdout)
    assert report["policy"]["disabled"] == ["CPUBatchInvariantLinearKernel", "CPUWNA16LinearKernel"]
    assert not {p["kernel"] for p in report["plans"]} & set(report["policy"]["disabled"])


def test_a_name_of_the_hub_without_a_network(folder, tmp_path):
    done = bitline("run", "no-such-organisation/no-such-model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 1 and "the Hugging Face hub did not give it" in done.stderr and "Traceback" not in done.stderr


def test_sampling(folder):
    def text(*options):
        return json.loads(bitline("run", folder, "--prompt", "w5 w7", "-n", "12", "--json", "--no-check", *options).stdout)[
            "text"
        ]

    drawn = text("--temperature", "5", "--seed", "1")
    assert drawn == text("--temperature", "5", "--seed", "1") != text("--temperature", "5", "--seed", "2")
    assert text("--temperature", "5", "--top-k", "1") == text()


def test_threads_and_batch_sizes(folder):
    done = bitline("run", folder, "--prompt", "w5", "-n", "2", "--json", "--threads", "1", "--m", "1,8")
    assert "cores=1" in json.loads(done.stdout)["platform"]


def test_a_conversation(folder, tmp_path):
    """Each answer continues the whole conversation; the end of the input ends it."""
    from transformers import AutoTokenizer

    chatty = tmp_path / "chatty"
    shutil.copytree(folder, chatty)
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}w2"
    tokenizer.save_pretrained(chatty)
    command = [sys.executable, "-m", "bitline", "run", str(chatty), "--interactive", "-n", "4"]
    done = subprocess.run(command, input="w5\n\nw7 w8\n", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("tokens/s") == 2, done
    first = bitline("run", chatty, "--chat", "--prompt", "w5", "-n", "4", "--json", "--no-check")
    assert json.loads(first.stdout)["text"] in done.stdout
    assert subprocess.run([*command[:5], "-i"], input="/exit\n", capture_output=True, text=True).returncode == 0
    assert bitline("run", folder, "--interactive").returncode == 1
    assert bitline("run", folder, "--interactive", "--json").returncode == 2


def test_names_of_modules_go_on_after_a_dot():
    from bitline.cli.render import table

    def shown(width):
        grid = table("layers", "kernel", "")
        grid.add_row("model.layers.0.self_attn.q_proj", "CPUWNA16", "ok")
        out = io.StringIO()
        Console(file=out, width=width).print(grid)
        return [line[: line.find("   ")].strip() if "   " in line else line.strip() for line in out.getvalue().splitlines()[2:]]

    assert shown(60) == ["model.layers.0.self_attn.q_proj"]
    assert shown(34) == ["model.layers.0.", "self_attn.q_proj"]
    assert shown(26) == ["model.", "layers.0.", "self_attn.", "q_proj"]


def test_a_table_loses_no_letter_at_any_width():
    from bitline.cli.render import table

    def grid():
        made = table("M, kernel", "time", "/limit", "", "rate", "")
        made.add_row("CPUBatchInvariant", "39.0 us", "1297.80", "", "22.6 MB/s", "3 calls")
        made.add_row("TorchInt4Pack", "1039.0 us", "1.00", "", "22.6 GB/s", "")
        return made

    def letters(width):
        out = io.StringIO()
        Console(file=out, width=width).print(grid())
        return sorted(c for c in out.getvalue() if not c.isspace() and c != "─")

    for width in range(30, 90):
        assert letters(width) == letters(200), width


def test_a_narrow_terminal_loses_no_letter(folder):
    """Cells of a table that does not fit are wrapped, not cut off."""

    def letters(width):
        done = bitline("run", folder, "--prompt", "w5", "-n", "1", COLUMNS=str(width))
        assert done.returncode == 0 and "Traceback" not in done.stderr, done
        return Counter(c for c in done.stdout if c.isalpha())

    assert not letters(200) - letters(50) - Counter("ums")  # units of times differ from run to run


@pytest.mark.parametrize("prompt", ["", " "])
def test_a_prompt_without_tokens_is_refused_before_the_model_is_loaded(folder, monkeypatch, prompt):
    from bitline.cli import run
    from bitline.errors import InputError
    from bitline.select import Policy

    monkeypatch.setattr(run, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match="the prompt has no tokens"):
        run.run_report(str(folder), prompt, run.RunOptions(4, "cpu", "auto", Policy()), quiet=True)
