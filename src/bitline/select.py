"""Kernel selection: rank all registered kernels for a layer on a platform under a policy, with a reason for each refusal."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bitline import env, tuning
from bitline.errors import InputError, NoKernelError
from bitline.kernels import registry
from bitline.kernels.base import Kernel, experts_proven
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict, dtype_name, no

log = logging.getLogger("bitline")
POLICY_FLAGS = ("batch_invariant", "deterministic")  # the policies that can be given by name
_BACKEND_ALIASES = {"cpu": "native"}  # vLLM's name -> ours


@dataclass(frozen=True)
class Policy:
    """What the caller requires of a selection.

    Attributes:
        kernel: "auto", or the kernel to use: its class name, or what tables print of it, in any case.
        backend: "auto", or the backend (provider) whose kernels to use.
        strict: Whether a requested kernel or backend that cannot run a layer is an error; if not, selection falls back and the
            choice's note has the reason.
        disabled: Kernels never to use, named in the same ways.
        m: Expected batch sizes M (tokens per call). Kernels are ranked by the time of a workload that puts the same number of
            tokens through calls of each; the default is an answer of 256 tokens, one by one, to a prompt of 256.
        deterministic: Use deterministic kernels only.
        batch_invariant: Use batch-invariant kernels only, whose result for a token does not depend on M. Takes precedence over a
            backend that has none; the choice's note says so.
        experts: The layers of one expert, or their keys, where the layer is one of them: kernels that run the experts of all of
            these in one call (`Kernel.fuses_experts`) rank before those that do not, the largest priority first.
        tuned: Use the costs that `bitline tune` measured on this machine, where the platform is this machine.

    Raises:
        NoKernelError: For an M below 1, and names that are not text.
    """

    kernel: str = "auto"
    backend: str = "auto"
    strict: bool = True
    disabled: frozenset[str] = frozenset()
    m: tuple[int, ...] = (1, 256)
    deterministic: bool = False
    batch_invariant: bool = False
    tuned: bool = True
    experts: tuple[LinearSpec, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.m,) if isinstance(self.m, int) else self.m
        if not sizes or not all(isinstance(m, int) and m >= 1 for m in sizes):
            raise NoKernelError("a policy needs batch sizes M of at least 1", found=self.m, expected="for example (1, 256)")
        names = [self.disabled] if isinstance(self.disabled, str) else list(self.disabled)
        if not all(isinstance(n, str) for n in (self.kernel, self.backend, *names)):
            raise NoKernelError("a policy names kernels and backends by text", found=(self.kernel, self.backend, names))
        object.__setattr__(self, "m", tuple(sizes))
        layers = tuple(LinearSpec.parse(s) if isinstance(s, str) else s for s in self.experts)
        object.__setattr__(self, "experts", layers)
        object.__setattr__(self, "disabled", frozenset(stripped for n in names if (stripped := n.strip())))
        object.__setattr__(self, "backend", _BACKEND_ALIASES.get(self.backend, self.backend))

    @staticmethod
    def from_env() -> Policy:
        """The default policy with BITLINE_KERNEL, BITLINE_BACKEND and BITLINE_DISABLED_KERNELS applied."""
        return Policy(kernel=env.kernel(), backend=env.backend(), disabled=env.disabled_kernels())

    @staticmethod
    def of(policy: Policy | str | None) -> Policy:
        """A policy from any form that functions accept.

        Args:
            policy: A Policy, returned as it is; None for `from_env`; or "batch_invariant", "deterministic" or both, separated by
                a comma, which are added to `from_env`.

        Raises:
            NoKernelError: For any other text.
        """
        if isinstance(policy, Policy):
            return policy
        base = Policy.from_env()
        flags = [] if policy is None else [f.strip().replace("-", "_") for f in policy.split(",")]
        if unknown := [f for f in flags if f not in POLICY_FLAGS]:
            raise NoKernelError("unknown policy", found=", ".join(map(repr, unknown)), expected=" or ".join(POLICY_FLAGS))
        return replace(base, **dict.fromkeys(flags, True))  # type: ignore[arg-type]  # all flags are booleans


@dataclass(frozen=True)
class Candidate:
    """One kernel's result in a selection.

    Attributes:
        name: The kernel's class name.
        kernel: The kernel.
        verdict: Whether it can run the layer under the policy, and why not.
        supported: Whether it runs on the platform at all.
        costs: Seconds per call at each M of the policy, estimated or measured here; empty where it is not supported or has no
            valid estimate.
        estimates: The estimates, also where the costs were measured.
        m: M of each cost.
        priority: Breaks ties of the score, larger first.
        backend: The kernel's backend (provider).
        measured_here: Whether the costs were measured on this machine (`bitline tune`), not estimated.
        failed_here: How it failed when it was tuned on this machine: such kernels rank last. "" where it did not.
        fuses_experts: Whether it runs the policy's `experts` in one call; False where there are none.
    """

    name: str
    kernel: type[Kernel]
    verdict: Verdict
    supported: bool
    costs: tuple[float, ...]
    estimates: tuple[float, ...]
    m: tuple[int, ...]
    priority: int
    backend: str
    measured_here: bool = False
    failed_here: str = ""
    fuses_experts: bool = False

    @property
    def nondeterministic(self) -> bool:
        """Whether the kernel declares that it is not deterministic. Such kernels rank last, unless all others emulate."""
        return self.kernel.deterministic is False

    @property
    def score(self) -> float:
        """Seconds per token: the sum over M of cost / M, the time in which one token goes through calls of every M."""
        return _per_token(self.costs, self.m)

    @property
    def estimated_score(self) -> float:
        """`score` of the estimates, for comparisons with kernels that cannot be measured."""
        return _per_token(self.estimates, self.m)

    def cost_basis(self, platform: Platform) -> str:
        """How the costs are known: "measured here" (`bitline tune`), or as the kernel's `cost_basis`."""
        return "measured here" if self.measured_here else self.kernel.cost_basis(platform)


@dataclass(frozen=True)
class Choice:
    """The result of `choose`.

    Attributes:
        spec: The layer, without `input_multiplier`.
        platform: The platform.
        policy: The policy.
        candidates: Every kernel, best first, those that can run the layer before those that refused it.
        note: Why a request of the policy was not met, or that the kernel is not deterministic; "" otherwise.
    """

    spec: LinearSpec
    platform: Platform
    policy: Policy
    candidates: tuple[Candidate, ...]
    note: str = ""

    @property
    def kernel(self) -> type[Kernel]:
        """The chosen kernel."""
        return self.candidates[0].kernel

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[0]

    def packed_bytes(self) -> int:
        """Bytes of the layer as the chosen kernel holds it: packed weight, by its own estimate, and bias."""
        bias = self.spec.n * self.spec.act_dtype.itemsize if self.spec.bias else 0
        return self.kernel.packed_bytes(self.spec) + bias

    @property
    def runner_up(self) -> Candidate | None:
        """The next candidate that can run the layer."""
        return next((c for c in self.candidates[1:] if c.verdict), None)

    @property
    def nearest_fast(self) -> Candidate | None:
        """The fastest kernel of this platform that refused this layer; one that implements the scheme is preferred."""
        refused = [c for c in self.candidates if c.supported and not c.verdict and c.costs]
        refused = [c for c in refused if self.spec.act is not None or not c.kernel.quantizes_input]
        # A kernel that only the input dtype or the policy excludes is nearer than one that could not do the scheme at all.
        refused = [c for c in refused if _implements_scheme(c.kernel, self.spec)] or refused
        return min(refused, key=lambda c: c.estimated_score, default=None)

    @property
    def degraded(self) -> bool:
        """Whether the layer runs on emulation, unrequested, although a faster kernel of this platform refused it.

        For a fallback kernel any faster kernel counts, for other emulation one that implements the scheme.
        """
        near = self.nearest_fast
        requested = self.policy.kernel == self.best.name or self.policy.backend == self.best.backend
        if not self.kernel.emulates or requested or near is None or near.estimated_score >= self.best.estimated_score:
            return False
        return self.kernel.is_fallback or _implements_scheme(near.kernel, self.spec)

    @property
    def lost_because(self) -> str:
        """Why the runner-up was not chosen, in one sentence with the M where its cost is worst."""
        other = self.runner_up
        if other is None:
            return "no other kernel can run it"
        name = short_name(other.name)
        reason = self.ranks_behind(other)
        if reason:
            return f"{name}: {reason}"
        ratio, m = max((o / b, m) for o, b, m in zip(other.costs, self.best.costs, self.policy.m, strict=True))
        return f"{name}: {ratio:.1f}x the time at M={m}" if ratio > 1.005 else f"{name}: same cost, lower priority"

    def ranks_behind(self, other: Candidate) -> str:
        """Why a candidate that can run the layer was not chosen, for another reason than its time per token; "" for its time."""
        if other is self.best:
            return ""
        if other.failed_here and not self.best.failed_here:
            return f"failed when it was tuned here, {other.failed_here}"
        if len(self.best.costs) != len(other.costs):
            return "not asked for"
        if self.best.fuses_experts and not other.fuses_experts:
            return "runs the experts one by one"
        if other.score >= self.best.score:
            return ""
        if other.fuses_experts and other.priority < self.best.priority:
            return "lower priority among kernels that run all experts in one call"
        if other.nondeterministic:
            return "not deterministic, its reduction order varies between calls"
        if other.kernel.emulates:
            return "emulates the scheme, and native kernels come first"
        return "not asked for"

    def explain(self) -> str:
        """The ranking as text: every candidate's verdict, seconds per call at each M and per token, reason and nearest fix."""
        lines = [f"{self.spec} on {self.platform}"]
        lines += [f"note: {self.platform.rates_note}"] if self.platform.rates_note else []
        lines += [f"note: {self.note}"] if self.note else []
        width = max(len(c.name) for c in self.candidates)
        for i, c in enumerate(self.candidates):
            mark = "->" if i == 0 else "  "
            cost = "  ".join(f"M={m} {format_seconds(v)}" for m, v in zip(self.policy.m, c.costs, strict=False))
            cost += f"  per token {format_seconds(c.score)}" if len(c.costs) > 1 else ""
            cost += f"  ({c.cost_basis(self.platform)})" if cost else ""
            lines.append(f"{mark} {c.name:{width}}  {'yes' if c.verdict else 'no '}  {cost or '-'}")
            if not c.verdict:
                lines.append(f"     because: {c.verdict.reason}" + (f"; would run: {c.verdict.fix}" if c.verdict.fix else ""))
            elif reason := self.ranks_behind(c):
                lines.append(f"     ranks behind: {reason}")
        if self.degraded and self.nearest_fast is not None:
            lines.append(f"degraded: {self.nearest_fast.name} would be faster; {self.nearest_fast.verdict.reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The ranking as JSON-compatible data; costs are in seconds, by M."""
        return {
            "spec": self.spec.key,
            "scheme": self.spec.scheme,
            "shape": [self.spec.n, self.spec.k],
            "platform": str(self.platform),
            "kernel": self.best.name,
            "degraded": self.degraded,
            "note": self.note,
            "lost_because": self.lost_because,
            "candidates": [
                {
                    "kernel": c.name, "backend": c.backend, "ok": c.verdict.ok, "reason": c.verdict.reason, "fix": c.verdict.fix,
                    "cost_seconds": {str(m): v for m, v in zip(self.policy.m, c.costs, strict=False)},
                    "estimated_seconds": {str(m): v for m, v in zip(self.policy.m, c.estimates, strict=False)},
                    "seconds_per_token": c.score if c.costs else None,
                    "cost_basis": c.kernel.cost_basis(self.platform),
                    "measured_here": c.measured_here, "failed_here": c.failed_here,
                    "ranks_behind": self.ranks_behind(c) if c.verdict else "",
                }
                for c in self.candidates
            ],
        }  # fmt: skip


def _per_token(costs: Sequence[float], sizes: Sequence[int]) -> float:
    return sum(cost / m for cost, m in zip(costs, sizes, strict=True)) if costs else math.inf


def short_name(kernel: str) -> str:
    """A kernel's class name without its suffix: TorchInt4Pack for TorchInt4PackLinearKernel."""
    return kernel.removesuffix("Kernel").removesuffix("Linear").removesuffix("MM")


def format_seconds(value: float) -> str:
    """A duration with its unit: 1.2 ms, 34.0 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1e-9:.0f} ns"


def choose(
    spec: LinearSpec,
    platform: Platform | str | None = None,
    policy: Policy | str | None = None,
    *,
    kernels: Sequence[registry.Entry] | None = None,
    measured: tuning.Measurements | None = None,
) -> Choice:
    """Rank every kernel for a layer.

    The platform may be one that is not here, and nothing is allocated, compiled or timed. Kernels rank by the time per token of a
    workload with as many tokens at each M of the policy (`Candidate.score`), priority breaks ties. A kernel that was measured at
    all of these M has its measured costs, any other its estimates. Nondeterministic kernels, and on a GPU kernels that emulate
    without measured costs, come after the others, and last those that failed when they were tuned.

    Args:
        spec: The layer. Kernels are asked about it without `input_multiplier`, which the layer applies itself.
        platform: A Platform or its text form; this machine's CPU by default.
        policy: Any form that `Policy.of` accepts; the environment's by default.
        kernels: The kernels to rank; all registered ones by default.
        measured: Measured costs. By default those of `bitline tune` if the platform is this machine (from `Platform.detect`, not
            from text), policy.tuned is true and `$BITLINE_NO_TUNED` is not set; else none.

    Returns:
        The ranking, chosen kernel first.

    Raises:
        NoKernelError: Where the policy leaves no kernel that can run the layer, or names an unknown kernel or backend.
        PlatformError: For a platform text that is not valid.
        InputError: For anything but a LinearSpec.
    """
    if not isinstance(spec, LinearSpec):
        raise InputError("a layer is described by a LinearSpec", found=repr(spec),
                         fix="take a checkpoint layer's or a weight's spec, or parse one: LinearSpec.parse(text)")  # fmt: skip
    spec = spec.replace(input_multiplier=False) if spec.input_multiplier else spec
    if platform is None:
        platform = Platform.detect()
    elif isinstance(platform, str):
        platform = Platform.parse(platform)
    policy = Policy.of(policy)
    entries = registry.entries() if kernels is None else tuple(kernels)
    policy = resolve_names(policy, entries)
    if measured is None:
        measured = tuning.load(platform) if policy.tuned else {}
    times = measured.get(tuning.key_of(spec), tuning.UNTIMED) if measured else tuning.UNTIMED
    if times is tuning.UNTIMED:
        candidates = list(_ranked_untimed(entries, spec, platform, policy))
    else:
        candidates = _ranked([_evaluate(entry, spec, platform, policy, times) for entry in entries], platform)
    requested = policy.kernel != "auto" or policy.backend != "auto"
    note = _put_requested_first(candidates, spec, platform, policy) if requested else ""
    if not candidates or not candidates[0].verdict:
        raise _no_kernel_left(candidates, spec, platform)
    if candidates[0].nondeterministic and not requested:
        note = f"{candidates[0].name} is not deterministic: its reduction order varies between calls; "
        note += "Policy(deterministic=True) excludes it"
    if candidates[0].failed_here:
        note = f"{candidates[0].name} failed when it was tuned here: {candidates[0].failed_here}"
    return Choice(spec, platform, policy, tuple(candidates), note)


@functools.lru_cache(maxsize=256)
def _ranked_untimed(
    entries: tuple[registry.Entry, ...], spec: LinearSpec, platform: Platform, policy: Policy
) -> tuple[Candidate, ...]:
    """Candidates best first, by estimates. Kept, since a model has hundreds of layers of few specs."""
    return tuple(_ranked([_evaluate(entry, spec, platform, policy, tuning.UNTIMED) for entry in entries], platform))


def _ranked(candidates: list[Candidate], platform: Platform) -> list[Candidate]:
    """Candidates best first."""
    has_native = any(c.verdict and not (c.nondeterministic or c.kernel.emulates or c.failed_here) for c in candidates)

    def emulation_ranks_last(c: Candidate) -> bool:
        # A GPU may have native units for the scheme, which a modelled cost of emulation must not outrank.
        return c.kernel.emulates and platform.vendor != "cpu" and c.cost_basis(platform) == "modelled"

    def key(c: Candidate) -> tuple[Any, ...]:
        one_call = (not c.fuses_experts, -c.priority if c.fuses_experts else 0)  # of experts; estimates are of plain layers
        last = (bool(c.failed_here), *one_call, has_native and c.nondeterministic, emulation_ranks_last(c))
        return (not c.verdict, not c.supported, *last, c.score, -c.priority, c.name)

    return sorted(candidates, key=key)


def _put_requested_first(candidates: list[Candidate], spec: LinearSpec, platform: Platform, policy: Policy) -> str:
    """Move the best candidate of the requested kernel or backend to the front, in place.

    Where none can run the layer: a NoKernelError if the policy is strict, else the note of the fallback.
    """
    requested = [c for c in candidates if _is_requested(c, policy)]
    best = next((c for c in requested if c.verdict), None)
    if best is not None:
        candidates.remove(best)
        candidates.insert(0, best)
        return ""
    what = f"kernel {policy.kernel}" if policy.kernel != "auto" else f"backend {policy.backend}"
    reasons = "; ".join(f"{c.name}: {c.verdict.reason}" for c in requested) or "it has no kernel for such layers"
    overruled = policy.batch_invariant and policy.kernel == "auto"
    if policy.strict and not overruled:
        raise NoKernelError(f"{what} cannot run {spec} on {platform}", found=reasons, expected="a kernel that can",
                            fix="choose another, or pass strict=False to fall back")  # fmt: skip
    note = f"{what} was asked for and cannot run this layer ({reasons})"
    return note + ("; batch invariance overrules it" if overruled else "")


def _is_requested(candidate: Candidate, policy: Policy) -> bool:
    if policy.kernel != "auto":
        return candidate.name == policy.kernel
    return candidate.backend == policy.backend


def _no_kernel_left(candidates: Sequence[Candidate], spec: LinearSpec, platform: Platform) -> NoKernelError:
    return NoKernelError(
        f"no kernel is left that can run {spec} on {platform}",
        reasons=(f"{c.name}: {c.verdict.reason}" for c in candidates),
        fix="allow ReferenceLinearKernel, which runs everything"
        if spec.act_dtype in Kernel.act_dtypes
        else "use an input of bfloat16, float16 or float32",
    )


def resolve_names(policy: Policy, entries: Sequence[registry.Entry] = ()) -> Policy:
    """The policy with class names for kernels that are named as tables print them (`short_name`), or in another case.

    Raises NoKernelError for kernel and backend names that neither `entries` nor the registry has.
    """
    if policy.kernel == policy.backend == "auto" and not policy.disabled:
        return policy
    entries = (*entries, *registry.entries())
    known = {form.lower(): e.name for e in entries for form in (e.name, short_name(e.name))}
    named = {name: known.get(name.lower(), "") for name in (policy.kernel, *policy.disabled)} | {"auto": "auto"}
    if unknown := [name for name, resolved in named.items() if not resolved]:
        raise registry.unknown_kernels(unknown, {e.name for e in entries})
    backends = {e.kernel.backend for e in entries}
    if policy.backend not in backends | {"auto"}:
        raise NoKernelError("not registered as a kernel's backend: no kernel has it", found=policy.backend,
                            expected=", ".join(("auto", "cpu", *sorted(backends))))  # fmt: skip
    return replace(policy, kernel=named[policy.kernel], disabled=frozenset(named[name] for name in policy.disabled))


def _evaluate(entry: registry.Entry, spec: LinearSpec, platform: Platform, policy: Policy, times: tuning.LayerTimes) -> Candidate:
    """Ask a kernel about the platform and the layer, take its measured costs or estimate them, then apply the policy."""
    kernel = entry.kernel
    verdict = (
        verdict_of(kernel.is_supported, platform)
        if platform.vendor in entry.platforms
        else no(f"runs on {', '.join(entry.platforms)}; this platform is {platform.vendor}")
    )
    supported = bool(verdict)
    estimates: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()
    if supported:
        verdict = _implements(kernel, spec, platform)
        measured = times.of(entry.name, policy.m)
        estimates, error = _costs(kernel, spec, platform, policy)
        verdict = no(f"its cost cannot be estimated: {error}") if error and verdict else verdict
    if verdict and not (allowed := _allowed(entry, policy)):
        verdict = allowed
    failed = times.failed.get(entry.name, "") if supported else ""
    fuses = bool(verdict and policy.experts) and all(fuses_experts(kernel, s, platform) for s in (spec, *policy.experts))
    return Candidate(
        entry.name, kernel, verdict, supported, measured or estimates, estimates, policy.m, entry.priority, kernel.backend,
        bool(measured), failed, fuses,
    )  # fmt: skip


def fuses_experts(kernel: type[Kernel], spec: LinearSpec, platform: Platform) -> bool:
    """Whether experts one of whose layers has this spec run in one call of a kernel that the platform supports."""
    return experts_proven(kernel, platform) and bool(_implements(kernel, spec, platform)) and kernel.fuses_experts(spec, platform)


def _allowed(entry: registry.Entry, policy: Policy) -> Verdict:
    """Whether the policy allows a kernel that can run the layer."""
    kernel = entry.kernel
    if entry.name in policy.disabled:
        return no("disabled by the policy", "take it out of Policy(disabled=…) or BITLINE_DISABLED_KERNELS")
    if not kernel.exact and entry.name != policy.kernel and kernel.backend != policy.backend:
        return no("it deviates from the scheme's exact semantics", f"Policy(kernel={entry.name!r})")
    if kernel.unproven and entry.name != policy.kernel:
        return no("this version of it has not run on its hardware yet", f"Policy(kernel={entry.name!r})")
    if policy.deterministic and not kernel.deterministic:
        return no("not deterministic, and the policy asks for that")
    if policy.batch_invariant and not kernel.batch_invariant:
        return no("not batch invariant, and the policy asks for that")
    return YES


def verdict_of(question: Callable[[Any], Any], argument: Any) -> Verdict:
    """A kernel's answer to `is_supported` or `can_implement`.

    A refusal where it raises or returns something else, so that a defect in one third-party kernel cannot break selection.
    """
    try:
        answer = question(argument)
    except Exception as error:
        return no(f"{question.__name__} failed: {type(error).__name__}: {error}")
    return answer if isinstance(answer, Verdict) else no(f"{question.__name__} gave {answer!r}, which is no Verdict")


def _implements_scheme(kernel: type[Kernel], spec: LinearSpec) -> bool:
    """Whether the kernel would take the layer with one of its own input dtypes."""
    return any(verdict_of(kernel.can_implement, spec.replace(act_dtype=dtype)) for dtype in kernel.act_dtypes)


def _costs(kernel: type[Kernel], spec: LinearSpec, platform: Platform, policy: Policy) -> tuple[tuple[float, ...], str]:
    """Seconds at each M of the policy, or why there are none."""
    try:
        costs = tuple(float(kernel.cost(spec, platform, m)) for m in policy.m)
    except Exception as error:
        return (), f"{type(error).__name__}: {error}"
    if not all(math.isfinite(c) and c > 0 for c in costs):
        return (), f"{costs} are not all finite and positive"
    return costs, ""


def _implements(kernel: type[Kernel], spec: LinearSpec, platform: Platform) -> Verdict:
    """Whether a kernel that the platform supports can run the layer, its input dtype included."""
    if spec.act_dtype == torch.bfloat16 and 0 < platform.capability < 80 and kernel.requires_bf16_hardware:
        return no(f"{platform.arch} has no bfloat16 units", "with input dtype float16")
    if spec.act_dtype not in kernel.act_dtypes:
        accepted = ", ".join(map(dtype_name, kernel.act_dtypes))
        return no(f"input dtype {dtype_name(spec.act_dtype)}", f"with input dtype {accepted}")
    return verdict_of(kernel.can_implement, spec)


@functools.cache
def warn_note(note: str, kernel: str) -> None:
    """Log a warning, once for each distinct request of a policy that was not met."""
    log.warning("%s: %s is used instead", note, kernel)


def warn_about(choice: Choice, spec: LinearSpec) -> None:
    """Log what a layer's owner should know of its kernel: that it is degraded, and the choice's note."""
    near = choice.nearest_fast
    if choice.degraded and near is not None:
        warn_degraded(spec, choice.best.name, near.name, near.verdict.reason)
    if choice.note:
        warn_note(choice.note, choice.best.name)


@functools.cache
def warn_degraded(spec: LinearSpec, kernel: str, nearest: str, reason: str) -> None:
    """Log a warning, once for each distinct spec that runs degraded."""
    log.warning("%s runs on %s: %s would be faster but refuses it: %s", spec, kernel, nearest, reason)
