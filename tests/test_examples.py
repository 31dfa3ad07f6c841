"""The examples run as they are printed, each under 60 lines."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("smollm2")  # the file is downloaded once
EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {
    "one_layer": ["yes", "an H200 would run GluonHopperLinearKernel", "cut in two"],
    "any_module": ["packed: down, up", "head.weight", "QuantLinear(256 -> 1024", "4 outputs agree with the reference"],
    "run_model": ["layers like", "Paris", "tokens/s"],
    "foreign_kernel": ["TableLinearKernel", "us a token", "torch.Size([2, 256])"],
    "quantize_and_verify": ["56 layers", "agree with the reference", "QuantExperts"],
    "tensor_parallel": ["rank 0 of 2 holds", "rank 1 of 2 holds", "Paris"],
}


def test_all_examples_are_tested_and_short():
    files = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == {*PRINTED, "qlora"}  # tests/hf runs that one
    assert all(len(path.read_text().splitlines()) < 60 for name, path in files.items() if name != "qlora")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("one_layer", "any_module") else pytest.mark.exhaustive) for n in PRINTED]
)
def test_example(name):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if name == "tensor_parallel" else []
    done = subprocess.run([sys.executable, *launcher, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    missing = [text for text in PRINTED[name] if text not in done.stdout]
    assert not missing, done.stdout
