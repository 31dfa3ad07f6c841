"""One selection for every layer: rank all registered kernels for a spec on a platform under a policy, and say why."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bitline import env
from bitline.errors import NoKernelError
from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.platform import Platform
from bitline.types import LinearSpec, Verdict, no

log = logging.getLogger("bitline")
FACTS = ("batch_invariant", "deterministic")  # what a policy can ask for by one word
_SAME_BACKEND = {"cpu": "native"}  # the field's name -> ours


@dataclass(frozen=True)
class Policy:
    """What the caller wants of a choice.

    kernel: "auto", or the class name of the one kernel to use. backend: "auto", or a provider's name.
    strict: with a kernel or backend that cannot do a layer, True is an error and False falls back with the reason.
    disabled: class names never to use. m: numbers of rows the layer will see; kernels are ranked by the geometric
    mean of their costs there (1 is a decode step, 256 a prompt). deterministic, batch_invariant: only kernels that are;
    batch invariance overrules a backend that has no such kernel, and the choice's note says so.
    """

    kernel: str = "auto"
    backend: str = "auto"
    strict: bool = True
    disabled: frozenset[str] = frozenset()
    m: tuple[int, ...] = (1, 256)
    deterministic: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        rows = (self.m,) if isinstance(self.m, int) else self.m
        if not rows or not all(isinstance(m, int) and m >= 1 for m in rows):
            raise NoKernelError("a policy needs expected row counts of at least 1", found=self.m, expected="for example (1, 256)")
        names = [self.disabled] if isinstance(self.disabled, str) else list(self.disabled)
        if not all(isinstance(n, str) for n in (self.kernel, self.backend, *names)):
            raise NoKernelError("a policy names kernels and backends by text", found=(self.kernel, self.backend, names))
        object.__setattr__(self, "m", tuple(rows))
        object.__setattr__(self, "disabled", frozenset(stripped for n in names if (stripped := n.strip())))
        object.__setattr__(self, "backend", _SAME_BACKEND.get(self.backend, self.backend))

    @staticmethod
    def from_env() -> Policy:
        """The default policy with the BITLINE_* variables applied."""
        return Policy(kernel=env.kernel(), backend=env.backend(), disabled=env.disabled_kernels())

    @staticmethod
    def of(policy: Policy | str | None) -> Policy:
        """A policy as it is; None is the environment's, and `batch_invariant`, `deterministic` or both, separated by a comma,
        the environment's with these facts asked for."""
        if isinstance(policy, Policy):
            return policy
        base = Policy.from_env()
        words = [] if policy is None else [w.strip().replace("-", "_") for w in policy.split(",")]
        if unknown := [w for w in words if w not in FACTS]:
            raise NoKernelError("unknown policy", found=", ".join(map(repr, unknown)), expected=" or ".join(FACTS))
        return replace(base, **dict.fromkeys(words, True))  # type: ignore[arg-type]  # FACTS are all booleans


@dataclass(frozen=True)
class Candidate:
    """One kernel's answer: can it, why not, and the estimated seconds at each expected M (where it can run at all)."""

    name: str
    kernel: type[Kernel]
    verdict: Verdict
    supported: bool
    costs: tuple[float, ...]
    priority: int
    backend: str

    @property
    def loose(self) -> bool:
        """Its sums have no fixed order: it comes last, unless all others emulate."""
        return self.kernel.deterministic is False

    @property
    def score(self) -> float:
        """Geometric mean of the costs: a kernel that is good at decode and at prompts beats one that is good at one."""
        return math.exp(sum(map(math.log, self.costs)) / len(self.costs)) if self.costs else math.inf


@dataclass(frozen=True)
class Choice:
    """The outcome of `choose`: every candidate, best first, runnable ones before refused ones."""

    spec: LinearSpec
    platform: Platform
    policy: Policy
    candidates: tuple[Candidate, ...]
    note: str = ""

    @property
    def kernel(self) -> type[Kernel]:
        """The chosen kernel's class."""
        return self.candidates[0].kernel

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[0]

    @property
    def runner_up(self) -> Candidate | None:
        """The next kernel that could also run the layer."""
        return next((c for c in self.candidates[1:] if c.verdict), None)

    @property
    def nearest_fast(self) -> Candidate | None:
        """The fastest kernel that runs on this platform and layers of this kind, but refused this one."""
        refused = [c for c in self.candidates if c.supported and not c.verdict and c.costs]
        refused = [c for c in refused if self.spec.act is not None or not c.kernel.quantizes_input]
        # One that only the input's dtype or the policy keeps out is nearer than one that could not do the scheme at all.
        refused = [c for c in refused if _does_scheme(c.kernel, self.spec)] or refused
        return min(refused, key=lambda c: c.score, default=None)

    @property
    def degraded(self) -> bool:
        """True where a weight is emulated, unasked, although a faster kernel of this platform refused the layer: any where the
        weight is dequantized in memory, else one for such schemes."""
        near = self.nearest_fast
        asked = self.policy.kernel == self.best.name or self.policy.backend == self.best.backend
        if not self.kernel.emulates or asked or near is None or near.score >= self.best.score:
            return False
        return self.kernel.is_fallback or _does_scheme(near.kernel, self.spec)

    @property
    def lost_because(self) -> str:
        """One sentence on the runner-up: which kernel, and at which M it is how much slower."""
        other = self.runner_up
        if other is None:
            return "no other kernel can run it"
        if len(self.candidates[0].costs) != len(other.costs):
            return f"{short_name(other.name)}: not asked for"
        ratios = [(o / b, m) for o, b, m in zip(other.costs, self.best.costs, self.policy.m, strict=True)]
        ratio, m = max(ratios)
        if other.score >= self.best.score and ratio > 1.005:
            return f"{short_name(other.name)}: {ratio:.1f}x the time at M={m}"
        if other.loose and other.score < self.best.score:
            return f"{short_name(other.name)}: adds in another order at each call"
        if other.kernel.emulates and other.score < self.best.score:
            return f"{short_name(other.name)}: stands in for units that are there"
        why = "same cost, lower priority" if other.score >= self.best.score else "not asked for"
        return f"{short_name(other.name)}: {why}"

    def explain(self) -> str:
        """Every candidate in plain text: yes or no, the estimated cost at each expected M, the reason, the nearest fix."""
        lines = [f"{self.spec} on {self.platform}"]
        lines += [f"note: {self.note}"] if self.note else []
        width = max(len(c.name) for c in self.candidates)
        for i, c in enumerate(self.candidates):
            mark = "->" if i == 0 else "  "
            cost = "  ".join(f"M={m} {seconds(v)}" for m, v in zip(self.policy.m, c.costs, strict=False))
            cost += f"  ({c.kernel.cost_basis(self.platform)})" if cost else ""
            lines.append(f"{mark} {c.name:{width}}  {'yes' if c.verdict else 'no '}  {cost or '-'}")
            if not c.verdict:
                lines.append(f"     because: {c.verdict.reason}" + (f"; would run: {c.verdict.fix}" if c.verdict.fix else ""))
        if self.degraded and self.nearest_fast is not None:
            lines.append(f"degraded: {self.nearest_fast.name} would be faster; {self.nearest_fast.verdict.reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same facts for `--json`."""
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
                    "cost_basis": c.kernel.cost_basis(self.platform),
                }
                for c in self.candidates
            ],
        }  # fmt: skip


def short_name(kernel: str) -> str:
    """A kernel's class name without the ending that all share: TorchInt4Pack for TorchInt4PackLinearKernel."""
    return kernel.removesuffix("Kernel").removesuffix("Linear").removesuffix("MM")


def seconds(value: float) -> str:
    """1.2 ms, 34.0 us."""
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
) -> Choice:
    """Rank every kernel for a layer. Pure: the platform may be one that is not here, and nothing is allocated or built.

    platform: a Platform or its text form, by default this machine's CPU. policy: see Policy.of.
    kernels: by default every registered one. Raises NoKernelError where the policy leaves nothing that can run.
    Kernels are asked about the spec without `input_multiplier`, and the choice holds that spec: the layer itself multiplies.
    """
    spec = spec.replace(input_multiplier=False) if spec.input_multiplier else spec
    if platform is None:
        platform = Platform.detect()
    elif isinstance(platform, str):
        platform = Platform.parse(platform)
    policy = Policy.of(policy)
    entries = registry.entries() if kernels is None else tuple(kernels)
    check_names(policy, entries)
    candidates = [_judge(entry, spec, platform, policy) for entry in entries]
    settled = any(c.verdict and not c.loose and not c.kernel.emulates for c in candidates)
    # What stands in for units that a GPU may have comes last, unless its times were measured there.
    stands_in = lambda c: c.kernel.emulates and platform.vendor != "cpu" and c.kernel.cost_basis(platform) != "measured"
    candidates.sort(
        key=lambda c: (not c.verdict, not c.supported, settled and c.loose, stands_in(c), c.score, -c.priority, c.name)
    )
    note = ""
    asked = policy.kernel != "auto" or policy.backend != "auto"
    if asked:
        wanted = [c for c in candidates if _is_wanted(c, policy)]
        best = next((c for c in wanted if c.verdict), None)
        if best is not None:
            candidates.remove(best)
            candidates.insert(0, best)
        else:
            what = f"kernel {policy.kernel}" if policy.kernel != "auto" else f"backend {policy.backend}"
            reasons = "; ".join(f"{c.name}: {c.verdict.reason}" for c in wanted) or "it has no kernel for such layers"
            overruled = policy.batch_invariant and policy.kernel == "auto"
            if policy.strict and not overruled:
                raise NoKernelError(f"{what} cannot run {spec} on {platform}", found=reasons, expected="a kernel that can",
                                    fix="choose another, or pass strict=False to fall back")  # fmt: skip
            note = f"{what} was asked for and cannot run this layer ({reasons})"
            note += "; batch invariance overrules it" if overruled else ""
    if not candidates or not candidates[0].verdict:
        raise NoKernelError(f"no kernel is left that can run {spec} on {platform}",
                            reasons=(f"{c.name}: {c.verdict.reason}" for c in candidates),
                            fix="allow ReferenceLinearKernel, which runs everything"
                            if spec.act_dtype in Kernel.act_dtypes
                            else "use an input of bfloat16, float16 or float32")  # fmt: skip
    if candidates[0].loose and not asked:
        note = f"{candidates[0].name} adds in another order at each call; Policy(deterministic=True) takes a kernel that does not"
    return Choice(spec, platform, policy, tuple(candidates), note)


def _is_wanted(candidate: Candidate, policy: Policy) -> bool:
    if policy.kernel != "auto":
        return candidate.name == policy.kernel
    return candidate.backend == policy.backend


def check_names(policy: Policy, entries: Sequence[registry.Entry] = ()) -> None:
    """Unknown names are errors; those of registered kernels are known, also where the caller asks about some of them alone."""
    entries = (*entries, *registry.entries())
    names = {e.name for e in entries}
    if unknown := ({policy.kernel} - {"auto"} - names) | (policy.disabled - names):
        raise registry.unknown_kernels(unknown, names)
    backends = {e.kernel.backend for e in entries}
    if policy.backend not in backends | {"auto"}:
        raise NoKernelError("not registered as a kernel's backend: no kernel has it", found=policy.backend,
                            expected=", ".join(("auto", "cpu", *sorted(backends))))  # fmt: skip


def _judge(entry: registry.Entry, spec: LinearSpec, platform: Platform, policy: Policy) -> Candidate:
    kernel = entry.kernel
    verdict = (
        ask(kernel.is_supported, platform)
        if platform.vendor in entry.platforms
        else no(f"runs on {', '.join(entry.platforms)}; this platform is {platform.vendor}")
    )
    supported = bool(verdict)
    costs: tuple[float, ...] = ()
    if supported:
        verdict = _implements(kernel, spec, platform)
        costs, wrong = _costs(kernel, spec, platform, policy)
        verdict = no(f"its cost cannot be estimated: {wrong}") if wrong and verdict else verdict
    if verdict and entry.name in policy.disabled:
        verdict = no("disabled by the policy", "take it out of Policy(disabled=…) or BITLINE_DISABLED_KERNELS")
    if verdict and not kernel.exact and entry.name != policy.kernel and kernel.backend != policy.backend:
        verdict = no("it does not compute exactly what the scheme says", f"Policy(kernel={entry.name!r})")
    if verdict and policy.deterministic and not kernel.deterministic:
        verdict = no("not deterministic, and the policy asks for that")
    if verdict and policy.batch_invariant and not kernel.batch_invariant:
        verdict = no("not batch invariant, and the policy asks for that")
    return Candidate(entry.name, kernel, verdict, supported, costs, entry.priority, kernel.backend)


def ask(question: Callable[[Any], Any], about: Any) -> Verdict:
    """A kernel's answer; a refusal where it raises or gives something else, so that a plug-in's mistake costs no other kernel."""
    try:
        answer = question(about)
    except Exception as error:
        return no(f"{question.__name__} failed: {type(error).__name__}: {error}")
    return answer if isinstance(answer, Verdict) else no(f"{question.__name__} gave {answer!r}, which is no Verdict")


def _does_scheme(kernel: type[Kernel], spec: LinearSpec) -> bool:
    """True where the kernel would take the layer with an input of one of its own dtypes."""
    return any(ask(kernel.can_implement, spec.replace(act_dtype=dtype)) for dtype in kernel.act_dtypes)


def _costs(kernel: type[Kernel], spec: LinearSpec, platform: Platform, policy: Policy) -> tuple[tuple[float, ...], str]:
    """Seconds at each expected M, or why there are none."""
    try:
        costs = tuple(float(kernel.cost(spec, platform, m)) for m in policy.m)
    except Exception as error:
        return (), f"{type(error).__name__}: {error}"
    if not all(math.isfinite(c) and c > 0 for c in costs):
        return (), f"{costs} are not all finite and positive"
    return costs, ""


def _implements(kernel: type[Kernel], spec: LinearSpec, platform: Platform) -> Verdict:
    if spec.act_dtype == torch.bfloat16 and 0 < platform.capability < 80 and kernel.requires_bf16_hardware:
        return no(f"{platform.arch} has no bfloat16 units", "with input dtype float16")
    if spec.act_dtype not in kernel.act_dtypes:
        able = ", ".join(str(d).removeprefix("torch.") for d in kernel.act_dtypes)
        return no(f"input dtype {str(spec.act_dtype).removeprefix('torch.')}", f"with input dtype {able}")
    return ask(kernel.can_implement, spec)


@functools.cache
def warn_note(note: str, kernel: str) -> None:
    """One warning for each distinct request that could not be met."""
    log.warning("%s: %s is used instead", note, kernel)


@functools.cache
def warn_degraded(spec: LinearSpec, kernel: str, nearest: str, reason: str) -> None:
    """One warning for each distinct layer that falls back to the reference."""
    log.warning("%s runs on %s: %s would be faster but refuses it: %s", spec, kernel, nearest, reason)
