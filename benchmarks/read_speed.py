"""How fast a checkpoint is opened, read into canonical weights and packed, against a plain read of its files from page cache.

    python benchmarks/read_speed.py --gigabytes 2 --out benchmarks/results/read_speed.json [FAMILY …]

Each family is a synthetic checkpoint of decoder layers with Llama-3-8B's shapes, one file per layer (GGUF: one file), in a
temporary folder. It is measured in a process of its own, with the files in page cache; the best of a few passes counts. A pass
opens the checkpoint, reads every layer into its canonical weight, packs it for the kernel that `choose` takes on this CPU, and
keeps the packed weights. Three plain reads on torch's number of threads are the baselines: read() of the files into new memory
that is kept, as packed weights are (`new`); read() into a reused buffer of 4 MiB (`again`); a sum over a mapping of the files
(`sum`). `shares` are the pass's rate over theirs.

Peak memory is measured on one layer of each shape whose tensors are allocated beforehand, so that no page of a file counts: the
resident set's high-water mark (VmHWM, reset before) minus the resident set before and the packed weight. `extra_over_packed` is
the largest of these over the largest packed layer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from _machine import machine
from safetensors.torch import save_file
from torch import Tensor

import bitline
from bitline import memory as bitline_memory
from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.kernels import registry

SHAPES = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}  # fmt: skip
GROUP = 128
BUFFER = 4 << 20


# ---- checkpoints ---------------------------------------------------------------------------------------------------------


def _random(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Random bits."""
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)


def _scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape) * 0.01 + 0.001).to(dtype)


def _gptq(n: int, k: int, bits: int = 4, order: bool = False) -> dict[str, Tensor]:
    g_idx = torch.arange(k, dtype=torch.int32) // GROUP
    return {
        "qweight": _random(k * bits // 32, n), "qzeros": _random(k // GROUP, n * bits // 32),
        "scales": _scales(k // GROUP, n), "g_idx": g_idx[torch.randperm(k)] if order else g_idx,
    }  # fmt: skip


def _awq(n: int, k: int) -> dict[str, Tensor]:
    return {"qweight": _random(k, n // 8), "qzeros": _random(k // GROUP, n // 8), "scales": _scales(k // GROUP, n)}


def _ct(n: int, k: int) -> dict[str, Tensor]:
    return {"weight_packed": _random(n, k // 8), "weight_scale": _scales(n, k // GROUP, dtype=torch.bfloat16),
            "weight_shape": torch.tensor([n, k])}  # fmt: skip


def _fp8(n: int, k: int) -> dict[str, Tensor]:
    codes = _random(n, k, dtype=torch.uint8) & 0xBF  # without NaN
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": _scales(n // 128, k // 128, dtype=torch.float32)}


def _nvfp4(n: int, k: int) -> dict[str, Tensor]:
    scale = (_random(n, k // 16, dtype=torch.uint8) & 0x3F) + 1
    return {"weight_packed": _random(n, k // 2, dtype=torch.uint8), "weight_scale": scale.view(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([500.0]), "input_global_scale": torch.tensor([20.0])}  # fmt: skip


def _blocks(kind: str, n: int, k: int) -> np.ndarray:
    """Rows of random GGUF blocks with moderate float16 scales where the type has them."""
    size, nbytes = BLOCK_SIZES[kind]
    raw = _random(n, k // size, nbytes, dtype=torch.uint8)
    for at in GGUF_SCALES[kind]:
        raw[..., at : at + 2] = _scales(n, k // size, 1).view(torch.uint8)
    return raw.view(n, -1).numpy()


def _gptq_config(bits: int = 4, symmetric: bool = True, order: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": order,
            "checkpoint_format": "gptq"}  # fmt: skip


def _ct_config(fmt: str, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": fmt, "ignore": [], "config_groups": {"group_0": group}}


_FP4 = {"type": "float", "strategy": "tensor_group", "group_size": 16}
FAMILIES: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Tensor]]]] = {
    "gptq": (_gptq_config(), _gptq),
    "gptq asymmetric": (_gptq_config(symmetric=False), _gptq),
    "gptq act-order": (_gptq_config(order=True), lambda n, k: _gptq(n, k, order=True)),
    "gptq 3 bits": (_gptq_config(bits=3), lambda n, k: _gptq(n, k, bits=3)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "compressed-tensors W4": (_ct_config("pack-quantized", None, type="int", strategy="group", group_size=GROUP), _ct),
    "fp8 block": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, _fp8),
    "nvfp4": (_ct_config("nvfp4-pack-quantized", {"num_bits": 4, "symmetric": True, "dynamic": "local", **_FP4}, **_FP4), _nvfp4),
}  # fmt: skip
GGUF_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # bytes of a block where a float16 scale begins
EVERY = (*FAMILIES, *(f"gguf {kind}" for kind in GGUF_SCALES))


def synthesize(folder: Path, family: str, gigabytes: float) -> None:
    """A checkpoint of about that size. All layers hold the same random numbers, in different files."""
    torch.manual_seed(1)
    if family.startswith("gguf "):
        _write_gguf(folder / "model.gguf", family.removeprefix("gguf "), gigabytes)
        os.sync()
        return
    config, make = FAMILIES[family]
    layer = {f"{name}.{suffix}": t for name, (n, k) in SHAPES.items() for suffix, t in make(n, k).items()}
    count = max(1, round(gigabytes * 1e9 / sum(t.nbytes for t in layer.values())))
    index = {}
    for i in range(count):
        named = {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
        save_file(named, folder / f"layer-{i}.safetensors")
        index |= dict.fromkeys(named, f"layer-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    os.sync()  # or the system still writes them back while they are read


def _write_gguf(path: Path, kind: str, gigabytes: float) -> None:
    layer = {f"{name}.weight": _blocks(kind, n, k) for name, (n, k) in SHAPES.items()}
    writer = gguf.GGUFWriter(path, "llama")
    for i in range(max(1, round(gigabytes * 1e9 / sum(t.nbytes for t in layer.values())))):
        for name, data in layer.items():
            writer.add_tensor(f"blk.{i}.{name}", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- plain reads ---------------------------------------------------------------------------------------------------------


def _by_threads(files: Sequence[Path], work: Callable[[Path, int, int], object]) -> float:
    """Seconds of work(file, begin, end) on every file, split into a range for each thread."""
    threads = torch.get_num_threads()
    ranges = []
    for i in range(threads):
        for file in files:
            size = file.stat().st_size // mmap.PAGESIZE
            ranges.append((i, file, size * i // threads * mmap.PAGESIZE, size * (i + 1) // threads * mmap.PAGESIZE))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))
        run = lambda i: [work(*arguments) for thread, *arguments in ranges if thread == i]
        started = time.perf_counter()
        list(pool.map(run, range(threads)))
        return time.perf_counter() - started


def read_again(files: Sequence[Path]) -> float:
    """Seconds of read() into one reused buffer per thread."""
    own = threading.local()

    def work(file: Path, begin: int, end: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(BUFFER))
        buffer: memoryview = own.buffer
        with file.open("rb", buffering=0) as stream:
            stream.seek(begin)
            for at in range(begin, end, BUFFER):
                stream.readinto(buffer[: min(end - at, BUFFER)])

    return _by_threads(files, work)


def read_new(files: Sequence[Path]) -> float:
    """Seconds of read() into a new tensor for each range of a file, all of which are kept."""
    kept = []

    def work(file: Path, begin: int, end: int) -> None:
        tensor = torch.empty(end - begin, dtype=torch.uint8)
        kept.append(tensor)
        with file.open("rb", buffering=0) as stream:
            stream.seek(begin)
            assert stream.readinto(tensor.numpy()) == end - begin

    return _by_threads(files, work)


def mapped_sum(files: Sequence[Path]) -> float:
    """Seconds of mapping the files and summing them, 8 bytes at a time."""
    torch.empty(1)

    def work(file: Path, begin: int, end: int) -> None:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            data = torch.frombuffer(mapped, dtype=torch.int64, offset=begin, count=(end - begin) // 8)
            for at in range(0, data.numel(), 1 << 14):  # below the size from which torch parallelizes
                data[at : at + (1 << 14)].sum()
            del data

    return _by_threads(files, work)


# ---- one family, in a process of its own -----------------------------------------------------------------------------------


def _status(field: str) -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def one_pass(folder: Path) -> dict[str, Any]:
    clock = time.perf_counter
    started = clock()
    records = bitline.open_checkpoint(folder).layers()
    parts = {"open": clock() - started, "choose": 0.0, "canonical": 0.0, "pack": 0.0}
    kept, kernels = [], set()
    for record in records:
        marks = [clock()]
        kernel = bitline.choose(record.spec).kernel
        marks.append(clock())
        weight = record.weight()
        marks.append(clock())
        kept.append(kernel.pack(weight))
        del weight
        marks.append(clock())
        for name, begin, end in zip(("choose", "canonical", "pack"), marks, marks[1:], strict=False):
            parts[name] += end - begin
        kernels.add(kernel.__name__)
    seconds = clock() - started
    packed = sum(t.nbytes for part in kept for t in part.values())
    return {"seconds": seconds, "parts": parts, "packed": packed, "kernels": sorted(kernels)}


def _release_memory() -> None:
    """Return cached memory to the system, so that its reuse does not hide an allocation."""
    gc.collect()
    bitline_memory.release()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def memory(folder: Path) -> dict[str, Any]:
    """Peak bytes beyond source tensors and packed weight, for one layer of each shape, after a warm-up."""
    checkpoint = bitline.open_checkpoint(folder)
    read = checkpoint.source.read
    shapes = {(record.spec.n, record.spec.k): record for record in checkpoint.layers()}
    rows = []
    for record in [next(iter(shapes.values())), *shapes.values()]:
        tensors = {name: read(name).clone() for name in record.tensors}
        checkpoint.source.read = tensors.__getitem__  # type: ignore[method-assign]
        kernel = bitline.choose(record.spec).kernel
        _release_memory()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        packed = kernel.pack(record.weight())
        peak = _status("VmHWM") - before
        size = sum(t.nbytes for t in packed.values())
        rows.append({"shape": [record.spec.n, record.spec.k], "packed": size, "extra": peak - size})
        del packed, tensors
    rows = rows[1:]
    largest = max(row["packed"] for row in rows)
    return {"layers": rows, "extra_over_packed": max(row["extra"] for row in rows) / largest}


def child(folder: Path, passes: int) -> dict[str, Any]:
    registry.load()
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf"))
    size = sum(file.stat().st_size for file in files)
    mapped_sum(files[:1])  # starts the threads
    plain: dict[str, list[float]] = {"new": [], "again": [], "sum": []}
    runs = []
    for _ in range(passes):
        for name, measure in (("new", read_new), ("again", read_again), ("sum", mapped_sum)):
            plain[name].append(measure(files))
        gc.collect()
        runs.append(one_pass(folder))
    best = min(runs, key=lambda run: run["seconds"])
    rates = {name: size / min(seconds) / 1e9 for name, seconds in plain.items()}
    rate = size / best["seconds"] / 1e9
    return {
        "bytes": size, "bitline": rate, "plain": rates, "shares": {name: rate / other for name, other in rates.items()},
        "seconds": {"bitline": [run["seconds"] for run in runs], **plain}, "best": best, "memory": memory(folder),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(EVERY))
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--out", type=Path, help="JSON of results; families in it that are not named are kept")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.passes)))
        return
    report: dict[str, Any] = {"families": {}}
    if options.out and options.out.exists():
        report = json.loads(options.out.read_text())
    for family in options.families:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            synthesize(Path(folder), family, options.gigabytes)
            command = [sys.executable, __file__, "--child", folder, "--passes", str(options.passes)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        report["families"][family] = row | {"machine": machine()}
        best = row["best"]
        plain = ", ".join(f"{name} {rate:.1f} ({row['shares'][name]:.0%})" for name, rate in row["plain"].items())
        print(
            f"{family}: {row['bytes'] / 1e9:.2f} GB at {row['bitline']:.2f} GB/s; plain reads (share of): {plain}; passes "
            f"{', '.join(f'{s:.2f}' for s in row['seconds']['bitline'])} s; "
            f"{', '.join(f'{name} {s * 1e3:.0f}' for name, s in best['parts'].items())} ms; extra memory "
            f"{row['memory']['extra_over_packed']:.2f} x packed; {', '.join(best['kernels'])}",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
