"""`bitline bench`: check and time the kernels of layers, and compare two reports of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer

from bitline.bench.baselines import read_baselines
from bitline.bench.compare import Comparison, compare_reports
from bitline.bench.grid import Options, Problem, problems_of, read_grid, with_option
from bitline.bench.keep import Keeper
from bitline.bench.plot import figure_class, roofline
from bitline.bench.report import Report, read_report
from bitline.bench.run import run_problems
from bitline.checkpoint import open_checkpoint
from bitline.cli.fetch import local_path
from bitline.cli.options import device_of, dtype_of
from bitline.cli.progress import progress_bars
from bitline.errors import BitlineError, CheckpointError
from bitline.model.meta_model import default_dtype
from bitline.model.tune import specs_of
from bitline.platform import Platform

_T = TypeVar("_T")


@dataclass(frozen=True)
class BenchOptions:
    """The command's options as it got them."""

    scheme: str | None
    m: str
    mode: str
    kernel: str
    skip_impl: str
    seconds: float
    sustained: bool
    threads: int
    device: str
    dtype: str
    out: Path | None
    plot: Path | None
    baselines: str | None
    resume: bool


def bench_report(model: str | None, shape: str | None, batch: Path | None, asked: BenchOptions, *, quiet: bool) -> Report:
    """Run the command: the report, which is also written and drawn where that was asked for."""
    options = _options(asked)
    target, dtype = device_of(asked.device), dtype_of(asked.dtype)
    if not (asked.seconds > 0 and math.isfinite(asked.seconds)):
        raise typer.BadParameter("give a positive number of seconds", param_hint="--seconds")
    if asked.sustained and target.type != "cuda":
        raise typer.BadParameter("sustained load is measured on CUDA GPUs", param_hint="--sustained")
    if asked.scheme is not None and model is not None:
        raise typer.BadParameter("a checkpoint has its own schemes", param_hint="--scheme")
    _check_files(asked)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    platform = Platform.detect(target)
    if model is not None:
        problems, path = _problems_of_model(model, dtype, platform, options)
    elif batch is not None:
        problems, path = read_grid(batch, dtype or default_dtype(None, platform), options), str(batch)
    else:
        own, words = dtype or default_dtype(None, platform), (shape or "").split(",")
        problems = _usage("--shape", lambda: [p for word in words for p in problems_of(word.strip(), options, own)])
        path = None
    baselines = read_baselines(asked.baselines) if asked.baselines is not None else {}
    earlier = read_report(asked.out) if asked.resume and asked.out is not None and asked.out.exists() else None
    with progress_bars(quiet=quiet) as progress, Keeper(asked.out) if asked.out is not None else nullcontext() as keeper:

        def keep(report: Report) -> None:
            report.path = path
            if keeper is not None:
                keeper(report)

        report = run_problems(
            problems, target, asked.seconds, sustained=asked.sustained, baselines=baselines, earlier=earlier, keep=keep,
            progress=lambda done, total: progress("layers", done, total),
        )  # fmt: skip
    if asked.plot is not None:
        roofline(report, asked.plot)
    return report


def comparison_of(before: Path, after: Path, threshold: float) -> Comparison:
    """Two reports compared."""
    if not (threshold >= 1 and math.isfinite(threshold)):
        raise typer.BadParameter("give a ratio of times of at least 1, as in 1.1", param_hint="--threshold")
    return compare_reports(read_report(before), read_report(after), threshold)


def comparison_report(found: Comparison, threshold: float) -> dict[str, Any]:
    """A comparison as JSON-compatible values; docs/command-line.md describes the keys."""
    rows = lambda items: [asdict(item) | {"ratio": item.ratio} for item in items]
    return {
        "ok": found.ok, "threshold": threshold, "compared": found.compared, "missing": found.missing,
        "slower": rows(found.slower), "faster": rows(found.faster),
        "broken": [dict(zip(("scheme", "shape", "kernel", "reason"), item, strict=True)) for item in found.broken],
        "machines": [dict(zip(("field", "before", "after"), item, strict=True)) for item in found.machines],
    }  # fmt: skip


def _options(asked: BenchOptions) -> Options:
    """What holds for all problems, and at the beginning of a batch file."""
    options = Options()
    texts = {"--mode": asked.mode, "--m": asked.m, "--kernel": asked.kernel, "--skip-impl": asked.skip_impl}
    texts |= {"--scheme": asked.scheme} if asked.scheme is not None else {}
    for name, text in texts.items():
        options = _usage(name, lambda name=name, text=text, options=options: with_option(options, f"{name}={text}"))  # type: ignore[misc]
    return options


def _problems_of_model(
    model: str, dtype: torch.dtype | None, platform: Platform, options: Options
) -> tuple[list[Problem], str]:  # fmt: skip
    """A problem for each distinct layer of a checkpoint, those with the most weights first."""
    checkpoint = open_checkpoint(local_path(model))
    layers = specs_of(checkpoint, dtype or default_dtype(checkpoint, platform))
    if not layers:
        raise CheckpointError("nothing to time", file=checkpoint.path, found="no quantized linear layer")
    order = sorted(layers, key=lambda spec: -spec.n * spec.k * len(layers[spec]))
    return [Problem(spec, options, layers=tuple(layers[spec])) for spec in order], str(checkpoint.path)


def _check_files(asked: BenchOptions) -> None:
    """Find out before the run what would lose its results."""
    for option, path in (("--out", asked.out), ("--plot", asked.plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise typer.BadParameter(f"not a file in a folder that exists: {path}", param_hint=option)
    if asked.resume and asked.out is None:
        raise typer.BadParameter("give the file of the results with --out", param_hint="--resume")
    if asked.plot is not None:
        if "P" not in asked.mode.upper():
            raise typer.BadParameter("only mode P has times to draw", param_hint="--plot")
        figure_class()


def _usage(option: str, parse: Callable[[], _T]) -> _T:
    """What an option's text means. What is wrong with it is a usage error (exit code 2)."""
    try:
        return parse()
    except BitlineError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
