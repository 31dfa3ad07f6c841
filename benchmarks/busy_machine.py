"""First token and decoding of the packaged SmolLM2 alone and beside a busy process on each core.

    python benchmarks/busy_machine.py [--prompts 44,251] [--rounds 5] [--label TEXT] [--out FILE]

Medians, least times and best rates. Rows of other labels that are in the file stay, so builds can be compared.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bitline.model import packaged
from bitline.model.generate import generate
from bitline.model.load import load_model
from bitline.model.tokenizer import load_tokenizer

from _machine import machine  # isort: skip

RESULTS = Path(__file__).parent / "results" / "cpu_busy_machine.json"
NEW_TOKENS = 16


def runs(model: Any, prompt_tokens: int, rounds: int) -> dict[str, float]:
    """Times of `rounds` generations of one random prompt."""
    draw = random.Random(prompt_tokens)
    prompt = torch.tensor([[draw.randrange(100, 30000) for _ in range(prompt_tokens)]])
    tokenizer = load_tokenizer(model.bitline_checkpoint)
    done = [generate(model, tokenizer, prompt, max_new_tokens=NEW_TOKENS, stop=False) for _ in range(rounds)]
    first, decode = [d.first_token_seconds * 1e3 for d in done], [d.decode_tokens_per_second for d in done]
    return {
        "first_token_ms": round(statistics.median(first)), "least_first_token_ms": round(min(first)),
        "decode": round(statistics.median(decode), 1), "best_decode": round(max(decode), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="44,251", help="lengths of prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--label", default="", help="what the rows are of")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    lengths = [int(n) for n in arguments.prompts.split(",")]
    model = load_model(packaged.fetch("smollm2"), dtype=torch.bfloat16)
    for length in lengths:
        runs(model, length, 1)
    rows = []
    for processes in (0, torch.get_num_threads()):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
        try:
            time.sleep(0.3)
            for length in lengths:
                row = {"label": arguments.label, "busy_processes": processes, "prompt_tokens": length}
                rows.append(row | runs(model, length, arguments.rounds) | {"load": os.getloadavg()[0]})
                print(rows[-1], flush=True)
        finally:
            for other in others:
                other.kill()
                other.wait()
    before = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    rows = [row for row in before if row["label"] != arguments.label] + rows
    arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
