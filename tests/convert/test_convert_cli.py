"""The command: what it prints, its JSON, and its exit codes."""

import json
import re

import pytest
from expected import CHECKPOINTS

import command


def bitline(*arguments):
    return command.bitline("convert", *arguments, COLUMNS="140")


def test_text(tmp_path):
    done = bitline(CHECKPOINTS / "ct_w4a16_g128_asym", tmp_path / "m.gguf", "--to", "gguf")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for expected in (
        "uint4+zero g128",
        "uint5b16 g32",
        "4-bit codes as 5-bit",
        "every layer is bit-exact",
        "4 of 4",
        "no unquantized tensors",
    ):
        assert expected in text
    assert re.search(r"layers [\d.]+ [kM]B before, [\d.]+ [kM]B after", text)


def test_json(tmp_path):
    done = bitline(CHECKPOINTS / "ar_w4g32_mixed_autoround", tmp_path / "out", "--to", "awq", "--lossy", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["to"] == "awq" and not report["exact"] and len(report["layers"]) == 4
    assert sum(kind["layers"] for kind in report["kinds"]) == 4 and sum(not layer["exact"] for layer in report["layers"]) == 1
    assert report["nbytes_after"] > 0 and not done.stderr.strip()


def test_lossy_text(tmp_path):
    done = bitline(CHECKPOINTS / "bnb_nf4", tmp_path / "out", "--to", "gptq", "--lossy")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0 and "4 of 4 layers were rounded" in text and "max error" in text and "bit-exact" not in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("bnb_nf4", "--to", "gptq"), 1, "gptq cannot represent 4 of 4 layers exactly"),
        (("ct_w8a8_int8_dynamic", "--to", "gptq"), 1, "--weights-only"),
        (("gq_w4g128_sym_v1", "--to", "exl2"), 2, "unknown format"), (("gq_w4g128_sym_v1",), 2, "Missing option"),
        (("gq_w4g128_sym_v1", "--to", "gguf"), 1, "is a file named"),
    ],
)  # fmt: skip
def test_exit_codes(arguments, code, message, tmp_path):
    done = bitline(CHECKPOINTS / arguments[0], tmp_path / "out", *arguments[1:])
    assert done.returncode == code and message in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())
    if code == 1:
        error = json.loads(bitline(CHECKPOINTS / arguments[0], tmp_path / "out", *arguments[1:], "--json").stdout)["error"]
        assert error["type"] in ("ConversionError", "InputError") and error["message"]
