"""The conformance suite: a kernel's declared facts, each run as a test."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitline import types
from bitline.kernels.base import Kernel, Packed
from bitline.platform import Platform
from bitline.quantized_input import code_dtype, fitted, reference_input
from bitline.testing.generators import inputs, lossless_inputs, lossless_weight, random_spec, random_weight
from bitline.testing.poison import poison
from bitline.testing.tolerance import check, check_exact
from bitline.types import ActSpec, LinearSpec, Verdict
from bitline.weight import QuantizedWeight

Test = Callable[[type[Kernel], LinearSpec, Platform, torch.device | str], None]
BATCH_SIZES = (0, 1, 2, 3, 7, 17, 65)


@dataclass
class Report:
    """The result of the suite on one kernel.

    Attributes:
        kernel: The kernel's class name.
        passed: Keys of the specs that it implements and passed.
        refused: Key of each spec that it refused -> its reason.
        failures: One line per failed test.
    """

    kernel: str
    passed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.kernel}: {len(self.passed)} specs passed, {len(self.refused)} refused, {len(self.failures)} failures"
        return "\n  ".join([head, *self.failures])


def default_specs() -> list[LinearSpec]:
    """The schemes of common checkpoints, each with an aligned and an unaligned shape, and thirty random specs."""
    u4, u4b8, u8b128 = types.uint4, types.uint4b8, types.uint8b128
    e4m3, e2m1, int8 = types.float8_e4m3fn, types.float4_e2m1, types.int8
    specs = []
    for n, k in ((64, 256), (48, 208)):
        base = LinearSpec(n, k, u4b8, (1, 128), scale_dtype=torch.bfloat16)
        specs += [
            base, base.replace(block=(1, 32), bias=True), base.replace(block=(1, k)), base.replace(act_order=True),
            base.replace(act_dtype=torch.float16, scale_dtype=torch.float16), base.replace(act_dtype=torch.float32),
            base.replace(weight=u4, zero="int"), base.replace(weight=u4, zero="int", block=(1, 64), act_dtype=torch.float16),
            base.replace(weight=u4, zero="float", scale_dtype=torch.float16), base.replace(weight=u8b128),
            base.replace(weight=types.uint2b2), base.replace(weight=types.uint3b4), base.replace(weight=types.uint8, zero="int"),
            base.replace(act=ActSpec(int8)), base.replace(act=ActSpec(e4m3)),
            base.replace(weight=int8, block=(1, k), act=ActSpec(int8)), base.replace(weight=int8, block=(1, k)),
            base.replace(weight=int8, block=(1, k), act=ActSpec(int8, False, "tensor", 0, False), scale_dtype=torch.float32),
            base.replace(weight=e4m3, block=(n, k), act=ActSpec(e4m3, False, "tensor")),
            base.replace(weight=e4m3, block=(1, k), act=ActSpec(e4m3)), base.replace(weight=e4m3, block=(1, k)),
            base.replace(weight=e4m3, block=(128, 128), scale_dtype=torch.float32, act=ActSpec(e4m3, True, "group", 128)),
            base.replace(weight=e4m3, block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
            base.replace(weight=e2m1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
            base.replace(weight=e2m1, block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(n, k)),
        ]  # fmt: skip
    return specs + [random_spec(seed) for seed in range(30)]


def check_kernel(
    kernel: type[Kernel],
    specs: Iterable[LinearSpec] | None = None,
    platform: Platform | str | None = None,
    device: torch.device | str = "cpu",
) -> Report:
    """Run the conformance suite on a kernel, for each spec that it implements.

    - On random data the output is within the tolerance of `check`, on lossless data exact: for M of 0, 1, 2, 3, 7, 17 and 65,
      with poisoned memory.
    - The same for inputs that are quantized before the call, where the kernel takes those.
    - An `unpack` of its own gives the weight back.
    - `pack` is pure and repeatable; `apply` changes neither its input nor the packed tensors.
    - `deterministic`, `batch_invariant` and, on a GPU, `cuda_graph` hold where they are declared.
    - `is_supported` and `can_implement` return Verdicts, refusals with a reason; costs are positive and finite.

    Args:
        kernel: The kernel.
        specs: The layers to test; a set of common schemes and random specs by default.
        platform: The platform to ask the kernel about; that of `device` by default.
        device: Where to run.

    Returns:
        What passed and what was refused.

    Raises:
        AssertionError: With all failures; also where the kernel does not run on the platform or implements none of the specs.
    """
    report = Report(kernel.__name__)
    platform = Platform.parse(platform) if isinstance(platform, str) else platform or Platform.detect(device)
    supported = kernel.is_supported(platform)
    report.failures += _verdict_failures(supported, f"is_supported({platform})")
    if not supported or platform.vendor not in kernel.platforms:
        reason = getattr(supported, "reason", "") or f"it is offered on {', '.join(kernel.platforms)} only"
        raise AssertionError(f"{kernel.__name__} does not run on {platform}: {reason}")
    for spec in default_specs() if specs is None else specs:
        if spec.act_dtype not in kernel.act_dtypes:
            report.refused[spec.key] = f"input dtype {spec.act_dtype}"
            continue
        verdict = kernel.can_implement(spec)
        invalid = _verdict_failures(verdict, f"can_implement({spec.key})")
        if invalid or not verdict:
            report.failures += invalid
            report.refused[spec.key] = str(getattr(verdict, "reason", verdict))
            report.failures += _run(_costs, kernel, spec, platform, device)  # `choose` ranks refused kernels too
            continue
        failures = [f for test in _TESTS for f in _run(test, kernel, spec, platform, device)]
        report.failures += failures
        if not failures:
            report.passed.append(spec.key)
    if not report.passed and not report.failures:
        report.failures.append("it implements none of the specs, so nothing was tested")
    if report.failures:
        raise AssertionError(str(report))
    return report


def _run(test: Test, kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> list[str]:
    """Run one test on one spec; the failure as a list of one, or none."""
    try:
        test(kernel, spec, platform, device)
    except Exception as error:  # an exception in the kernel is a failure like any other
        message = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return [f"{test.__name__.removeprefix('_')} [{spec.key}]: {message}"]
    return []


def _verdict_failures(verdict: object, call: str) -> list[str]:
    if not isinstance(verdict, Verdict):
        return [f"{call} gave {verdict!r}, not a Verdict"]
    return [] if verdict.ok or verdict.reason.strip() else [f"{call} refuses without a reason"]


def _digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the tensors' bytes, shapes and strides."""
    state = hashlib.sha256()
    for t in tensors:
        state.update(f"{t.dtype}{tuple(t.shape)}{t.stride()}".encode())
        state.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return state.hexdigest()


def _packed(kernel: type[Kernel], weight: QuantizedWeight) -> tuple[Packed, list[Tensor], Tensor | None]:
    """What `pack` gave, the list that `apply` takes, and the bias in the input dtype."""
    packed = kernel.pack(weight)
    bias = None if weight.bias is None else weight.bias.to(weight.spec.act_dtype)
    return packed, list(packed.values()), bias


def _random_data(kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> None:
    weight = random_weight(spec, 3, device)
    with poison():
        _, packed, bias = _packed(kernel, weight)
        outputs = [(x, kernel.apply(x, packed, bias, spec)) for x in (inputs(m, spec, m, device) for m in BATCH_SIZES)]
    for x, out in outputs:
        check(out, x, weight)


def _lossless_data(kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> None:
    try:
        weight = lossless_weight(spec, 4, device)
    except ValueError:  # a codebook without 0 has no lossless weights
        return
    with poison():
        _, packed, bias = _packed(kernel, weight)
        outputs = [(x, kernel.apply(x, packed, bias, spec)) for x in (lossless_inputs(m, spec, m, device) for m in BATCH_SIZES)]
    for x, out in outputs:
        check_exact(out, x, weight)


def _quantized_input(kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> None:
    """`apply_quantized` of what `bitline.act_quant` makes of x, on random data and, bit for bit, on lossless data."""
    if not kernel.takes_quantized_input or spec.act is None or code_dtype(spec.act) is None:
        return
    cases = ((random_weight, inputs, check), (lossless_weight, lossless_inputs, check_exact))
    for make, given, judge in cases:
        try:
            weight = make(spec, 9, device)
        except ValueError:  # no lossless weights
            continue
        with poison():
            _, packed, bias = _packed(kernel, weight)
            xs = [given(m, spec, m, device) for m in BATCH_SIZES if m]
            quantized = [fitted(reference_input(x, spec.act, weight.input_scale, weight.input_zero), spec) for x in xs]
            outputs = [kernel.apply_quantized(*q, packed, bias, spec) for q in quantized]
        for x, out in zip(xs, outputs, strict=True):
            judge(out, x, weight)


def _pure_pack(kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> None:
    weight = random_weight(spec, 5, device)
    before = _digest(weight.tensors().values())
    first, tensors, bias = _packed(kernel, weight)
    if _digest(weight.tensors().values()) != before:
        raise AssertionError("pack changed the weight")
    if not all(isinstance(t, Tensor) and t.device.type == torch.device(device).type for t in tensors):
        raise AssertionError("pack must return tensors on the weight's device")
    second = kernel.pack(weight)
    if list(first) != list(second) or _digest(tensors) != _digest(second.values()):
        raise AssertionError("packing the same weight twice gave different tensors")
    x = inputs(3, spec, device=device)
    kept = x.clone()
    packed_before = _digest(tensors)
    kernel.apply(x, tensors, bias, spec)
    if not torch.equal(x, kept):
        raise AssertionError("apply changed its input")
    if _digest(tensors) != packed_before:
        raise AssertionError("apply changed the packed weight")


def _declared_facts(kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> None:
    _, packed, bias = _packed(kernel, random_weight(spec, 6, device))
    # A dynamic per-tensor activation scale depends on the whole batch by definition.
    batch_scale = spec.act is not None and spec.act.dynamic and spec.act.granularity == "tensor"
    for m in (1, 17, 65):
        x = inputs(m, spec, m, device)
        out = kernel.apply(x, packed, bias, spec)
        if kernel.deterministic and not torch.equal(kernel.apply(x, packed, bias, spec), out):
            raise AssertionError(f"declared deterministic, but two calls with M={m} differ")
        if kernel.batch_invariant and m > 1 and not batch_scale:
            for i in (0, m // 2, m - 1):
                if not torch.equal(kernel.apply(x[i : i + 1].contiguous(), packed, bias, spec)[0], out[i]):
                    raise AssertionError(f"declared batch invariant, but row {i} of {m} differs from the row alone")
    if kernel.cuda_graph and torch.device(device).type == "cuda":
        _check_cuda_graph(lambda x: kernel.apply(x, packed, bias, spec), inputs(3, spec, 7, device), inputs(3, spec, 8, device))


def _check_cuda_graph(call: Callable[[Tensor], Tensor], x: Tensor, other: Tensor) -> None:
    """Capture a call on x, and replay it on another input."""
    expected = call(other)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(x)  # warm-up: the first call may compile
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(out, expected):
        raise AssertionError("declared cuda_graph, but a replay on other input gives another result than a call")


def _costs(kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> None:
    for m in (1, 16, 256, 4096):
        cost = kernel.cost(spec, platform, m)
        if not (isinstance(cost, float) and math.isfinite(cost) and cost > 0):
            raise AssertionError(f"cost with M={m} is {cost!r}, not a positive number of seconds")
    if kernel.packed_bytes(spec) <= 0:
        raise AssertionError("packed_bytes must be positive")


def _unpacked(kernel: type[Kernel], spec: LinearSpec, platform: Platform, device: torch.device | str) -> None:
    """An `unpack` of the kernel's own gives the weight to two units in the last place of its largest element."""
    if kernel.unpack.__func__ is Kernel.unpack.__func__:  # type: ignore[attr-defined]
        return
    weight = random_weight(spec, 10, device)
    with poison():
        w = kernel.unpack(_packed(kernel, weight)[1], spec.replace(bias=False))
    want = weight.dequantize(spec.act_dtype)
    assert w.shape == want.shape and w.dtype == want.dtype, f"it unpacks {list(w.shape)} {w.dtype}"
    finite = want.isfinite()
    error = (w.double() - want.double())[finite].abs().max().item() if finite.any() else 0.0
    limit = 2 * torch.finfo(spec.act_dtype).eps * want.double()[finite].abs().max().item() if finite.any() else 0.0
    assert error <= limit, f"it unpacks a weight that is {error:.3g} off, more than {limit:.3g}"


_TESTS = (_random_data, _lossless_data, _quantized_input, _unpacked, _pure_pack, _declared_facts, _costs)
