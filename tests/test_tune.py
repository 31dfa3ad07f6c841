"""Timing of kernels with a fake clock, `bitline tune`, and load_model(tune=True). No test depends on how long anything takes."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import bitline
from bitline import LinearSpec, Platform, Policy, choose, timing, tuning, types
from bitline.errors import InputError
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.model import tune as tuner
from bitline.model.merge_weights import merged_spec
from bitline.model.merged_specs import is_faster
from command import bitline as command
from test_cli_explain import documented, keys, text
from test_select import entry
from tiny import compressed, llama

SPEC = LinearSpec(64, 128, types.uint4b8, (1, 32), act_dtype=torch.float32)
BIG = SPEC.replace(n=128)
HERE = Platform.detect("cpu")
REFERENCE = Policy(kernel="ReferenceLinearKernel")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BITLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BITLINE_NO_TUNED", raising=False)
    monkeypatch.setattr(tuning, "_known", {})


class Clock:
    """A clock that only kernels advance."""

    def __init__(self):
        self.now, self.calls = 100.0, []

    def __call__(self):
        return self.now

    def kernel(self, name, seconds, estimate=1.0, result=lambda y: y, pack=None):
        """A kernel that takes `seconds` of M by this clock, and computes the reference's result, or something else."""
        clock = self

        def apply(cls, x, packed, bias, spec):
            clock.calls.append((name, x.shape[0]))
            clock.now += seconds(x.shape[0]) if callable(seconds) else seconds
            return result(ReferenceLinearKernel.apply(x, packed, bias, spec))

        members = {"apply": classmethod(apply), "cost": classmethod(lambda cls, spec, platform, m: estimate)}
        members |= {"pack": classmethod(pack)} if pack else {}
        return entry(type(name, (ReferenceLinearKernel,), members))

    def tune(self, *kernels, specs=None, seconds=1000.0, **options):
        return tuner.tune(specs or {SPEC: 1}, "cpu", Policy(), seconds, kernels=kernels, clock=self, **options)


def rows(layer):
    return {row.kernel: row for row in layer.kernels}


def test_the_faster_kernel_is_chosen_from_then_on():
    clock = Clock()
    kernels = [clock.kernel("Wishful", 3.0, estimate=1e-6), clock.kernel("Modest", lambda m: 1.0 + m / 256, estimate=1e-3)]
    assert choose(SPEC, HERE, Policy(), kernels=kernels).best.name == "Wishful"
    report = clock.tune(*kernels, seconds=1e5)
    (layer,) = report.layers
    assert (layer.status, layer.before, layer.kernel) == ("measured", "Wishful", "Modest")
    assert rows(layer)["Modest"].seconds == {1: pytest.approx(1 + 1 / 256), 256: pytest.approx(2.0)}
    assert rows(layer)["Wishful"].estimate == {1: 1e-6, 256: 1e-6} and report.file == tuning.path_of(HERE)
    chosen = choose(SPEC, HERE, Policy(), kernels=kernels)
    assert chosen.best.name == "Modest" and chosen.best.measured_here
    turns = [name for name, m in clock.calls if m == 1]
    assert turns[:4] == ["Wishful"] * 2 + ["Modest"] * 2  # the check and one call
    rounds = {tuple(turns[i : i + 2]) for i in range(4, len(turns), 2)}
    assert rounds == {("Wishful", "Modest"), ("Modest", "Wishful")}  # each in every round, in changing order


def test_a_kernel_far_behind_is_called_once_for_its_time():
    clock = Clock()
    report = clock.tune(clock.kernel("Quick", 1.0, estimate=1e-6), clock.kernel("Snail", 11.0), seconds=1e5)
    assert [m for name, m in clock.calls if name == "Snail"] == [1, 1, 256, 256]  # one is the check
    snail = rows(report.layers[0])["Snail"]
    assert snail.status == "slow" and snail.seconds == {1: 11.0, 256: 11.0}
    clock.calls.clear()
    report = clock.tune(clock.kernel("Snail", 11.0, estimate=1e-6), clock.kernel("Quick", 1.0), seconds=1e5)
    assert len([1 for name, _ in clock.calls if name == "Snail"]) == 4  # and in no round
    assert rows(report.layers[0])["Snail"].status == "slow"


@pytest.mark.parametrize("limit", [1.0, 7.0, 50.0, 333.0])
def test_the_time_limit_holds(limit):
    clock = Clock()
    kernels = [clock.kernel(name, seconds, estimate=seconds) for name, seconds in (("A", 1.0), ("B", 2.0), ("C", 5.0))]
    report = clock.tune(*kernels, specs={SPEC: 1, BIG: 4}, seconds=limit)
    longest_call = 5.0
    assert report.seconds <= limit + 2 * longest_call and report.seconds == clock.now - 100.0
    assert [layer.spec for layer in report.layers] == [BIG, SPEC]  # the most weights first


def test_what_is_not_reached_keeps_its_estimates_and_the_report_says_so():
    clock = Clock()
    kernels = [clock.kernel("A", 10.0, estimate=1e-6), clock.kernel("B", 1.0, estimate=1e-3)]
    report = clock.tune(*kernels, specs={BIG: 9, SPEC: 1}, seconds=60.0)
    first, second = report.layers
    assert first.status == second.status == "partly"
    assert rows(first)["A"].status == "partly" and rows(first)["A"].seconds == {1: 10.0}
    assert rows(first)["B"].status == "measured" and first.kernel == "A"  # by its estimates, since only some M are measured
    clock = Clock()
    late = clock.tune(
        clock.kernel("A", 100.0, estimate=1e-6), clock.kernel("B", 1.0, estimate=1e-3), specs={BIG: 9, SPEC: 1}, seconds=1.0
    )
    assert late.layers[1].status == "not reached" and not any(row.seconds for row in late.layers[1].kernels)
    assert late.layers[1].kernel == late.layers[1].before == "A"


def test_times_do_not_lose_against_another_kernel_s_estimate():
    clock = Clock()
    kernels = [clock.kernel("A", 10.0, estimate=1.0), clock.kernel("B", 10.0, estimate=1.5)]
    (layer,) = clock.tune(*kernels, seconds=65.0).layers
    assert rows(layer)["A"].status == "measured" and rows(layer)["B"].status == "partly"
    assert layer.status == "partly" and layer.kernel == layer.before == "A" and tuning.load(HERE) == {}
    assert choose(SPEC, HERE, Policy(), kernels=kernels).best.name == "A"
    assert clock.tune(*kernels, seconds=1e4).layers[0].status == "measured" and tuning.load(HERE)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda y: y * 1.5, "largest error"), (lambda y: y * float("nan"), "largest error"), (lambda y: y[:, :3], "shape"),
        (lambda y: y.half(), "dtype"), (lambda y: 1 / 0, "ZeroDivisionError"), (lambda y: None, "shape"),
    ],
)  # fmt: skip
def test_a_kernel_that_fails_is_recorded_and_never_preferred(result, words):
    clock = Clock()
    kernels = [clock.kernel("Wrong", 1e-3, estimate=1e-9, result=result), clock.kernel("Right", 1.0)]
    assert choose(SPEC, HERE, Policy(), kernels=kernels).best.name == "Wrong"
    (layer,) = clock.tune(*kernels).layers
    assert rows(layer)["Wrong"].status == "failed" and words in rows(layer)["Wrong"].reason and not rows(layer)["Wrong"].seconds
    assert layer.kernel == "Right" and rows(layer)["Right"].status == "measured"  # and not slow compared with a wrong result
    assert choose(SPEC, HERE, Policy(), kernels=kernels).best.name == "Right"


def test_a_kernel_that_cannot_be_timed_keeps_its_estimate():
    def refuse(error):
        def pack(cls, weight):
            raise error

        return pack

    for error in (InputError("not these values"), MemoryError(), RuntimeError("can't allocate memory")):
        clock = Clock()
        kernels = [clock.kernel("Picky", 1.0, estimate=1e-9, pack=refuse(error)), clock.kernel("Other", 1.0)]
        (layer,) = clock.tune(*kernels).layers
        assert rows(layer)["Picky"].status == "skipped" and layer.kernel == "Picky" and layer.status == "measured"
        assert not tuning.load(HERE)[tuning.key_of(SPEC)].failed


def test_known_layers_are_measured_again_only_if_asked():
    clock = Clock()
    kernels = [clock.kernel("A", 1.0), clock.kernel("B", 2.0)]
    clock.tune(*kernels)
    clock.calls.clear()
    (layer,) = clock.tune(*kernels, again=False).layers
    assert layer.status == "known" and not clock.calls and rows(layer)["B"].seconds == {1: 2.0, 256: 2.0}
    assert clock.tune(*kernels).layers[0].status == "measured" and clock.calls


def test_progress_ends_at_the_total():
    clock, seen = Clock(), []
    kernels = [clock.kernel("A", 1.0), clock.kernel("B", 2.0)]
    clock.tune(*kernels, specs={SPEC: 1, BIG: 1}, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4, 4) and seen == sorted(seen)


def test_small_weights_are_timed_in_copies_that_the_cache_cannot_hold(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 17)
    read = []

    class Watched(ReferenceLinearKernel):
        @classmethod
        def apply(cls, x, packed, bias, spec):
            read.append(packed[0].data_ptr())
            return super().apply(x, packed, bias, spec)

    clock = Clock()
    tuner.tune({SPEC: 1}, "cpu", Policy(), 1e3, kernels=[entry(Watched), clock.kernel("B", 1e-9)], clock=clock)
    packed = sum(t.nbytes for t in Watched.pack(bitline.testing.random_weight(SPEC)).values())
    assert len(set(read)) == math.ceil((1 << 18) / packed) and read[1] != read[0]
    assert timing.cache_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "60", None])
def test_the_limit_is_a_positive_number(seconds):
    with pytest.raises(InputError, match="time limit"):
        tuner.tune({SPEC: 1}, seconds=seconds)


def test_real_kernels_pass_their_check():
    for spec in (SPEC, bitline.LinearSpec(96, 64, types.int8, (1, 64), act=bitline.ActSpec(types.int8), act_dtype=torch.float32)):
        (layer,) = tuner.tune({spec: 1}, "cpu", Policy(m=(1, 3)), 30.0).layers
        assert not [row for row in layer.kernels if row.status == "failed"] and any(row.seconds for row in layer.kernels)


# ---- models and the command ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return compressed(tmp_path_factory.mktemp("tiny"), llama())[0]


def test_load_model_tunes_what_is_not_known(folder, monkeypatch):
    asked = []
    real = tuner.tune
    monkeypatch.setattr(
        tuner, "tune", lambda specs, *args, **options: asked.append((specs, args, options)) or real(specs, *args, **options)
    )
    plain = bitline.load_model(folder, dtype=torch.float32)
    assert not asked and not any(m.choice.best.measured_here for _, m in quant_linears(plain))
    model = bitline.load_model(folder, dtype=torch.float32, tune=20)
    (specs, args, options), *_ = asked
    assert args[-1] == 20 and options == {"again": False} and sum(specs.values()) == 14 and len(specs) == 4
    chosen = [module.choice for _, module in quant_linears(model)]
    assert chosen and all(any(c.measured_here for c in choice.candidates) for choice in chosen)
    assert bitline.load_model(folder, dtype=torch.float32, tune=True) and asked[1][1][-1] == tuner.DEFAULT_SECONDS
    with pytest.raises(InputError, match="time limit"):
        bitline.load_model(folder, tune=-1)


def test_load_model_tunes_merged_layers_and_not_their_parts(folder, monkeypatch):
    asked = []
    real = tuner.tune
    monkeypatch.setattr(tuner, "tune", lambda specs, *args, **options: asked.append(specs) or real(specs, *args, **options))
    model = bitline.load_model(folder, dtype=torch.float32, policy=REFERENCE, tune=20, merge=True)
    layers = [module for _, module in quant_linears(model)]
    assert len(layers) == 8 and dict(Counter(module.spec for module in layers)) == asked[0]
    assert all(module.choice.best.measured_here for module in layers)


def test_the_layers_that_a_merged_model_runs(folder):
    checkpoint = bitline.open_checkpoint(folder)
    apart = tuner.specs_of(checkpoint, torch.float32)
    assert tuner.specs_to_run(checkpoint, torch.float32, "cpu") == apart  # where load_model does not merge by default
    assert tuner.specs_to_run(checkpoint, torch.float32, "cpu", REFERENCE, False) == apart
    names = [name for names in tuner.specs_to_run(checkpoint, torch.float32, "cpu", REFERENCE, True).values() for name in names]
    assert sorted(names) == sorted(
        f"model.layers.{i}.{leaf}"
        for i in range(2)
        for leaf in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    )


def records(spec, names):
    return SimpleNamespace(layers=lambda: [SimpleNamespace(name=name, spec=spec) for name in names])


@pytest.mark.parametrize(
    "spec",
    [
        SPEC.replace(act_order=True), SPEC.replace(input_multiplier=True),
        LinearSpec(64, 128, types.int8, (1, 128), act=bitline.ActSpec(types.int8, False, "tensor")),
        LinearSpec(64, 128, types.float4_e2m1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(64, 128)),
    ],
    ids=["order", "multiplier", "static", "global scale"],
)  # fmt: skip
def test_parts_whose_values_may_differ_are_tuned_too(spec):
    names = ["mlp.gate_proj", "mlp.up_proj"]
    found = tuner.specs_to_run(records(spec, names), torch.float32, "cpu", REFERENCE, True)
    part, whole = (s.replace(act_dtype=torch.float32, input_multiplier=False) for s in (spec, merged_spec([spec, spec])))
    assert found == {part: names, whole: ["mlp.gate_up_proj"]}


def test_experts_and_names_of_gguf_files():
    names = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"]
    found = tuner.specs_to_run(records(SPEC, names), torch.float32, "cpu", REFERENCE, True)
    assert found == {SPEC: names[2:], SPEC.replace(n=128): ["blk.0.ffn_gate+ffn_up"]}


def test_what_is_merged_does_not_depend_on_measured_times():
    """Else tuning merged layers could leave them apart, as layers that were not tuned."""
    assert is_faster(BIG, [SPEC, SPEC], HERE, Policy())
    apart = 2 * choose(SPEC, HERE, Policy()).best.estimated_score
    tuning.save(HERE, {tuning.key_of(BIG): tuning.LayerTimes({"ReferenceLinearKernel": {1: 1e-8, 256: 1e-8}})})
    best = choose(BIG, HERE, Policy()).best
    assert best.name == "ReferenceLinearKernel" and best.estimated_score > apart
    assert is_faster(BIG, [SPEC, SPEC], HERE, Policy())


def quant_linears(model):
    from bitline.model.plan import quant_linears

    return list(quant_linears(model))


def test_the_command(folder, tmp_path):
    done = command("tune", folder, "--seconds", 20, "--m", "1,3", "--json", BITLINE_CACHE=str(tmp_path), BITLINE_NO_TUNED="0")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["m"] == [1, 3] and len(report["plans"]) == 4 and sum(p["layers"] for p in report["plans"]) == 14
    measured = [c for p in report["plans"] for c in p["candidates"] if c["status"] in ("measured", "slow")]
    assert measured and all(list(c["measured_seconds"]) == ["1", "3"] for c in measured)
    assert keys(report) == documented("tune")
    assert str(tmp_path) in report["file"] and len(list((tmp_path / "tuned").iterdir())) == 1
    explained = command("explain", folder, "--m", "1,3", BITLINE_CACHE=str(tmp_path), BITLINE_NO_TUNED="0")
    assert explained.returncode == 0 and "measured here" in explained.stdout and "but for those measured here" in explained.stdout
    plain = command("explain", folder, "--m", "1,3", "--json", BITLINE_CACHE=str(tmp_path), BITLINE_NO_TUNED="1")
    assert not any(c["measured_here"] for p in json.loads(plain.stdout)["plans"] for c in p["candidates"])


def test_the_command_on_a_shape(tmp_path):
    options = {"BITLINE_CACHE": str(tmp_path), "BITLINE_NO_TUNED": "0"}
    done = command("tune", "--shape", "64x128", "--scheme", "w8a16", "--dtype", "float32", "--m", 1, "--seconds", 20, **options)
    assert done.returncode == 0 and "64×128" in done.stdout and str(tmp_path) in done.stdout.replace("\n", ""), done.stderr
    assert "Reference" in done.stdout and "estimated" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either a model or --shape"), (["x", "--shape", "1x1"], "either a model or --shape"),
        (["--shape", "64"], "as in 4096x11008"), (["--shape", "0x4"], "as in 4096x11008"),
        (["--shape", "64x64", "--scheme", "W9"], "unknown scheme"), (["--shape", "64x64", "--seconds", "0"], "positive number"),
        (["--shape", "64x64", "--m", "0"], "whole numbers"), (["--shape", "64x64", "--device", "toaster"], "not a device"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)  # fmt: skip
def test_usage_errors(words, message):
    done = command("tune", *words)
    assert done.returncode == 2 and message in " ".join((done.stderr + done.stdout).split()), done.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_at_every_width(width):
    from bitline.cli import tune as cli

    clock = Clock()
    wrong = clock.kernel("WrongLinearKernel", 1.0, result=lambda y: y * 2)
    report = clock.tune(clock.kernel("RightLinearKernel", 1.0), wrong, specs={SPEC: 3, BIG: 2}, seconds=20.0)
    plans = [cli._plan(layer, ["model.a.q_proj"] * 3, (1, 256)) for layer in report.layers]
    facts = {"path": "m[/x]", "device": "cpu", "activations": "float32", "m": [1, 256], "limit_seconds": 20.0, "file": None}
    said = text({**facts, "plans": plans}, width, show=cli.show)
    flat = " ".join(said.split())
    assert "failed: M=1: the largest error" in flat and "nowhere" in flat and "q_proj" in flat and "m[/x]" in flat
    assert all(len(line) <= width for line in said.splitlines()[1:])
    assert "no quantized linear layer" in text({**facts, "plans": []}, width, show=cli.show)
