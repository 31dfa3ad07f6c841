"""Times of layers as flat rows, from a report of `bitline bench` or from results of before it, which are such rows already."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitline.bench import KernelResult, read_report


def rows_of(path: Path, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row for each layer and M: scheme, n, k, m, `limit_us`, "cuBLAS bf16" (dense linear), and the kernels' microseconds.

    columns: The column of a kernel or baseline. That of "us" has its sustained times in `sustained_us`, another, X, in
    "X sustained". What has no column is left out.
    """
    data = json.loads(path.read_text())
    if "problems" not in data:
        return list(data["results"])
    rows = []
    for problem in read_report(path).problems:
        dense = KernelResult("dense", "ok", measured_seconds=problem.dense_seconds)
        dense.sustained_seconds = problem.dense_sustained_seconds
        for m in problem.dense_seconds:
            (n, k), scheme = problem.shape, problem.scheme.replace(":", " ")
            row = {"scheme": scheme, "n": n, "k": k, "m": m, "limit_us": 1e6 * problem.limit(m)}
            for result in (*problem.kernels, *problem.baselines, dense):
                column = "cuBLAS bf16" if result is dense else columns.get(result.kernel)
                if column is not None and m in result.measured_seconds:
                    row[column] = 1e6 * result.measured_seconds[m]
                if column is not None and m in result.sustained_seconds:
                    row["sustained_us" if column == "us" else f"{column} sustained"] = 1e6 * result.sustained_seconds[m]
            rows.append(row)
    return rows
