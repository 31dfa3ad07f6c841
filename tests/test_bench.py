"""bitline bench: the grammar of batch files, checks that find planted faults, medians by a fake clock, reports, and the command.

No test depends on how long anything takes.
"""

import json
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from bitline import LinearSpec, bench, timing, types
from bitline.bench import Options, Problem, parse_grid, run_problems
from bitline.bench import machine as machine_of_bench
from bitline.bench.entrants import Data
from bitline.bench.grid import parse_sizes
from bitline.bench.report import KernelResult, ProblemResult, Report
from bitline.bench.schemes import NAMES
from bitline.cli import bench_text, main
from bitline.errors import InputError, OutOfMemoryError
from bitline.kernels import registry
from bitline.kernels.reference import ReferenceLinearKernel
from command import bitline as command
from test_cli_explain import documented, keys, text
from test_select import entry
from tiny import compressed, llama

GRID = Path(__file__).parents[1] / "benchmarks" / "grids" / "ci.batch"
CPU = torch.device("cpu")
BF16 = torch.bfloat16


# ---- the grammar ---------------------------------------------------------------------------------------------------------


def problems(lines, **options):
    return parse_grid(lines, BF16, Options(**options) if options else None, "some.batch")


def test_options_hold_until_they_change():
    found = problems(
        """
        # a comment, and an option for all lines
        --mode=C --m=1,16   # another
        --scheme=W4A16:g32,FP8 64x128
        --dtype=float16 96x64 32×32
        --m=2 --scheme=W8A8   64x64 --kernel=Reference 64x65
        --reset 8x8
        """
    )
    assert [p.line for p in found] == [4, 4, 5, 5, 5, 5, 6, 6, 7]
    assert [(p.spec.n, p.spec.k, p.scheme) for p in found[:4]] == [
        (64, 128, "W4A16:g32"), (64, 128, "FP8"), (96, 64, "W4A16:g32"), (96, 64, "FP8"),
    ]  # fmt: skip
    assert {p.spec.act_dtype for p in found[:2]} == {BF16} and {p.spec.act_dtype for p in found[2:8]} == {torch.float16}
    assert all(p.options.mode == "C" and p.options.sizes == (1, 16) for p in found[:6]) and found[6].options.sizes == (2,)
    assert found[6].options.kernels == () and found[7].options.kernels == ("ReferenceLinearKernel",)
    assert found[8].options == Options() and found[0].spec.block == (1, 32)


def test_a_problem_is_a_line_that_makes_it_again():
    lines = "--m=1,7 --mode=CP --kernel=reference --skip-impl=TorchInt4Pack --scheme=W4A16_ASYM:g32:act_order:bias,NVFP4 64x96"
    lines += "\n--reset " + bench.scheme_of("Q4_K", 64, 256).key
    for problem in problems(lines):
        (again,) = problems(str(problem))
        assert again.spec == problem.spec and str(again) == str(problem)
        assert (again.options.mode, again.options.sizes) == (problem.options.mode, problem.options.sizes)
        assert (again.options.kernels, again.options.skipped) == (problem.options.kernels, problem.options.skipped)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--m=0 64x64", "'0'"), ("--m=1,,2 64x64", "empty item"), ("--m=16..2 64x64", "2..16"), ("--m=1.. 64x64", "batch sizes"),
        ("--m=65537 64x64", "65536"), ("--m=1e3 64x64", "batch sizes"), ("--m 1 64x64", "not an option"),
        ("--n=1 64x64", "--skip-impl"),
        ("-m=1 64x64", "not an option"), ("--mode=X 64x64", "C (correctness)"), ("--mode= 64x64", "C (correctness)"),
        ("--scheme=W9A16 64x64", "W4A16_ASYM"), ("--scheme=W4A16:g0 64x64", "act_order, bias"),
        ("--scheme=W4A16:g8:g4 64x64", "one group"), ("--scheme=W4A16:bias:bias 64x64", "W4A16"),
        ("--scheme=FP8:g64 64x64", "group size"), ("--scheme=Q4_K:g64 64x64", "no group size"),
        ("--dtype=int8 64x64", "bfloat16"), ("--kernel=Nonsense 64x64", "Nonsense"), ("--skip-impl=Nonsense 64x64", "Nonsense"),
        ("64", "4096x11008"), ("0x64", "4096x11008"), ("64x-1", "4096x11008"), ("64x64x64", "4096x11008"),
        ("64;nonsense", "LinearSpec"),
        ("--reset=1 64x64", "--reset"), ("99999999x1", "4096x11008"), ("--scheme=W4A16:g128, 64x64", "empty item"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(line, words):
    with pytest.raises(InputError) as caught:
        problems(f"# first\n\n64x64\n{line}\n--m=0 nor this one")
    assert words in str(caught.value) and "some.batch" in str(caught.value) and "line 4]" in str(caught.value)


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="without a problem"):
        problems("# nothing\n--m=1\n")
    (tmp_path / "latin.batch").write_bytes(b"64x64 # \xe9")
    for path, words in ((tmp_path / "latin.batch", "UTF-8"), (tmp_path / "none", "cannot read"), (tmp_path, "cannot read")):
        with pytest.raises(InputError, match=words):
            bench.read_grid(path, BF16)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [("1..8", (1, 2, 4, 8)), ("3..20", (3, 4, 8, 16, 20)), ("5..5", (5,)), ("1,16,1", (1, 16)), ("1..2,300", (1, 2, 300))],
)
def test_ranges_of_batch_sizes(given, sizes):
    assert parse_sizes(given) == sizes


@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_makes_a_layer_that_has_random_weights(name):
    spec = bench.scheme_of(name.lower(), 128, 512, torch.float16)
    assert spec.act_dtype == torch.float16 and LinearSpec.parse(spec.key) == spec
    assert Data(spec, (1,), CPU, "C").weight.spec == spec


# ---- correctness -----------------------------------------------------------------------------------------------------------


def planted(name="Planted", **members):
    """A kernel that differs from the reference in some members, as an entry of a registry."""
    made = {key: value if key == "is_fallback" else classmethod(value) for key, value in members.items()}
    return entry(type(name, (ReferenceLinearKernel,), {"is_fallback": False, **made}))


def giving(change, name="Planted"):
    """A kernel whose result is changed: change(y, x)."""
    return planted(name, apply=lambda cls, x, packed, bias, spec: change(ReferenceLinearKernel.apply(x, packed, bias, spec), x))


def put(y, index, value):
    y = y.clone()
    y[index] = value
    return y


RIGHT = giving(lambda y, x: y, "Right")
REFERENCE = entry(ReferenceLinearKernel)


def run_one(*kernels, mode="C", sizes=(1, 17), word="96x128", scheme="W4A16:g32", **more):
    (problem,) = parse_grid(word, BF16, Options(mode, (scheme,), sizes, **more))
    (found,) = run_problems([problem], seconds=1e-3, kernels=[REFERENCE, RIGHT, *kernels]).problems
    return found, {result.kernel: result for result in found.kernels}


FAULTS = {
    "twice as large": (lambda y, x: y * 2, "largest error"),
    "one element": (lambda y, x: put(y, (-1, -1), 1e4), "largest error"),
    "not a number": (lambda y, x: put(y, (0, 3), float("nan")), "largest error"),
    "the last row of a batch": (lambda y, x: put(y, -1, 0.0) if len(x) > 1 else y, "M=17"),
    "another shape": (lambda y, x: y[:, :-1], "shape"),
    "another dtype": (lambda y, x: y.float(), "dtype"),
    "nothing": (lambda y, x: None, "shape"),
    "an exception": (lambda y, x: 1 / 0, "ZeroDivisionError"),
    "a multiple of a code": (lambda y, x: y * (1 + 2**-7), "lossless data"),  # within the tolerance on random data
    "uninitialized memory": (lambda y, x: y + torch.empty(1, dtype=y.dtype), "largest error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found(fault):
    change, words = FAULTS[fault]
    found, kernels = run_one(giving(change))
    assert kernels["Planted"].status == "failed" and words in kernels["Planted"].reason and found.status == "failed"
    assert kernels["Right"].status == kernels["ReferenceLinearKernel"].status == "ok"
    assert 0 <= kernels["Right"].error <= kernels["Right"].allowed


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("a multiple of a code", "uninitialized memory")])
def test_a_wrong_kernel_is_not_timed(fault):
    change, words = FAULTS[fault]
    found, kernels = run_one(giving(change), mode="P")
    assert (
        kernels["Planted"].status == "failed" and words in kernels["Planted"].reason and not kernels["Planted"].measured_seconds
    )
    assert found.status == "failed" and set(kernels["Right"].measured_seconds) == {1, 17}


def test_the_last_rows_of_a_large_weight_count():
    wrong = giving(lambda y, x: put(y, (0, -1), 1e4))
    assert run_one(wrong, mode="P", sizes=(1,), word="1500x32")[0].status == "failed"
    assert run_one(wrong, mode="C", sizes=(1,), word="5000x32")[0].status == "failed"


def test_a_kernel_that_cannot_take_the_values_has_not_failed():
    def pack(cls, weight):
        raise InputError("not these values")

    found, kernels = run_one(planted(pack=pack))
    assert kernels["Planted"].status == "refused" and "not these values" in kernels["Planted"].reason and found.status == "passed"


def test_no_memory_is_an_error_that_names_the_problem(monkeypatch):
    def random_weight(spec, seed):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("bitline.bench.entrants.random_weight", random_weight)
    with pytest.raises(OutOfMemoryError, match=r"no memory to run .*96x128.*smaller shape"):
        run_one()


def test_unimplemented_and_skipped_problems():
    refuses = planted("Refuses", can_implement=lambda cls, spec: types.no("not today"))
    (problem,) = parse_grid("64x64", BF16, Options("C", sizes=(1,)))

    def statuses(entries, **options):
        asked = Problem(problem.spec, Options("C", sizes=(1,), **options), "W4A16")
        report = run_problems([asked], kernels=entries)
        (found,) = report.problems
        assert report.ok == (found.status in ("passed", "skipped")) and report.count(found.status) == 1
        return found.status, {result.kernel: result.status for result in found.kernels}

    reference, right = "ReferenceLinearKernel", "Right"
    assert statuses([REFERENCE, RIGHT, refuses]) == ("passed", {reference: "ok", right: "ok"})
    assert statuses([REFERENCE, refuses]) == ("unimplemented", {reference: "ok"})  # only the reference can run it
    assert statuses([REFERENCE], skipped=frozenset([reference])) == ("skipped", {reference: "skipped"})
    assert statuses([REFERENCE, RIGHT], skipped=frozenset([right])) == ("skipped", {reference: "ok", right: "skipped"})
    assert statuses([REFERENCE], kernels=(reference,)) == ("passed", {reference: "ok"})
    assert statuses([REFERENCE, RIGHT, refuses], kernels=(right, "Refuses"))[0] == "unimplemented"
    skipped = statuses([REFERENCE, refuses], kernels=("Refuses",), skipped=frozenset(["Refuses"]))
    assert skipped == ("skipped", {"Refuses": "skipped"})
    wrong = giving(lambda y, x: y * 2, "Wrong")
    assert statuses([REFERENCE, RIGHT, wrong])[0] == "failed"
    assert statuses([REFERENCE, RIGHT, wrong], skipped=frozenset(["Wrong"]))[0] == "passed"


# ---- times -----------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that only calls advance."""

    def __init__(self):
        self.now, self.made = 0.0, []

    def __call__(self):
        return self.now

    def calls(self, name, *seconds):
        """One call for each of these durations, to rotate through."""

        def call(i):
            self.made.append((name, i))
            self.now += seconds[i]

        return [lambda i=i: call(i) for i in range(len(seconds))]


def test_kernels_take_turns_and_rotate_through_their_copies():
    clock = Clock()
    calls = {"a": clock.calls("a", 1.0, 2.0, 3.0), "b": clock.calls("b", 4.0)}
    times = timing.in_turn(calls, CPU, 60.0, clock)
    made = [i for name, i in clock.made if name == "a"]
    assert made == [i % 3 for i in range(len(made))] and times["a"][:3] == [3.0, 1.0, 2.0] and set(times["b"]) == {4.0}
    assert len(times["a"]) == len(times["b"]) == 10  # 2 rounds to warm up, then 60 s of 6 s each
    rounds = {tuple(name for name, _ in clock.made[i : i + 2]) for i in range(0, len(clock.made), 2)}
    assert rounds == {("a", "b"), ("b", "a")}


def test_slow_kernels_have_few_rounds_and_reading_is_no_yardstick():
    clock = Clock()
    calls = {
        "read": clock.calls("read", 0.01),
        "a": clock.calls("a", 1.0),
        "b": clock.calls("b", 9.0),
        "slow": clock.calls("slow", 11.0),
    }
    times = timing.in_turn(calls, CPU, 200.0, clock, yardstick="read")
    assert len(times["slow"]) == 3 and len(times["a"]) == len(times["b"]) == len(times["read"]) > 7
    assert len(timing.in_turn({"a": calls["a"]}, CPU, 0.5, clock)["a"]) == 7  # at least
    assert len(timing.in_turn({"a": calls["a"]}, CPU, 1e9, clock)["a"]) == 400  # at most


def test_reads_touch_all_bytes_and_other_memory_each_time():
    calls = timing.reads(1000, 3500)
    parts = [call.args[0] for call in calls]
    assert len(parts) == 4 and all(part.nbytes == 1000 for part in parts) and len({part.data_ptr() for part in parts}) == 4
    assert len(timing.reads(1 << 20, 1)) == 2 and all(call() is not False for call in calls)


def test_times_are_medians_of_cold_copies(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 14)
    seen = []
    watched = planted("Watched", apply=lambda cls, x, packed, bias, spec: seen.append(packed[0].data_ptr())
                      or ReferenceLinearKernel.apply(x, packed, bias, spec))  # fmt: skip
    found, kernels = run_one(watched, mode="P", sizes=(1, 3))
    result = kernels["Watched"]
    assert len(set(seen)) == -(-(2 << 14) // result.packed_bytes) > 1
    assert set(result.measured_seconds) == set(result.best_seconds) == set(result.calls) == {1, 3}
    assert all(result.best_seconds[m] <= result.measured_seconds[m] and result.calls[m] >= 3 for m in (1, 3))
    for times in (found.read_seconds, found.compute_seconds, found.dense_seconds):
        assert set(times) == {1, 3} and all(value > 0 for value in times.values())
    assert found.limit(3) == max(found.read_seconds[3], found.compute_seconds[3])


class FakeCuda:
    """torch.cuda's graphs, events and streams, on a clock that only calls advance; a replay makes the captured calls again."""

    def __init__(self, clock):
        import contextlib
        from types import SimpleNamespace

        fake = self
        self.clock, self.captured, self.slept = clock, None, []
        stream = SimpleNamespace(wait_stream=lambda other: None)

        class Graph:
            def replay(self):
                clock.now += self.seconds

        class Event:
            def __init__(self, timed):
                assert timed

            def record(self):
                self.at = clock.now

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        @contextlib.contextmanager
        def graph(made):
            before = clock.now
            yield
            made.seconds, clock.now = clock.now - before, before

        self.names = {
            "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda s: contextlib.nullcontext(),
            "synchronize": lambda *device: None, "CUDAGraph": Graph, "Event": Event, "graph": graph,
        }  # fmt: skip
        self.sleep = lambda seconds: fake.slept.append(seconds)


def test_replays_give_seconds_of_one_call(monkeypatch):
    clock = Clock()
    fake = FakeCuda(clock)
    for name, value in fake.names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing.time, "sleep", fake.sleep)
    calls = clock.calls("a", 1e-3, 2e-3, 3e-3, 6e-3)
    assert timing.replay_seconds(calls, 0.1, 3) == [pytest.approx(3e-3)] * 3
    before = clock.now
    assert timing.rested_seconds(calls, 0.2) == (pytest.approx(3e-3), pytest.approx(3e-3)) and fake.slept == [0.2]
    assert clock.now - before > 0.2  # the load


def test_arguments():
    with pytest.raises(InputError, match="CUDA GPUs"):
        run_problems([], sustained=True)


# ---- reports and comparisons -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    wrong = giving(lambda y, x: y * 2, "Wrong")
    lines = "--m=1,16 64x128 --mode=C --scheme=NF4 32x64 --kernel=TorchNvFp4 64x64"
    return run_problems(parse_grid(lines, BF16), seconds=1e-3, kernels=[*registry.entries(), wrong])


def test_a_report_is_read_as_it_was_written(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report.to_dict()))
    again = bench.read_report(path)
    assert again == report and not again.ok and [again.count(s) for s in ("failed", "unimplemented", "passed")] == [2, 1, 0]
    assert bench.compare_reports(report, again).ok
    facts = report.to_dict()
    for text_, words in (("", "not a report"), ("[]", "not a report"), ('{"error": {}}', "not a report"),
                         (json.dumps(facts | {"schema": 9}), "another version"), ("[" * 100_000, "not a report")):  # fmt: skip
        path.write_text(text_)
        with pytest.raises(InputError, match=words):
            bench.read_report(path)
    with pytest.raises(InputError, match="cannot read"):
        bench.read_report(tmp_path / "none")


def changed(report, times, **changes):
    """A report whose kernels' times are multiplied, and one kernel of each problem changed."""
    copy = msgspec.json.decode(msgspec.json.encode(report), type=bench.Report)
    for problem in copy.problems:
        for result in problem.kernels:
            result.measured_seconds = {m: times * seconds for m, seconds in result.measured_seconds.items()}
            if result.kernel == "CPUBatchInvariantLinearKernel":
                for name, value in changes.items():
                    setattr(result, name, value)
    return copy


def test_what_became_slower(report):
    count = sum(len(result.measured_seconds) for problem in report.problems for result in problem.kernels)
    assert count > 4
    slower = bench.compare_reports(report, changed(report, 1.25))
    assert len(slower.slower) == slower.compared == count and not slower.ok and not slower.faster and not slower.machines
    assert all(row.ratio == pytest.approx(1.25) and row.m in (1, 16) for row in slower.slower)
    assert (
        bench.compare_reports(report, changed(report, 1.25), 1.3).ok and bench.compare_reports(report, changed(report, 1.05)).ok
    )
    faster = bench.compare_reports(report, changed(report, 0.5))
    assert faster.ok and len(faster.faster) == count
    broken = bench.compare_reports(report, changed(report, 1.0, status="failed", reason="M=1: wrong", measured_seconds={}))
    assert not broken.ok and {row[2:] for row in broken.broken} == {("CPUBatchInvariantLinearKernel", "M=1: wrong")}
    missing = bench.compare_reports(report, changed(report, 1.0, measured_seconds={}))
    assert missing.ok and missing.missing == 2
    elsewhere = changed(report, 1.0)
    elsewhere.machine["threads"] = 99
    assert bench.compare_reports(report, elsewhere).machines == (("threads", str(report.machine["threads"]), "99"),)
    elsewhere.problems = []
    with pytest.raises(InputError, match="in common"):
        bench.compare_reports(report, elsewhere)
    for threshold in (0.9, float("nan"), float("inf")):
        with pytest.raises(InputError, match="at least 1"):
            bench.compare_reports(report, report, threshold)


def test_the_roofline(report, tmp_path):
    pytest.importorskip("matplotlib")
    from bitline.bench.plot import points

    series = points(report)
    assert len(series["dense"]) == 2 and len(series["CPUBatchInvariantLinearKernel"]) == 2 and "Wrong" not in series
    problem = report.problems[0]
    expected = 2 * 16 * 64 * 128 / (problem.weight_bytes + 16 * (64 + 128) * 2)
    assert series["CPUBatchInvariantLinearKernel"][1][0] == pytest.approx(expected)
    for name in ("a.png", "a.svg"):
        bench.roofline(report, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(InputError, match="cannot write"):
        bench.roofline(report, tmp_path / "a.nonsense")
    untimed = changed(report, 1.0)
    untimed.problems = untimed.problems[1:]
    with pytest.raises(InputError, match="nothing to draw"):
        bench.roofline(untimed, tmp_path / "b.png")


def test_the_commit_is_named_in_a_clone_alone(monkeypatch):
    module = sys.modules["bitline.bench.machine"]
    facts = machine_of_bench("cpu")
    assert facts["versions"]["torch"] and facts["threads"] >= 1 and facts["device"] == "cpu"
    monkeypatch.setattr(module, "__file__", "/somewhere/site-packages/bitline/bench/machine.py")
    assert module.commit() is None


# ---- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return compressed(tmp_path_factory.mktemp("tiny"), llama())[0]


def test_the_command_on_a_model(folder, tmp_path):
    done = command("bench", folder, "--m", "1,3", "--seconds", 0.01, "--threads", 1, "--out", tmp_path / "a.json", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["tests"] == report["passed"] == 4 and report["machine"]["threads"] == 1
    assert sum(problem["layers"] for problem in report["problems"]) == 14
    assert report == json.loads((tmp_path / "a.json").read_text())
    timed = [kernel for problem in report["problems"] for kernel in problem["kernels"] if kernel["status"] == "ok"]
    assert timed and all(list(kernel["measured_seconds"]) == ["1", "3"] for kernel in timed)
    same = command("bench", "--compare", tmp_path / "a.json", tmp_path / "a.json", "--json")
    assert same.returncode == 0 and json.loads(same.stdout)["compared"] == 2 * len(timed)
    slow = json.loads((tmp_path / "a.json").read_text())
    slow["problems"][0]["kernels"][0]["measured_seconds"]["1"] *= 3
    slow["problems"][0]["kernels"][0]["measured_seconds"]["3"] /= 3
    slow["problems"][1]["kernels"][0]["status"] = "failed"
    slow["machine"]["name"] = "another"
    (tmp_path / "b.json").write_text(json.dumps(slow))
    compared = command("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
    assert compared.returncode == 1, compared.stderr
    found = json.loads(compared.stdout)
    assert [row["ratio"] for row in found["slower"]] == [pytest.approx(3)] and len(found["broken"]) == 1
    assert keys(report) | keys(found) == documented("bench")
    said = command("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json", COLUMNS="60")
    flat = " ".join(said.stdout.split())
    assert said.returncode == 1 and "1 slower and 1 faster" in flat and "3.00" in flat and "name differs" in flat
    assert "no longer runs" in flat and command("bench", "--compare", tmp_path / "a.json", tmp_path).returncode == 1


def test_the_command_on_shapes_with_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    done = command("bench", "--shape", "64x128,96x64", "--scheme", "W4A16:g32", "--m", "1..4", "--seconds", 0.01, "--mode", "cp",
                   "--plot", tmp_path / "a.png")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("W4A16:g32 64×128", "M=4", "dense linear", "limit", "2 tests: 2 passed"))
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_the_command_on_a_batch_file(tmp_path):
    (tmp_path / "a.batch").write_text("--mode=C --m=1\n64x64\n--kernel=TorchNvFp4\n64x64 # nothing for a CPU\n")
    done = command("bench", "--batch", tmp_path / "a.batch", COLUMNS="80")
    assert done.returncode == 1 and "line 4: W4A16 64×64: TorchNvFp4 unimplemented" in done.stdout, done.stdout
    assert "1 passed, 0 skipped, 1 unimplemented" in done.stdout
    done = command("bench", "--batch", tmp_path / "a.batch", "--skip-impl", "torchnvfp4")
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout
    (tmp_path / "a.batch").write_text("64x64\n64x\n")
    done = command("bench", "--batch", tmp_path / "a.batch", "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 1 and error["field"] == "line 2" and error["file"] == str(tmp_path / "a.batch")


@pytest.mark.parametrize("mode", ["C", "P"])
def test_the_command_finds_a_planted_kernel(mode, monkeypatch, capfd):
    kernel = giving(lambda y, x: y * 2, "PlantedLinearKernel").kernel
    registry.register_kernel(kernel, platform="cpu")
    try:
        monkeypatch.setattr(
            sys, "argv", ["bitline", "bench", "--shape", "64x64", "--mode", mode, "--m", "1", "--seconds", "0.01"]
        )
        with pytest.raises(SystemExit) as stopped:
            main.run()
    finally:
        registry.unregister_kernel("PlantedLinearKernel")
    said = " ".join(capfd.readouterr().out.split())
    assert stopped.value.code == 1 and "W4A16 64×64: Planted failed: M=1: the largest error" in said and "1 failed" in said


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["bitline", "bench", "--shape", "64x64", "--plot", str(tmp_path / "a.png"), "--json"])
    monkeypatch.setattr("bitline.cli.bench.run_problems", lambda *args, **options: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as stopped:
        main.run()
    error = json.loads(capsys.readouterr().out)["error"]
    assert stopped.value.code == 1 and "matplotlib" in error["message"] and error["fix"] == "pip install 'bitline[plot]'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of"), (["x", "--shape", "1x1"], "give one of"), (["--shape", "64"], "as in 4096x11008"),
        (["--shape", "64x64,"], "as in 4096x11008"), (["--shape", "64x64", "--scheme", "W9"], "not a scheme"),
        (["--shape", "64x64", "--seconds", "0"], "positive number"), (["--shape", "64x64", "--m", "4..2"], "before it begins"),
        (["--shape", "64x64", "--mode", "Q"], "not a mode"), (["--shape", "64x64", "--kernel", "Nonsense"], "not registered"),
        (["--shape", "64x64", "--device", "toaster"], "not a device"),
        (["--shape", "64x64", "--device", "cpu", "--sustained"], "CUDA GPUs"),
        (["x", "--scheme", "W4A16"], "its own schemes"),
        (["--shape", "64x64", "--out", "/no/such/folder/a.json"], "folder that exists"),
        (["--shape", "64x64", "--mode", "C", "--plot", "a.png"], "only mode P"), (["--compare", "a"], "2 arguments"),
        (["--compare", "a", "b", "--threshold", "0.5"], "at least 1"), (["--compare", "a", "b", "--shape", "1x1"], "give one of"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)  # fmt: skip
def test_usage_errors(words, message):
    done = command("bench", *words)
    assert done.returncode == 2 and message in " ".join((done.stderr + done.stdout).split()), done.stderr + done.stdout


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_at_every_width(report, width):
    said = text(report, width, show=bench_text.show)
    assert all(len(line) <= width for line in said.splitlines() if "failed: " not in line and "unimplemented: " not in line)
    flat = " ".join(said.split())
    assert "Wrong failed: M=1: the largest error" in flat and "→" in said and "read limit" in said and "CPUBatchInvariant" in said
    assert "3 tests: 0 passed, 0 skipped, 1 unimplemented, 2 failed" in flat


def timed_and_checked():
    """A report of one timed problem and a checked one."""
    times = {"CPUWNA16LinearKernel": 10e-6, "CPUBatchInvariantLinearKernel": 11.3e-6, "ReferenceLinearKernel": 23.4e-3}
    kernels = [
        KernelResult(name, "ok", error=0.1, allowed=0.5, measured_seconds={1: seconds}, calls={1: 3 if seconds > 1e-3 else 90})
        for name, seconds in times.items()
    ]
    problem = ProblemResult(
        "512x512", "passed", 0, 0, "", "W4A16:g128", "", (512, 512), [1], "P", "CPUWNA16LinearKernel", 139264, "bfloat16",
        {1: 9.7e-6}, {1: 3e-6}, {1: 45.8e-6}, kernels=kernels,
    )  # fmt: skip
    checked = msgspec.structs.replace(problem, dense_seconds={}, mode="C", line=7)
    return Report({"device": "cpu", "name": "a CPU", "threads": 2}, {}, [problem, checked], 1.0)


@pytest.mark.parametrize(("width", "left_out"), [(40, {"/dense", "rate", "kernels"}), (59, {"rate"}), (60, set()), (80, set())])
def test_a_narrow_terminal_leaves_out_columns_and_breaks_no_word(width, left_out):
    lines, wide = (text(timed_and_checked(), w, show=bench_text.show).splitlines() for w in (width, 200))
    words, all_words = (set(" ".join(found).split()) for found in (lines, wide))
    columns = {"M,", "time", "/limit", "/dense", "rate", "line", "layers", "M", "kernels", "error"}
    assert words - {"─" * n for n in range(200)} <= all_words and columns - words == left_out
    assert all(len(line) <= width for line in lines[1:])  # the first one is never wrapped
    shown = "\n".join(" ".join(line.split()) for line in lines)
    assert "\nM=1 read limit 9.7 us\n" in shown and "\n→ CPUWNA16 10.0 us 1.03" in shown
    assert "\nCPUBatchInvariant 11.3 us 1.16" in shown and "\nReference 23.4 ms 2412.37" in shown


# ---- the repository's grid -----------------------------------------------------------------------------------------------


def passes(grid):
    found = run_problems(grid)
    assert found.ok, [(p.problem, r.kernel, r.reason) for p in found.problems for r in p.kernels if r.status != "ok"]
    assert found.count("passed") == len(grid)


def test_a_sample_of_the_grid_passes():
    grid = bench.read_grid(GRID, BF16)
    assert len(grid) > 80 and {p.options.mode for p in grid} == {"C"}
    assert {p.scheme.partition(":")[0] for p in grid} == set(NAMES)
    passes([p for p in grid if p.spec.n * p.spec.k <= 1 << 17 and p.spec.act_dtype == BF16][::7])


@pytest.mark.exhaustive
def test_the_whole_grid_passes():
    passes(bench.read_grid(GRID, BF16))
