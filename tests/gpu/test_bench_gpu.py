"""bitline bench on a GPU: replayed graphs, sustained load, and a part of the repository's grid in correctness mode."""

from pathlib import Path

import pytest
import torch

from bitline import bench

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")]
GRID = Path(__file__).parents[2] / "benchmarks" / "grids" / "ci.batch"


def faults(report):
    return [(p.problem, k.kernel, k.reason) for p in report.problems for k in p.kernels if k.status == "failed"]


@pytest.mark.parametrize("sustained", [False, True])
def test_times(sustained):
    lines = "--m=1,64 --scheme=W4A16:g128,FP8_DYNAMIC,W8A8 1024x2048"
    report = bench.run_problems(bench.parse_grid(lines, torch.bfloat16), "cuda", 0.1, sustained=sustained)
    assert report.ok and not faults(report) and report.bandwidth > 1e11 and report.matmul_rates["bfloat16"] > 1e12
    for problem in report.problems:
        timed = [k for k in problem.kernels if k.status == "ok"]
        assert timed and set(problem.read_seconds) == set(problem.compute_seconds) == set(problem.dense_seconds) == {1, 64}
        assert all(set(k.measured_seconds) == {1, 64} for k in timed)
        captured = any(k.sustained_seconds for k in timed)
        assert captured == sustained


def test_a_part_of_the_grid():
    grid = [p for p in bench.read_grid(GRID, torch.bfloat16) if p.spec.act_dtype == torch.bfloat16][::5]
    report = bench.run_problems(grid, "cuda")
    assert not faults(report) and report.ok
