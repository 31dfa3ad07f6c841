"""Tokens per second of an installed wheel beside the editable install, on the packaged model.

    python benchmarks/wheel_speed.py WHEEL [--pairs 7] [--threads 2] [--out FILE]

The wheel is installed by pip alone into an environment of its own, without a compiler; torch and the other packages that it
requires are links to this environment's. `bitline run smollm2` of both takes turns, first the one, then the other. Pairs that the
file already has stay, so that a measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _machine import machine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from wheel_environment import WheelEnvironment  # noqa: E402  (the tests' folder has no package)

RESULTS = ROOT / "benchmarks" / "results" / "cpu_wheel.json"
PROMPT = "What is the capital of France, and what is it known for?"
FIGURES = ("decode_tokens_per_second", "first_token_seconds", "load_seconds")


def run(program: Path, threads: int) -> dict[str, Any]:
    """One `bitline run` of an environment, with nothing else on PATH."""
    command = [program, "run", "smollm2", "--chat", "--prompt", PROMPT, "--threads", str(threads), "--json"]
    kept = {k: v for k, v in os.environ.items() if k in ("HOME", "BITLINE_CACHE", "XDG_CACHE_HOME")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=kept | {"PATH": str(program.parent)})
    return dict(json.loads(done.stdout))


def core_of(program: Path) -> str:
    """The compiler that the native core names in its comment section."""
    done = subprocess.run([program.parent / "python", "-c", "from bitline import native; print(native.find())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    content = Path(done.stdout.strip()).read_bytes()
    found = [name for name in (b"GCC: (", b"clang version ") if name in content]
    start = content.index(found[0])
    return content[start : content.index(b"\0", start)].decode()


def summary(pairs: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Least, quartiles and largest of each figure, and of the wheel's over the editable install's."""
    found: dict[str, dict[str, list[float]]] = {}
    for figure in FIGURES:
        values = {name: [pair[name][figure] for pair in pairs] for name in ("editable", "wheel")}
        values["wheel / editable"] = [w / e for e, w in zip(values["editable"], values["wheel"], strict=True)]
        spread = {name: [min(v), *statistics.quantiles(v + v[:1] * (len(v) == 1), n=4), max(v)] for name, v in values.items()}
        found[figure] = {name: [round(value, 4) for value in v] for name, v in spread.items()}
    return found


def main() -> None:
    """Measure pairs, and print what all of the file's say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    pairs = json.loads(options.out.read_text())["pairs"] if options.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        wheel = WheelEnvironment(Path(folder) / "venv", options.wheel.resolve(), "models").bin / "bitline"
        programs = {"editable": Path(sys.executable).parent / "bitline", "wheel": wheel}
        cores = {name: core_of(program) for name, program in programs.items()}
        texts = set()
        for _ in range(options.pairs):
            pair = {}
            for name in list(programs)[:: -1 if len(pairs) % 2 else 1]:
                report = run(programs[name], options.threads)
                texts.add(report["text"])
                pair[name] = {figure: round(report[figure], 4) for figure in FIGURES}
            pairs.append(pair)
            print(pair, flush=True)
            facts = {"machine": machine() | {"threads": options.threads}, "wheel": options.wheel.name, "compilers": cores}
            report = {**facts, "same_text": len(texts) == 1, "summary": summary(pairs), "pairs": pairs}
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(summary(pairs), indent=1))


if __name__ == "__main__":
    main()
