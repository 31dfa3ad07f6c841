"""What a tensor-parallel rank reads of a layer, its peak memory and its time: the part alone, or the whole layer and then a cut.

    python benchmarks/rank_reading.py --ranks 4 --out benchmarks/results/cpu_rank_reading.json [FAMILY …]

Each family is one layer of Llama-3-70B's down projection, 8192 x 28672, in a file of its own. The first of `ranks` ranks reads
its rows, or its columns, and packs them for the kernel that `choose` takes on this CPU, in a process per family, with the file in
page cache. `bytes` are those of the stored tensors' entries that were asked for. The peak is the resident set's high-water mark
(VmHWM, reset before) minus the resident set before; mapped pages of the file count. Times are the best of three.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import read_speed
from _machine import machine
from safetensors.torch import save_file

import bitline
from bitline.formats.gguf.source import GGUFSource
from bitline.formats.io.safetensors_source import SafetensorsSource
from bitline.kernels import registry

N, K = 8192, 28672
PASSES = 3
FAMILIES = ("gptq", "gptq act-order", "awq", "compressed-tensors W4", "fp8 block", "nvfp4", "gguf Q4_K")


def synthesize(folder: Path, family: str) -> None:
    """One layer of random codes."""
    if family.startswith("gguf "):
        kind = family.removeprefix("gguf ")
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        writer.add_tensor("blk.0.ffn_down.weight", read_speed._blocks(kind, N, K), raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return
    config, make = read_speed.FAMILIES[family]
    save_file({f"model.layers.0.mlp.down_proj.{suffix}": t for suffix, t in make(N, K).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))


def count_bytes() -> list[int]:
    """Bytes of tensors that readers ask sources for from now on, in a list of one."""
    count = [0]

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            tensor = read(*args, **options)
            count[0] += tensor.nbytes
            return tensor

        return counted

    for source in (SafetensorsSource, GGUFSource):
        for name in ("read", "read_part"):
            setattr(source, name, counting(getattr(source, name)))
    return count


def child(folder: Path, ranks: int) -> dict[str, Any]:
    """All measurements of one family."""
    registry.load()
    (record,) = bitline.open_checkpoint(folder).layers()
    rows, columns, asked = (0, N // ranks), (0, K // ranks), count_bytes()
    ways: dict[str, Callable[[], Any]] = {
        "rows, part": lambda: record.weight(rows=rows), "rows, whole": lambda: record.weight().narrow(0, *rows),
        "columns, part": lambda: record.weight(columns=columns), "columns, whole": lambda: record.weight().narrow(1, *columns),
    }  # fmt: skip
    found: dict[str, Any] = {"stored": record.nbytes, "units": record.units, "ways": {}}
    for way, read in ways.items():
        runs = []
        for _ in range(PASSES + 1):  # the first one warms up
            read_speed._release_memory()
            Path("/proc/self/clear_refs").write_text("5")
            asked[0], before, started = 0, read_speed._status("VmRSS"), time.perf_counter()
            weight = read()
            kernel = bitline.choose(weight.spec).kernel
            packed = kernel.pack(weight)
            size = sum(t.nbytes for t in packed.values())
            run = {"seconds": time.perf_counter() - started, "bytes": asked[0], "peak": read_speed._status("VmHWM") - before}
            runs.append(run | {"packed": size, "kernel": kernel.__name__})
            del weight, packed
        best = min(runs[1:], key=lambda run: run["seconds"])
        found["ways"][way] = best | {"peak": max(run["peak"] for run in runs[1:])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.ranks)))
        return
    report: dict[str, Any] = {"machine": machine(), "layer": [N, K], "ranks": options.ranks, "families": {}}
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            synthesize(Path(folder), family)
            command = [sys.executable, __file__, "--child", folder, "--ranks", str(options.ranks)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = report["families"][family] = json.loads(done.stdout.splitlines()[-1])
        for way, run in row["ways"].items():
            megabytes = {key: f"{run[key] / 1e6:.1f}" for key in ("bytes", "peak", "packed")}
            print(f"{family}, {way}: {megabytes['bytes']} of {row['stored'] / 1e6:.1f} MB read, peak {megabytes['peak']} MB, "
                  f"packed {megabytes['packed']} MB, {run['seconds'] * 1e3:.0f} ms", flush=True)  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
