"""Tensor parallelism over NCCL and shared memory of two GPUs: sums, graphs, and models against one GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from test_parallel import FLIPS, case, distances, makers, quantizes, sensitivity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("two GPUs"),
]
BOUND = 1e-5  # float32 on a GPU: torch's products sum in another order for every shape


def test_sums_graphs_and_rows(tmp_path):
    script = Path(__file__).with_name("two_gpus.py")
    started = [
        subprocess.Popen([sys.executable, str(script), str(rank), "2", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(error[-2000:] for error in errors)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: path} of every kind of model, and what two ranks find."""
    root, paths = tmp_path_factory.mktemp("models"), {}
    for name, make in makers(False).items():
        folder = root / name.replace(" ", "_")
        folder.mkdir()
        paths[name] = make(folder)
    cases = {name: case(path) for name, path in paths.items()}
    cases |= {f"{name} chosen": case(path, dtype="bfloat16", kernel="auto") for name, path in paths.items()}
    return paths, ranks.run(tmp_path_factory.mktemp("run") / "two", 2, cases, device="cuda")


@pytest.mark.parametrize("name", makers(False))
def test_every_kind_of_model(name, models):
    paths, found = models
    for kind, dtype, kernel in (("", "float32", "ReferenceLinearKernel"), (" chosen", "bfloat16", "auto")):
        outputs = [tensors[name + kind] for tensors, _ in found if name + kind in tensors]
        assert len(outputs) == 2, [said[name + kind] for _, said in found]
        assert torch.equal(outputs[0], outputs[1]) and outputs[0].isfinite().all()
        want, model = ranks.logits(str(paths[name]), None, getattr(torch, dtype), kernel, device="cuda")
        error = float(distances(outputs[0], want).max())
        bound = 0.06 if kind else max(FLIPS, 0.02) if quantizes(paths[name]) else BOUND
        if error > bound:  # a tiny model whose routing changes with its inputs' last bits
            assert error <= 2 * sensitivity(model, want, 2.0**-8 if kind else 1e-6), (name + kind, error)
