"""Correctness and times of kernels: problems, grids of them in text, reports, comparisons and rooflines.

`bitline bench` is the command; docs/bench.md describes both.
"""

from bitline.bench.baselines import Baseline, read_baselines
from bitline.bench.compare import Comparison, Difference, compare_reports
from bitline.bench.grid import Options, Problem, parse_grid, problems_of, read_grid
from bitline.bench.keep import Keeper, write_report
from bitline.bench.machine import machine
from bitline.bench.plot import roofline
from bitline.bench.report import KernelResult, ProblemResult, Report, read_report
from bitline.bench.run import run_problems
from bitline.bench.schemes import scheme_of

__all__ = [
    "Baseline", "Comparison", "Difference", "Keeper", "KernelResult", "Options", "Problem", "ProblemResult", "Report",
    "compare_reports", "machine", "parse_grid", "problems_of", "read_baselines", "read_grid", "read_report", "roofline",
    "run_problems", "scheme_of", "write_report",
]  # fmt: skip
