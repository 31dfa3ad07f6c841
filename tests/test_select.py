"""Selection: some kernel runs every layer, every refusal has a reason, and the result depends on the arguments alone."""

import json
import logging

import pytest
import torch

import bitline
from bitline import Choice, Kernel, LinearSpec, NoKernelError, Platform, Policy, choose, register_kernel, tuning, types
from bitline.errors import InputError
from bitline.kernels import registry
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.kernels.registry import Entry
from bitline.select import warn_degraded
from bitline.testing import random_spec
from bitline.types import YES, no
from thinning import thinned

SPEC = LinearSpec(64, 128, types.uint4b8, (1, 32), act_dtype=torch.bfloat16)
CPU, H100 = Platform.parse("cpu:avx512"), Platform.parse("cuda:sm90")
PLATFORMS = [
    "cpu", "cpu:avx2", "cpu:avx512", "cpu:amx", "cpu:neon", "cpu:neon,i8mm,bf16,sve", "cpu:avx512,zen,zentorch", "cuda:sm70",
    "cuda:sm75", "cuda:sm80", "cuda:sm86", "cuda:sm89", "cuda:sm90", "cuda:sm90,humming", "cuda:sm100,flashinfer",
    "cuda:sm120,humming", "rocm:gfx90a", "rocm:gfx942,aiter", "rocm:gfx1100", "rocm:gfx1201", "xpu", "xpu:vllm_xpu_kernels",
]  # fmt: skip


def kernel(name, seconds, refuses=None, unsupported=None, **facts):
    """A kernel class that costs `seconds` per call and refuses every layer or platform for which a reason is given."""
    members = {
        "is_supported": classmethod(lambda cls, platform: no(unsupported) if unsupported else YES),
        "can_implement": classmethod(lambda cls, spec: no(refuses, "the fix") if refuses else YES),
        "cost": classmethod(lambda cls, spec, platform, m: float(seconds(m) if callable(seconds) else seconds)),
        **facts,
    }
    return type(name, (Kernel,), members)


def entry(made):
    return Entry(made, made.platforms, made.priority)


REFERENCE = entry(ReferenceLinearKernel)
SLOW = entry(kernel("Slow", 2e-6, backend="tortoise"))
FAST = entry(kernel("Fast", 1e-6, backend="hare", batch_invariant=True))


def pick(*entries, policy=None, platform=CPU, spec=SPEC):
    return choose(spec, platform, policy or Policy(), kernels=[REFERENCE, *entries])


def test_a_ranking_is_kept_for_equal_arguments_only():
    asked = []

    def seconds(m):
        asked.append(m)
        return 1e-6

    counted = entry(kernel("Counted", seconds))
    first = pick(counted)
    once = len(asked)
    assert once and pick(counted).candidates == first.candidates and len(asked) == once
    assert pick(counted, policy=Policy(m=(3,))).best.costs == (1e-6,) and asked[-1] == 3
    assert pick(counted, FAST, policy=Policy(disabled=frozenset({"Counted"}))).best.name == "Fast"
    key = tuning.key_of(SPEC)
    slow = {key: tuning.LayerTimes({"Counted": {1: 1.0, 256: 1.0}, "Slow": {1: 1e-7, 256: 1e-7}})}
    entries = [REFERENCE, counted, SLOW]
    assert choose(SPEC, CPU, Policy(), kernels=entries).best.name == "Counted"
    assert choose(SPEC, CPU, Policy(), kernels=entries, measured=slow).best.name == "Slow"
    assert choose(SPEC, CPU, Policy(), kernels=entries).best.name == "Counted"
    requested = choose(SPEC, CPU, Policy(kernel="Slow"), kernels=entries)  # moves a candidate to the front
    assert requested.best.name == "Slow" and choose(SPEC, CPU, Policy(), kernels=entries).best.name == "Counted"


@pytest.mark.parametrize("part", thinned(range(4), 2))
def test_no_spec_on_any_platform_is_a_dead_end(part):
    policy = Policy()
    platforms = [Platform.parse(text) for text in PLATFORMS]
    for seed in range(part, 2000, 4):
        spec = random_spec(seed)
        for platform in platforms[seed % 3 :: 3]:
            choice = choose(spec, platform, policy)
            assert choice.best.verdict and len(choice.candidates) == len(registry.entries())
            for c in choice.candidates:
                assert c.verdict or c.verdict.reason.strip(), (c.name, spec.key)
                assert all(cost > 0 for cost in c.costs) and len(c.costs) in (0, len(policy.m))
            ok = [bool(c.verdict) for c in choice.candidates]
            assert ok == sorted(ok, reverse=True)


def test_the_cheapest_wins_and_the_rest_is_ranked():
    refused = entry(kernel("Refuses", 1e-9, refuses="never"))
    choice = pick(SLOW, refused, FAST)
    assert [c.name for c in choice.candidates][:2] == ["Fast", "Slow"]
    assert choice.candidates[-1].name == "Refuses" and choice.kernel is FAST.kernel and choice.runner_up.name == "Slow"


def test_the_ranking_is_over_all_batch_sizes_of_the_policy():
    decode = entry(kernel("Decode", lambda m: 1e-6 if m == 1 else 9e-6))
    prompt = entry(kernel("Prompt", lambda m: 4e-6 if m == 1 else 4.1e-6))
    assert pick(decode, prompt, policy=Policy(m=(1,))).best.name == "Decode"
    assert pick(decode, prompt, policy=Policy(m=(256,))).best.name == "Prompt"
    both = pick(decode, prompt, policy=Policy(m=(1, 256)))
    assert both.best.name == "Decode" and both.best.score == pytest.approx(1e-6 + 9e-6 / 256)
    assert "4.0x the time at M=1" in both.lost_because


def test_the_score_is_the_time_of_a_workload_with_as_many_tokens_at_each_m():
    answer = entry(kernel("Answer", lambda m: 1e-6 if m == 1 else 200e-6))
    prompt = entry(kernel("Prompt", lambda m: 2e-6 if m == 1 else 10e-6))
    assert pick(answer, prompt).best.name == "Answer"  # 256 + 200 us for 256 tokens of each, against 512 + 10 us
    costly = entry(kernel("Answer", lambda m: 1e-6 if m == 1 else 300e-6))
    assert pick(costly, prompt).best.name == "Prompt"
    assert pick(costly, prompt).best.score == pytest.approx((512e-6 + 10e-6) / 256)
    assert "per token 2.0 us" in pick(costly, prompt).explain() and "per token" not in pick(costly, policy=Policy(m=1)).explain()


def test_priority_breaks_ties_only():
    first, second = kernel("Aaa", 1e-6), kernel("Bbb", 1e-6, priority=5)
    assert pick(entry(first), entry(second)).best.name == "Bbb"
    assert "lower priority" in pick(entry(first), entry(second)).lost_because
    assert pick(entry(second), FAST, entry(kernel("Quick", 1e-7))).best.name == "Quick"
    assert pick(entry(first), entry(kernel("Zzz", 1e-6))).best.name == "Aaa"


def test_a_forced_kernel():
    choice = pick(SLOW, FAST, policy=Policy(kernel="Slow"))
    assert choice.best.name == "Slow" and not choice.note and "not asked for" in choice.lost_because
    assert pick(SLOW, FAST, policy=Policy(kernel="ReferenceLinearKernel")).best.name == "ReferenceLinearKernel"


def test_a_forced_kernel_that_cannot():
    refuses = entry(kernel("Refuses", 1e-9, refuses="K is odd"))
    with pytest.raises(NoKernelError, match=r"Refuses.*K is odd"):
        pick(FAST, refuses, policy=Policy(kernel="Refuses"))
    soft = pick(FAST, refuses, policy=Policy(kernel="Refuses", strict=False))
    assert soft.best.name == "Fast" and "K is odd" in soft.note and "K is odd" in soft.explain()
    wrong_place = entry(kernel("Gpu", 1e-9, platforms=("cuda",)))
    with pytest.raises(NoKernelError, match="this platform is cpu"):
        pick(FAST, wrong_place, policy=Policy(kernel="Gpu"))
    assert pick(wrong_place, policy=Policy(kernel="Gpu"), platform=H100).best.name == "Gpu"


def test_a_forced_backend():
    assert pick(SLOW, FAST, policy=Policy(backend="tortoise")).best.name == "Slow"
    refuses = entry(kernel("Refuses", 1e-9, refuses="K is odd", backend="snail"))
    with pytest.raises(NoKernelError, match=r"backend snail.*K is odd"):
        pick(FAST, refuses, policy=Policy(backend="snail"))
    assert pick(FAST, refuses, policy=Policy(backend="snail", strict=False)).best.name == "Fast"
    assert pick(SLOW, FAST, policy=Policy(backend="reference")).best.name == "ReferenceLinearKernel"


def test_disabled_kernels():
    choice = pick(SLOW, FAST, policy=Policy(disabled=frozenset({"Fast"})))
    assert choice.best.name == "Slow"
    fast = next(c for c in choice.candidates if c.name == "Fast")
    assert not fast.verdict and "disabled" in fast.verdict.reason
    with pytest.raises(NoKernelError, match="no kernel is left") as caught:
        pick(FAST, policy=Policy(disabled=frozenset({"Fast", "ReferenceLinearKernel"})))
    assert "Fast: disabled" in str(caught.value) and "ReferenceLinearKernel: disabled" in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(kernel="Fsat"), "Fsat.*Fast"), (Policy(disabled=frozenset({"Fast", "Fsat"})), "found Fsat.*Fast"),
        (Policy(backend="hair"), "hair.*hare"),
    ],
)  # fmt: skip
def test_unknown_names_are_errors_that_list_the_known(policy, words):
    with pytest.raises(NoKernelError, match=words):
        pick(FAST, policy=policy)


def test_facts_that_a_policy_asks_for():
    assert pick(SLOW, FAST, policy=Policy(batch_invariant=True)).best.name == "Fast"
    dice = entry(kernel("Dice", 1e-9, deterministic=False))
    unasked = pick(FAST, dice, SLOW)
    assert [c.name for c in unasked.candidates] == ["Fast", "Slow", "ReferenceLinearKernel", "Dice"] and not unasked.note
    assert pick(FAST, dice, policy=Policy(kernel="Dice")).best.name == "Dice"
    two = choose(SPEC, CPU, Policy(), kernels=[FAST, dice])
    assert two.best.name == "Fast" and "reduction order varies" in two.lost_because
    emulation = entry(kernel("Emulation", 1e-3, emulates=True))
    assert pick(emulation, dice).best.name == "Dice" and "reduction order varies" in pick(emulation, dice).note
    with pytest.raises(NoKernelError, match="deterministic"):
        pick(FAST, dice, policy=Policy(kernel="Dice", deterministic=True))
    unknown = entry(kernel("Unknown", 1e-9, deterministic=None))
    assert pick(FAST, unknown).best.name == "Unknown"
    sure = pick(FAST, unknown, policy=Policy(deterministic=True))
    assert sure.best.name == "Fast" and "deterministic" in sure.candidates[-1].verdict.reason
    with pytest.raises(NoKernelError, match="batch invariant"):
        choose(SPEC, CPU, Policy(batch_invariant=True), kernels=[SLOW])


def test_input_dtypes_are_a_fact():
    half = entry(kernel("Half", 1e-9, act_dtypes=(torch.float16,)))
    choice = pick(half)
    refusal = next(c for c in choice.candidates if c.name == "Half").verdict
    assert "bfloat16" in refusal.reason and "float16" in refusal.fix
    assert pick(half, spec=SPEC.replace(act_dtype=torch.float16)).best.name == "Half"


@pytest.mark.parametrize("m", [(), (0,), (1, -1)])
def test_batch_sizes_must_be_positive(m):
    with pytest.raises(NoKernelError, match="batch sizes"):
        Policy(m=m)


def test_degraded_is_when_a_faster_kernel_refused(caplog):
    refuses = entry(kernel("Refuses", 1e-9, refuses="K is odd"))
    choice = pick(refuses)
    assert choice.degraded and choice.nearest_fast.name == "Refuses"
    assert "degraded: Refuses would be faster; K is odd" in choice.explain()
    assert not pick(FAST, refuses).degraded
    assert not pick(entry(kernel("Elsewhere", 1e-9, unsupported="needs a GPU"))).degraded
    assert not pick(entry(kernel("SlowAndRefuses", 99.0, refuses="K is odd"))).degraded
    assert not choose(SPEC, CPU, Policy(), kernels=[REFERENCE]).degraded
    warn_degraded.cache_clear()
    with caplog.at_level(logging.WARNING, "bitline"):
        for _ in range(3):
            warn_degraded(SPEC, "ReferenceLinearKernel", "Refuses", "K is odd")
    assert len(caplog.records) == 1 and "Refuses" in caplog.text and "K is odd" in caplog.text


def test_explain_lists_every_candidate_with_its_reason():
    text = pick(
        SLOW, entry(kernel("Refuses", 1e-9, refuses="K is odd")), entry(kernel("Gpu", 1e-9, platforms=("cuda",)))
    ).explain()
    lines = text.splitlines()
    assert "[64, 128] uint4b8 g32" in lines[0] and str(CPU) in lines[0]
    assert lines[1].startswith("-> Slow") and "M=1 2.0 us" in lines[1] and "M=256 2.0 us" in lines[1]
    assert "because: K is odd; would run: the fix" in text and "runs on cuda; this platform is cpu" in text
    assert all(name in text for name in ("ReferenceLinearKernel", "Refuses", "Gpu"))


def test_to_dict_is_json():
    facts = json.loads(json.dumps(pick(SLOW, entry(kernel("Refuses", 1e-9, refuses="K is odd"))).to_dict()))
    assert facts["kernel"] == "Slow" and facts["shape"] == [64, 128] and LinearSpec.parse(facts["spec"]) == SPEC
    assert Platform.parse(facts["platform"]) == CPU and facts["degraded"] is False
    by_name = {c["kernel"]: c for c in facts["candidates"]}
    assert by_name["Refuses"]["reason"] == "K is odd" and by_name["Refuses"]["fix"] == "the fix" and not by_name["Refuses"]["ok"]
    assert by_name["Slow"]["cost_seconds"] == {"1": 2e-6, "256": 2e-6}


# ---- defaults and environment ------------------------------------------------------------------------------------------


def test_environment_variables_make_the_default_policy(monkeypatch):
    assert Policy.from_env() == Policy()
    monkeypatch.setenv("BITLINE_KERNEL", " ReferenceLinearKernel ")
    assert choose(SPEC).best.name == "ReferenceLinearKernel"
    assert choose(SPEC, CPU, Policy(), kernels=[REFERENCE, FAST]).best.name == "Fast"  # an argument wins
    monkeypatch.setenv("BITLINE_KERNEL", "NotThere")
    with pytest.raises(NoKernelError, match="NotThere"):
        choose(SPEC)
    monkeypatch.setenv("BITLINE_KERNEL", "")
    monkeypatch.setenv("BITLINE_DISABLED_KERNELS", "A, B,,")
    assert Policy.from_env().disabled == {"A", "B"}
    monkeypatch.delenv("BITLINE_DISABLED_KERNELS")
    monkeypatch.setenv("BITLINE_BACKEND", "reference")
    assert choose(SPEC).best.name == "ReferenceLinearKernel"


def test_the_default_platform_is_this_cpu_and_text_is_accepted():
    assert choose(SPEC).platform == Platform.detect("cpu")
    assert choose(SPEC, "cuda:sm90").platform == H100


def test_choose_is_pure(monkeypatch):
    before = (registry.entries(), torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype())
    first = choose(SPEC, H100, Policy())
    monkeypatch.setenv("BITLINE_KERNEL", "NotThere")  # with a policy given, no variable is read
    second = choose(SPEC, H100, Policy())
    assert isinstance(first, Choice) and first == second
    after = (registry.entries(), torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype())
    assert before[0] == after[0] and torch.equal(before[1], after[1]) and before[2:] == after[2:]


# ---- registration ------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Registers kernels for one test."""
    names = []

    def add(made, *args, **kwargs):
        register_kernel(made, *args, **kwargs)
        names.append(made.__name__)
        return made

    yield add
    for name in set(names):
        registry.unregister_kernel(name)


def test_a_registered_kernel_takes_part(registered):
    made = registered(kernel("Plugin", 1e-12))
    assert choose(SPEC, CPU, Policy()).kernel is made and choose(SPEC, "xpu", Policy()).kernel is made
    assert registry.kernel_by_name("Plugin") is made


def test_a_platform_filter(registered):
    registered(kernel("Plugin", 1e-12), platform="cuda")
    assert choose(SPEC, H100, Policy()).best.name == "Plugin"
    assert choose(SPEC, CPU, Policy()).best.name != "Plugin"
    with pytest.raises(NoKernelError, match="tpu"):
        register_kernel(kernel("Other", 1.0), platform="tpu")


def test_a_priority_given_at_registration_wins(registered):
    registered(kernel("Aaa", 1e-12))
    registered(kernel("Bbb", 1e-12), priority=7)
    assert choose(SPEC, CPU, Policy()).best.name == "Bbb"


def test_a_taken_name(registered):
    first = registered(kernel("Plugin", 1e-12))
    registered(first)  # the same class again is no conflict
    with pytest.raises(NoKernelError, match="Plugin is registered already"):
        register_kernel(kernel("Plugin", 1e-13))
    second = registered(kernel("Plugin", 1e-13), replace=True)
    assert choose(SPEC, CPU, Policy()).kernel is second


def test_unknown_registered_names():
    with pytest.raises(NoKernelError, match="Nobody"):
        registry.unregister_kernel("Nobody")
    with pytest.raises(NoKernelError, match=r"Nobody.*LinearKernel"):
        registry.kernel_by_name("Nobody")


def test_plugins_of_installed_packages(monkeypatch):
    class Point:
        def __init__(self, name, load):
            self.name, self.value, self.load = name, "a_package:thing", load

    def broken():
        raise ImportError("no such module")

    def function():
        return lambda: register_kernel(kernel("FromFunction", 1.0))

    points = [Point("good", lambda: kernel("FromClass", 1.0)), Point("bad", broken), Point("called", function)]
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points if group == "bitline.kernels" else [])
    monkeypatch.setattr(registry, "_entries", {})
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry, "plugin_failures", {})
    names = {e.name: e.source for e in registry.entries()}
    assert names["FromClass"] == "good" and "FromFunction" in names and "ReferenceLinearKernel" in names
    assert registry.plugin_failures == {"bad": "ImportError: no such module"}


def test_a_kernel_that_quantizes_activations_is_not_the_nearest_fast_one_of_a_weight_only_layer():
    spec = LinearSpec(4096, 4096, types.int8, (1, 32), act_dtype=torch.float32)
    choice = choose(spec, "cpu:avx512_bf16")
    refused = {c.name: c for c in choice.candidates if not c.verdict}
    assert refused["TorchInt8ScaledMMLinearKernel"].kernel.quantizes_input
    assert choice.nearest_fast is None or not choice.nearest_fast.kernel.quantizes_input


@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 576), (4096, 4096), (49152, 576)])
@pytest.mark.parametrize("platform", ["cuda:sm80", "cuda:sm90", "rocm:gfx942", "rocm:gfx1100", "xpu"])
def test_a_gpu_does_not_dequantize_a_small_layer_at_every_call(platform, n, k):
    spec = LinearSpec(n, k, types.uint4, (1, 32), zero="float", act_dtype=torch.bfloat16)
    assert choose(spec, platform).best.name == "TritonW4A16LinearKernel"


def test_a_kernel_with_an_invalid_cost_is_refused_and_selection_goes_on():
    def costing(answer):
        def cost(cls, spec, platform, m):
            return answer() if callable(answer) else answer

        members = {"can_implement": classmethod(lambda cls, spec: YES), "cost": classmethod(cost)}
        return type("Odd", (Kernel,), members)

    for answer in (0, -1.0, float("nan"), float("inf"), "fast", lambda: 1 / 0):
        odd = costing(answer)
        choice = choose(SPEC, CPU, kernels=[*registry.entries(), Entry(odd, ("cpu",), 99)])
        refused = next(c for c in choice.candidates if c.name == "Odd")
        assert choice.best.name != "Odd" and "cost cannot be estimated" in refused.verdict.reason


def test_the_nearest_fast_kernel_is_one_that_could_do_the_scheme():
    choice = choose(LinearSpec(96, 256, types.uint4b8, (1, 128), act_dtype=torch.float16), "cpu:avx512_bf16")
    assert choice.nearest_fast.name == "TorchInt4PackLinearKernel" and "float16" in choice.nearest_fast.verdict.reason


@pytest.mark.parametrize("changes", [{"m": 0}, {"m": ()}, {"m": ("1",)}, {"kernel": None}, {"disabled": [3]}])
def test_a_policy_of_wrong_types_is_refused(changes):
    with pytest.raises(bitline.NoKernelError):
        Policy(**changes)


def test_a_policy_accepts_a_single_batch_size_and_a_single_name():
    assert Policy(m=4).m == (4,) and Policy(disabled="X").disabled == {"X"} and Policy(disabled=["X"]).disabled == {"X"}


def test_many_threads_see_every_kernel():
    import subprocess
    import sys

    code = (
        "import sys, threading; sys.setswitchinterval(1e-6)\n"
        "import bitline\nfrom bitline import types\n"
        "from bitline.types import LinearSpec\n"
        "spec = LinearSpec(64, 128, types.uint4b8, (1, 32)); found = []\n"
        "ask = lambda: found.append(bitline.choose(spec, 'cpu:avx512_bf16').best.name)\n"
        "threads = [threading.Thread(target=ask) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(sorted(set(found)), len(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "['CPUWNA16LinearKernel'] 8", done.stdout + done.stderr


def test_explain_says_which_costs_are_measured_and_which_are_modelled():
    spec = LinearSpec(4096, 4096, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
    here = bitline.choose(spec, "cuda:sm90,humming", Policy())
    rows = {c["kernel"]: c for c in here.to_dict()["candidates"] if c["cost_seconds"]}
    assert {rows[n]["cost_basis"] for n in ("GluonHopperLinearKernel", "HummingLinearKernel")} == {"measured"}
    assert rows["ReferenceLinearKernel"]["cost_basis"] == "modelled"
    for line in here.explain().splitlines():
        name = next((n for n in rows if f" {n} " in line), None)
        assert name is None or line.endswith(f"({rows[name]['cost_basis']})")
    elsewhere = bitline.choose(spec, "cuda:sm80,humming", Policy()).to_dict()["candidates"]
    assert all(c["cost_basis"] == "modelled" for c in elsewhere)


def test_choose_wants_a_spec():
    with pytest.raises(InputError, match="LinearSpec"):
        choose("W4A16")


def test_a_cheaper_candidate_that_lost_has_its_reason():
    """Emulation with a lower modelled time than a kernel of the GPU ranks behind it, and `explain` says why."""
    spec = LinearSpec(256, 256, types.float4_e2m1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(256, 256))
    found = []
    for platform in ("cuda:sm100", "cuda:sm90", "cuda:sm75", "rocm:gfx942", "cpu:avx512"):
        choice = choose(spec, platform)
        cheaper = [c for c in choice.candidates[1:] if c.verdict and c.score < choice.best.score]
        assert all(choice.ranks_behind(c) for c in cheaper)
        assert choice.explain().count("ranks behind") == len(cheaper)
        found += cheaper
        assert not any(choice.ranks_behind(c) for c in choice.candidates if c.verdict and c not in cheaper)
    requested = choose(spec, "cpu:avx512", Policy("ReferenceLinearKernel"))
    cheaper = [c for c in requested.candidates[1:] if c.verdict and c.score < requested.best.score]
    assert cheaper and all(requested.ranks_behind(c) == "not asked for" for c in cheaper)
    assert "ranks behind: not asked for" in requested.explain()


@pytest.mark.parametrize(("arch", "other"), [("sm999", "sm121"), ("sm61", "sm70"), ("gfx9999", "gfx1201")])
def test_rates_of_unknown_chips_are_called_guesses(arch, other):
    vendor = "rocm" if arch.startswith("gfx") else "cuda"
    platform = Platform.parse(f"{vendor}:{arch}")
    assert arch in platform.rates_note and other in platform.rates_note and "guesses" in platform.rates_note
    assert platform.rates == Platform.parse(f"{vendor}:{other}").rates
    assert platform.rates_note in choose(random_spec(0), platform).explain()
    assert not Platform.parse("cuda:sm90").rates_note and not Platform.parse("cpu").rates_note
