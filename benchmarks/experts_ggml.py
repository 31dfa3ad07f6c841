"""The experts of a mixture-of-experts layer beside llama.cpp's, which run on ggml's `mul_mat_id`, out of DRAM.

    python benchmarks/experts_ggml.py [--ggml FOLDER] [--pairs W4A16:Q4_0,…] [--shape 64x768x2048x8] [--m 1,64] [--rounds 12]

ggml's libraries come from the llama-cpp-python package if that is installed, else from --ggml, a folder with libggml-base.so and
libggml-cpu.so; without them nothing is measured. ggml runs in a process of its own, on as many threads, with the graph of
llama.cpp's MoE layers: gate, up, SwiGLU, down, multiplication by the router's weights, sum of the experts. Weights lie in ggml's
interleaved layout where it has one for the type and this CPU (`layout` in the results), as llama.cpp loads them. It quantizes
activations to 8 bits; Bitline takes bfloat16.

For one token every call takes other experts, so that no cache holds them. Engines take turns in bursts of calls, of which the
first is not counted. `read` is the time of reading Bitline's packed weights of the active experts on the same threads.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_experts import experts_of, read, routing

from _machine import machine  # isort: skip

RESULTS = Path(__file__).parent / "results" / "cpu_experts_ggml.json"
TYPES = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "MXFP4": 39}  # enum ggml_type
F32, I32 = 0, 26
BURST = {1: 16}  # calls in a burst; 4 for other M


# ---- ggml ----------------------------------------------------------------------------------------------------------------


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class TensorHead(ctypes.Structure):
    """The first fields of struct ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
    ]  # fmt: skip


# Letters of a signature: the result, then the arguments. p: pointer, l: int64, i: int, b: bool, v: nothing, I: InitParams.
SIGNATURES = {
    "ggml_init": "pI", "ggml_nbytes": "lp", "ggml_new_tensor_3d": "ppilll", "ggml_new_tensor_2d": "ppill",
    "ggml_mul_mat_id": "ppppp", "ggml_swiglu_split": "pppp", "ggml_mul": "pppp", "ggml_add": "pppp",
    "ggml_view_2d": "pppllll", "ggml_new_graph": "pp", "ggml_build_forward_expand": "vpp", "ggml_quantize_chunk": "lipplllp",
    "ggml_backend_cpu_init": "p", "ggml_backend_cpu_set_n_threads": "vpi", "ggml_backend_graph_compute": "ipp",
    "ggml_backend_cpu_buffer_type": "p", "ggml_backend_buft_alloc_buffer": "ppl", "ggml_backend_cpu_reg": "p",
    "ggml_backend_alloc_ctx_tensors_from_buft": "ppp", "ggml_backend_tensor_set": "vppll",
    "ggml_backend_reg_dev_get": "ppl", "ggml_backend_reg_get_proc_address": "pps", "ggml_backend_dev_supports_op": "bpp",
    "ggml_version": "s",
}  # fmt: skip
_LETTERS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "b": ctypes.c_bool, "v": None, "I": InitParams,
            "s": ctypes.c_char_p}  # fmt: skip


def find_ggml(folder: Path | None) -> Path | None:
    """The folder of ggml's libraries."""
    if folder is None:
        package = importlib.util.find_spec("llama_cpp")
        folder = Path(package.origin).parent / "lib" if package and package.origin else None
    return folder if folder and (folder / "libggml-cpu.so").exists() else None


def load_ggml(folder: Path) -> Any:
    """The functions of SIGNATURES, as attributes."""
    libraries = [ctypes.CDLL(str(folder / f"libggml-{name}.so"), ctypes.RTLD_GLOBAL) for name in ("base", "cpu")]

    class Functions:
        pass

    for name, letters in SIGNATURES.items():
        function = getattr(next(library for library in libraries if hasattr(library, name)), name)
        function.restype, function.argtypes = _LETTERS[letters[0]], [_LETTERS[c] for c in letters[1:]]
        setattr(Functions, name, staticmethod(function))
    return Functions


class GgmlExperts:
    """Three stacks of experts of one type, and graphs of calls. Weights are copies of one random expert's."""

    def __init__(self, ggml: Any, kind: str, shape: tuple[int, ...], threads: int) -> None:
        self.ggml, self.shape = ggml, shape
        self.backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.host = ggml.ggml_backend_cpu_buffer_type()
        count, intermediate, hidden, _ = shape
        context = self._context()
        sizes = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
        self.gate, self.up, self.down = (ggml.ggml_new_tensor_3d(context, TYPES[kind], k, n, count) for k, n in sizes)
        interleaved = self._interleaved_buffer()
        self.layout = "interleaved" if interleaved else "rows"
        assert ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, interleaved or self.host)
        generator = np.random.default_rng(1)
        for tensor, (k, n) in zip((self.gate, self.up, self.down), sizes, strict=True):
            values = generator.standard_normal((n, k), dtype=np.float32) / np.float32(k**0.5)
            expert = np.empty(ggml.ggml_nbytes(tensor) // count, dtype=np.uint8)
            ggml.ggml_quantize_chunk(TYPES[kind], values.ctypes.data, expert.ctypes.data, 0, n, k, None)
            stack = np.tile(expert, count)
            ggml.ggml_backend_tensor_set(tensor, stack.ctypes.data, 0, stack.nbytes)
        self.graphs: dict[int, tuple[Any, ...]] = {}

    def _context(self) -> int:
        return self.ggml.ggml_init(InitParams(1 << 20, None, True))

    def _interleaved_buffer(self) -> int | None:
        """The buffer type of an interleaved layout that mul_mat_id has for these weights; None where it has none."""
        ggml = self.ggml
        registry = ggml.ggml_backend_cpu_reg()
        device = ggml.ggml_backend_reg_dev_get(registry, 0)
        address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        head, i = TensorHead.from_address(self.gate), 0
        operation = self._operation()
        while types and types[i]:
            head.buffer = ggml.ggml_backend_buft_alloc_buffer(types[i], 0)
            supported = ggml.ggml_backend_dev_supports_op(device, operation)
            head.buffer = None
            if supported:
                return types[i]
            i += 1
        return None

    def _operation(self) -> int:
        context = self._context()
        x = self.ggml.ggml_new_tensor_3d(context, F32, self.shape[2], 1, 1)
        ids = self.ggml.ggml_new_tensor_2d(context, I32, self.shape[3], 1)
        return self.ggml.ggml_mul_mat_id(context, self.gate, x, ids)

    def graph(self, m: int) -> tuple[Any, ...]:
        """(graph, x, ids, router's weights, y) for m tokens."""
        if m in self.graphs:
            return self.graphs[m]
        ggml, (_, _, hidden, top_k), context = self.ggml, self.shape, self._context()
        x = ggml.ggml_new_tensor_3d(context, F32, hidden, 1, m)
        ids, weights = ggml.ggml_new_tensor_2d(context, I32, top_k, m), ggml.ggml_new_tensor_3d(context, F32, 1, top_k, m)
        up, gate = (ggml.ggml_mul_mat_id(context, w, x, ids) for w in (self.up, self.gate))
        experts = ggml.ggml_mul_mat_id(context, self.down, ggml.ggml_swiglu_split(context, gate, up), ids)
        experts = ggml.ggml_mul(context, experts, weights)
        nb = TensorHead.from_address(experts).nb
        views = [ggml.ggml_view_2d(context, experts, hidden, m, nb[2], j * nb[1]) for j in range(top_k)]
        y = views[0]
        for view in views[1:]:
            y = ggml.ggml_add(context, y, view)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, y)
        assert ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, self.host)
        self.graphs[m] = graph, x, ids, weights, y
        return self.graphs[m]

    def seconds(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> float:
        """Seconds of one call."""
        graph, *inputs, _ = self.graph(len(x))
        for tensor, values in zip(inputs, (x, ids, weights), strict=True):
            self.ggml.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        start = time.perf_counter()
        status = self.ggml.ggml_backend_graph_compute(self.backend, graph)
        assert status == 0, status
        return time.perf_counter() - start


def inputs_of(shape: tuple[int, ...], m: int, turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x float32 [m, hidden], experts int64 [m, top_k] and the router's weights float32 [m, top_k] of a turn."""
    g = torch.Generator().manual_seed(turn)
    return torch.randn(m, shape[2], generator=g), routing(shape[0], shape[3], m, turn), torch.rand(m, shape[3], generator=g)


def serve(folder: Path, kind: str, shape: tuple[int, ...], threads: int) -> None:
    """Answers {"m": …, "turns": […]} on standard input with the seconds of each turn's call."""
    experts = GgmlExperts(load_ggml(folder), kind, shape, threads)
    version = load_ggml(folder).ggml_version()
    print(json.dumps({"layout": experts.layout, "version": (version or b"").decode()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        calls = [inputs_of(shape, request["m"], turn) for turn in request["turns"]]
        print(json.dumps([experts.seconds(x.numpy(), i.int().numpy(), w.numpy()) for x, i, w in calls]), flush=True)


# ---- both ----------------------------------------------------------------------------------------------------------------


def bitline_bursts(name: str, shape: tuple[int, ...]) -> tuple[dict[str, Callable[[int, list[int]], list[float]]], int]:
    """Seconds of the calls of turns by engine (the layer, and reading its weights), and the bytes of an expert."""
    layer = experts_of(name, *shape[:3])

    def timed(calls: list[Callable[[], Any]]) -> list[float]:
        marks = [time.perf_counter()]
        for call in calls:
            call()
            marks.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(marks)]

    def experts(m: int, turns: list[int]) -> list[float]:
        calls = [(x.bfloat16(), i, w) for x, i, w in (inputs_of(shape, m, turn) for turn in turns)]
        return timed([lambda c=c: layer(*c) for c in calls])  # type: ignore[misc]

    def reads(m: int, turns: list[int]) -> list[float]:
        return timed([read(layer, inputs_of(shape, m, turn)[1]) for turn in turns])

    return {"bitline": experts, "read": reads}, sum(s.packed[0][0].nbytes for s in (layer.up[0], layer.down))


def measure(pair: str, shape: tuple[int, ...], sizes: list[int], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each M."""
    name, kind = pair.split(":")
    words = [sys.executable, __file__, "--serve", kind, "--shape", "x".join(map(str, shape)), "--ggml", str(folder)]
    words += ["--threads", str(torch.get_num_threads())]
    peer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin and peer.stdout
    engines, size = bitline_bursts(name, shape)
    facts = json.loads(peer.stdout.readline())

    def ggml(m: int, turns: list[int]) -> list[float]:
        assert peer.stdin and peer.stdout
        print(json.dumps({"m": m, "turns": turns}), file=peer.stdin, flush=True)
        answer: list[float] = json.loads(peer.stdout.readline())
        return answer

    rows, turn = [], 0
    for m in sizes:
        times: dict[str, list[float]] = {"bitline": [], "ggml": [], "read": []}
        for _ in range(rounds):
            for engine, burst in {**engines, "ggml": ggml}.items():
                turns = list(range(turn, turn + BURST.get(m, 4)))
                turn = turns[-1] + 1
                time.sleep(0.02)  # the other engine's threads stop spinning
                times[engine] += burst(m, turns)[1:]
        rows.append({
            "scheme": name, "ggml_type": kind, "ggml_layout": facts["layout"], "ggml_version": facts["version"],
            "experts": shape[0], "intermediate": shape[1], "hidden": shape[2], "top_k": shape[3], "m": m,
            "calls": len(times["bitline"]), "bytes_of_an_expert": size, "load": os.getloadavg()[0],
            "least_us": {engine: round(min(values) * 1e6, 1) for engine, values in times.items()},
            "median_us": {engine: round(statistics.median(values) * 1e6, 1) for engine, values in times.items()},
        })  # fmt: skip
        print(pair, f"M={m}", facts["layout"], rows[-1]["median_us"], rows[-1]["least_us"], flush=True)
    peer.stdin.close()
    peer.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path, help="folder of libggml-base.so and libggml-cpu.so")
    parser.add_argument("--pairs", default="W4A16:Q4_0,Q4_K:Q4_K,MXFP4:MXFP4", help="Bitline's scheme : ggml's type, …")
    parser.add_argument("--shape", default="64x768x2048x8", help="experts x intermediate x hidden x experts of a token")
    parser.add_argument("--m", default="1,64")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = tuple(map(int, arguments.shape.split("x")))
    folder = find_ggml(arguments.ggml)
    if folder is None:
        print("nothing measured: ggml is not here; install llama-cpp-python, or name its libraries' folder with --ggml")
        return
    if arguments.serve:
        serve(folder, arguments.serve, shape, arguments.threads)
        return
    sizes, rows = [int(m) for m in arguments.m.split(",")], []
    for pair in arguments.pairs.split(","):
        rows += measure(pair, shape, sizes, arguments.rounds, folder)
    package = importlib.util.find_spec("llama_cpp") and importlib.metadata.version("llama_cpp_python")
    report = {"machine": machine(), "llama_cpp_python": package or None, "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
