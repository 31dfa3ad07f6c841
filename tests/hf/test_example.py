"""examples/qlora.py: the packaged model learns a text, and its adapter is saved."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "qlora.py"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.xdist_group("smollm2")
def test_qlora(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("qlora", EXAMPLE)
    qlora = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(qlora)
    rounds = qlora.main(["--steps", "6", "--rows", "2", "--length", "32", "--out", str(tmp_path / "adapter")])
    assert len(rounds) == 3 and rounds[2] < rounds[1] < rounds[0]
    assert "mean loss of each round" in capsys.readouterr().out
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
