"""Timing of kernels, for `bitline tune` and `bitline bench`: calls as layers make them, weights out of memory, checked results.

Where the last-level cache would hold a packed weight, each call reads another copy, as in a model whose other layers run in
between. On a CPU calls of different kernels take turns, so that what else the machine does slows all of them alike; on an NVIDIA
or AMD GPU a graph of one kernel's calls is replayed, which leaves the host's time out.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline import memory, native
from bitline.kernels.base import Kernel
from bitline.testing.tolerance import Comparison, compare
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

SLOW = 10.0  # times the fastest one's: few calls are enough
GPU_CALLS = 10  # between two synchronizations, where no graph is replayed
_FEW, _LEAST, _MOST = 3, 7, 400  # rounds: of what is slow; of the others
_COPY_BYTES, _MAX_COPIES = 1 << 30, 200  # of all kernels' copies of a weight, and of one's
_DEFAULT_CACHE = 32 << 20
_RATE_SECONDS = 0.3

Call = Callable[[Tensor], Any]
Clock = Callable[[], float]


class WrongResult(Exception):
    """A kernel's result is not what the reference computes."""


# ---- calls -----------------------------------------------------------------------------------------------------------------


def call_of(kernel: type[Kernel], packed: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Call:
    """What a layer calls for a contiguous x [M, K], without its checks."""
    eager, direct = kernel.eager(packed, bias, spec), kernel.direct(packed, bias, spec)
    if eager is not None:
        shortcut = eager

        def call(x: Tensor) -> Tensor:
            y = shortcut(x)
            return kernel.apply(x, packed, bias, spec) if y is None else y

        return call
    if direct is not None:
        op, arguments = direct
        return lambda x: op(x, *arguments)
    return lambda x: kernel.apply(x, packed, bias, spec)


def packed_calls(kernel: type[Kernel], weight: QuantizedWeight, spec: LinearSpec, nbytes: int) -> tuple[list[Call], int]:
    """Pack a weight. Returns calls on copies of it that are at least `nbytes` in all, and the bytes of one."""
    packed = list(kernel.pack(weight).values())
    bias = None if weight.bias is None else weight.bias.to(spec.act_dtype)
    size = max(1, sum(t.nbytes for t in packed))
    return [call_of(kernel, tensors, bias, spec) for tensors in copies(packed, nbytes)], size


def copies(tensors: list[Tensor], nbytes: int) -> list[list[Tensor]]:
    """These tensors and so many copies of them that all are at least `nbytes`; at most 200."""
    size = max(1, sum(t.nbytes for t in tensors))
    count = min(_MAX_COPIES, -(-nbytes // size)) if size < nbytes else 1
    return [tensors] + [[_copy(t) for t in tensors] for _ in range(count - 1)]


def _copy(tensor: Tensor) -> Tensor:
    """A copy in memory like the original's: large CPU tensors have huge pages."""
    if not tensor.is_contiguous() or type(tensor) is not Tensor:
        return tensor.clone()
    return memory.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def cold_bytes(device: torch.device, kernels: int) -> int:
    """Bytes of the copies of one kernel's weight which no cache holds, where as many kernels are timed in turn."""
    return min(2 * cache_bytes(device), _COPY_BYTES // max(1, kernels))


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache of a CPU core, or a GPU's L2 cache; 32 MiB where the system does not say."""
    if device.type != "cpu":
        properties = backend(device).get_device_properties(device)
        return int(getattr(properties, "L2_cache_size", 0) or _DEFAULT_CACHE)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
    return max(sizes, default=_DEFAULT_CACHE)


def backend(device: torch.device) -> Any:
    """torch.cuda or torch.xpu."""
    return getattr(torch, device.type)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which the device is the current one."""
    current: Any = contextlib.nullcontext() if device.type == "cpu" else backend(device).device(device)
    return current


def synchronize(device: torch.device) -> None:
    """Wait for what runs on a device."""
    if device.type != "cpu":
        backend(device).synchronize(device)


# ---- results ---------------------------------------------------------------------------------------------------------------


def require_form(y: Any, x: Tensor, spec: LinearSpec) -> Tensor:
    """What a kernel gave for x, if it is a tensor [M, N] of x's dtype. Raises WrongResult."""
    if not isinstance(y, Tensor) or y.shape != (x.shape[0], spec.n) or y.dtype != x.dtype:
        raise WrongResult(f"its result with M={x.shape[0]} has another shape or dtype")
    return y


def require_close(found: Comparison, m: int) -> None:
    """Raises WrongResult where a comparison is not within its tolerance."""
    if not found.ok:
        raise WrongResult(f"M={m}: the largest error is {found.error:.2g}, allowed is {found.allowed:.2g}")


def row_step(m: int, spec: LinearSpec, most: int) -> int:
    """The step through M rows of x that leaves about `most`; 1 where all rows share one dynamic scale."""
    shares_scale = spec.act is not None and spec.act.dynamic and spec.act.granularity == "tensor"
    return 1 if shares_scale else max(1, m // most)


def check_result(y: Any, x: Tensor, weight: QuantizedWeight, most_m: int, most_n: int) -> None:
    """Compare a part of a kernel's result with the reference in float64.

    Args:
        y: What the kernel gave for x.
        x: [M, K].
        weight: The weight [N, K], on the CPU.
        most_m: About so many rows of x count, spread evenly.
        most_n: So many first rows of W count.

    Raises:
        WrongResult: For anything but a tensor [M, N] of x's dtype within the tolerance of `bitline.testing.compare`.
    """
    n, m, step = min(most_n, weight.spec.n), x.shape[0], row_step(x.shape[0], weight.spec, most_m)
    part = require_form(y, x, weight.spec)[::step, :n].cpu()
    require_close(compare(part, x[::step].cpu().contiguous(), weight.narrow(0, 0, n)), m)


# ---- clocks ----------------------------------------------------------------------------------------------------------------


def seconds_of(calls: Sequence[Callable[[], Any]], device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds of one of these calls, made one after the other between two synchronizations; at least a nanosecond."""
    synchronize(device)
    started = clock()
    for call in calls:
        call()
    synchronize(device)
    return max(1e-9, (clock() - started) / len(calls))


def in_turn(
    calls: Mapping[str, Sequence[Callable[[], Any]]], device: torch.device, seconds: float, clock: Clock = time.perf_counter,
    *, yardstick: str = "",
) -> dict[str, list[float]]:  # fmt: skip
    """Times of several things that take turns, in an order that changes from round to round.

    Each is called twice to warm up. What then takes ten times the fastest one's time has three rounds, the others 7 to 400, until
    the time is up.

    Args:
        calls: By name, the calls to rotate through, for example one for each copy of a weight.
        device: Where they run; on a GPU a round has ten calls of each.
        seconds: Time for all rounds.
        clock: Seconds.
        yardstick: The name of what others are not slow compared with, such as a read of as many bytes; it is never slow itself.

    Returns:
        By name, seconds of one call in each round.
    """
    repeats = 1 if device.type == "cpu" else GPU_CALLS
    next_call = dict.fromkeys(calls, 0)
    found: dict[str, list[float]] = {name: [] for name in calls}

    def turn(name: str) -> float:
        variants, start = calls[name], next_call[name]
        next_call[name] += repeats
        return seconds_of([variants[(start + i) % len(variants)] for i in range(repeats)], device, clock)

    first = {name: turn(name) for name in calls}  # may allocate or compile
    warm = {name: min(first[name], turn(name)) for name in calls}
    fastest = min((value for name, value in warm.items() if name != yardstick), default=0.0)
    racing = [name for name in calls if name == yardstick or warm[name] <= SLOW * fastest]
    shuffler = random.Random(0)  # a kernel is slower after one that has evicted its input and code, so the order changes
    end, rounds = clock() + seconds, 0
    while rounds < _LEAST or (rounds < _MOST and clock() < end):
        turns = racing if rounds >= _FEW else list(calls)
        for name in shuffler.sample(turns, len(turns)):
            found[name].append(turn(name))
        rounds += 1
    return found


def graph_of(calls: Sequence[Callable[[], Any]]) -> Any:
    """A CUDA graph of calls, each of the first three called before as a warm-up. Raises what capturing raises."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replays(graph: Any, count: int) -> float:
    """Milliseconds of a replay, of `count` one after the other."""
    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    start.record()
    for _ in range(count):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / count


def replay_seconds(calls: Sequence[Callable[[], Any]], target: float = 15e-3, rounds: int = 5) -> list[float]:
    """Seconds of a call in each round of replays of a CUDA graph of all calls. target: seconds of a round."""
    graph = graph_of(calls)
    _replays(graph, 2)
    count = max(1, min(200, int(target * 1e3 / max(_replays(graph, 1), 1e-3))))
    return [_replays(graph, count) / len(calls) / 1e3 for _ in range(rounds)]


def rested_seconds(calls: Sequence[Callable[[], Any]], rest: float = 0.15) -> tuple[float, float]:
    """Seconds of a call over 4 ms after `rest` seconds of idling, and over rest / 4 after as many seconds of load.

    Under sustained load a GPU lowers its clocks.
    """
    graph = graph_of(calls)
    _replays(graph, 1)
    time.sleep(rest)
    once = max(_replays(graph, 1), 1e-3)
    burst = _replays(graph, max(1, int(4 / once)))
    for _ in range(int(1e3 * rest / once)):
        graph.replay()
    return burst / len(calls) / 1e3, _replays(graph, max(1, int(250 * rest / once))) / len(calls) / 1e3


# ---- what a machine can do ---------------------------------------------------------------------------------------------------


def read_bandwidth(device: torch.device | str, nbytes: int = 1 << 27) -> float:
    """Bytes per second of summing a float32 buffer larger than the cache, the best of four passes."""
    where = torch.device(device)
    data = torch.ones(nbytes // 4, device=where)
    return nbytes / min(seconds_of([lambda: float(data.sum())], where) for _ in range(4))


def reads(nbytes: int, total: int) -> list[Callable[[], Any]]:
    """Calls that read `nbytes` of CPU memory each, on all threads, each of other memory, of at least `total` in all."""
    size = max(8, nbytes // 8 * 8)
    count = max(2, min(_MAX_COPIES, -(-total // size)))
    data = memory.empty(count, size // 4, dtype=torch.float32).fill_(1.0)
    read = native.all_finite if native.core() is not None else torch.sum
    return [partial(read, part) for part in data]


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second (a multiply-add is two) of torch's product of square matrices at its best.

    dtype: bfloat16, float16 or float32; int8 by _int_mm; float8_e4m3fn by _scaled_mm with one scale per tensor.

    Raises:
        RuntimeError, NotImplementedError: Where torch has none for this dtype here.
    """
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(n, n, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    one = torch.ones(1, device=device)
    if dtype == torch.int8:
        product: Callable[[], Any] = lambda: torch._int_mm(a, b.t())
    elif dtype == torch.float8_e4m3fn:
        product = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
    else:
        product = lambda: torch.nn.functional.linear(a, b)
    product()
    end = time.perf_counter() + _RATE_SECONDS
    times: list[float] = []
    while len(times) < 5 or time.perf_counter() < end:  # the best of more calls where other programs use the machine too
        times.append(seconds_of([product], device))
    return 2.0 * n**3 / min(times)
