"""What an interrupted `bitline bench` leaves, and how it goes on; baselines beside the kernels; what a GPU's times go through.

No test depends on how long anything takes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from bitline import bench, timing
from bitline.bench import keep as keeping
from bitline.bench import run as running
from bitline.bench.entrants import Contender, Peer
from bitline.bench.keep import Keeper
from bitline.errors import InputError
from bitline.select import Policy, choose
from command import bitline as command
from test_bench import BF16, REFERENCE, RIGHT, Clock, planted

LINES = "--mode=C --m=1 --scheme=W4A16:g32 64x64 96x64 64x64 128x64"


def run(**options):
    return bench.run_problems(bench.parse_grid(LINES, BF16), kernels=[REFERENCE, RIGHT], **options)


@pytest.fixture
def clean(monkeypatch):
    """A clone without changes."""
    monkeypatch.setattr(sys.modules["bitline.bench.machine"], "commit", lambda: "0123456789ab")


# ---- results as they come ---------------------------------------------------------------------------------------------------


def stop_after(count):
    def progress(done, total):
        if done == count:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_run_leaves_its_results_and_goes_on(tmp_path, clean):
    path = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt), Keeper(path) as keep:
        run(keep=keep, progress=stop_after(2))
    left = bench.read_report(path)
    assert [p.shape for p in left.problems] == [(64, 64), (96, 64)] and left.planned == 4 and left.seconds > 0
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]
    packed = []
    counting = planted("Right", pack=lambda cls, weight: packed.append(weight.shape) or RIGHT.kernel.pack(weight))
    with Keeper(path) as keep:
        report = bench.run_problems(
            bench.parse_grid(LINES, BF16), kernels=[REFERENCE, counting], earlier=bench.read_report(path), keep=keep
        )
    assert set(packed) == {(64, 64), (128, 64)}  # the third problem is the first again, which the file has once
    assert [p.shape for p in report.problems] == [(64, 64), (96, 64), (64, 64), (128, 64)] and report.seconds > left.seconds
    assert report.problems[:2] == left.problems and bench.read_report(path) == report and report.planned == 4


@pytest.mark.skipif(os.name != "posix", reason="a signal")
def test_a_killed_command_leaves_its_results(tmp_path):
    """Nothing is written after the signal: what the file has was written before."""
    program = tmp_path / "killed.py"
    program.write_text(
        textwrap.dedent("""
        import os, signal, sys
        from bitline.bench import keep
        from bitline.cli import bench, main
        inner = bench.run_problems
        def killed(*args, progress, **options):
            def then(done, total):
                if done == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, progress=then, **options)
        bench.run_problems = killed
        keep._SHARE = 0
        main.run()
    """)
    )
    (tmp_path / "a.batch").write_text(LINES)
    words = ["bench", "--batch", str(tmp_path / "a.batch"), "--out", str(tmp_path / "a.json"), "--device", "cpu"]
    done = subprocess.run([sys.executable, program, *words], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    left = bench.read_report(tmp_path / "a.json")
    assert [p.shape for p in left.problems] == [(64, 64), (96, 64)] and left.planned == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.machine.update(name="another"), "name was another"),
        (lambda r: r.machine.update(commit="ba9876543210"), "commit was ba9876543210"),
        (lambda r: r.machine.update(threads=99), "threads was 99"),
        (lambda r: r.conditions.update(seconds_of_calls=9.0), "seconds_of_calls was 9.0"),
        (lambda r: r.conditions.update(baselines=["x"]), "baselines was"),
    ],
)
def test_results_of_something_else_are_not_taken_up(change, words, clean):
    earlier = run()
    change(earlier)
    with pytest.raises(InputError, match=words):
        run(earlier=earlier)


def test_results_of_changed_code_are_not_taken_up(monkeypatch):
    monkeypatch.setattr(sys.modules["bitline.bench.machine"], "commit", lambda: "0123456789ab+")
    with pytest.raises(InputError, match="with changes"):
        run(earlier=run())


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    report, path = run(), tmp_path / "a.json"
    path.write_text("old")
    path.chmod(0o640)

    def full(self, content):
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left"):
        bench.write_report(report, path)
    assert path.read_text() == "old" and [f.name for f in tmp_path.iterdir()] == ["a.json"]


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path):
    report = run()
    (tmp_path / "real").mkdir()
    (tmp_path / "a.json").symlink_to(tmp_path / "real" / "b.json")
    bench.write_report(report, tmp_path / "a.json")
    assert (tmp_path / "a.json").is_symlink() and bench.read_report(tmp_path / "real" / "b.json") == report
    bench.write_report(report, os.devnull)


def test_a_pipe_gets_one_report():
    program = "import sys; from bitline.cli import main; main.run()"
    words = ["bench", "--shape", "64x64,96x64", "--mode", "C", "--m", "1", "--device", "cpu", "--out", "/dev/stdout", "--json"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    one, _, other = done.stdout.partition("\n}\n")
    assert done.returncode == 0 and json.loads(one + "}") == json.loads(other), done.stderr


def test_writing_takes_a_small_part_of_the_time(monkeypatch, tmp_path):
    clock, written = Clock(), []

    def slow(report, path):
        written.append(clock.now)
        clock.now += 1.0

    monkeypatch.setattr(keeping, "write_report", slow)
    report = object()
    with Keeper(tmp_path / "a.json", clock) as keep:
        for _ in range(50):
            keep(report)
            clock.now += 0.5
        assert len(written) == 3 and written[1] - written[0] >= 10
    assert len(written) == 4  # once more at the end


def test_the_command_goes_on(tmp_path, monkeypatch):
    (tmp_path / "a.batch").write_text(LINES)
    words = ("bench", "--batch", tmp_path / "a.batch", "--out", tmp_path / "a.json", "--device", "cpu")
    done = command(*words, "--resume")  # nothing to take up yet
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "a.json").read_text())
    facts["problems"] = facts["problems"][:1]
    facts["machine"]["name"] = "another"
    (tmp_path / "a.json").write_text(json.dumps(facts))
    done = command(*words, "--resume")
    assert done.returncode == 1 and "name was another" in " ".join(done.stderr.split())
    assert json.loads((tmp_path / "a.json").read_text()) == facts
    done = command("bench", "--shape", "64x64", "--resume")
    assert done.returncode == 2 and "--out" in done.stderr + done.stdout


# ---- baselines ------------------------------------------------------------------------------------------------------------

PEERS = """
import torch
from bitline.bench import Baseline

def right(weight):
    return Baseline([weight.dequantize(torch.float32)], lambda x, w: x @ w.t(), lambda x: x.float(), lambda y, x: y.bfloat16())

def padded(weight):
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, 32))
    return Baseline([weight.dequantize(torch.bfloat16)], lambda x, w: x @ w.t(), pad)

def wrong(weight):
    return Baseline([weight.dequantize(torch.bfloat16)], lambda x, w: 1.1 * (x @ w.t()))

def no_number(weight):
    return Baseline([weight.dequantize(torch.bfloat16)], lambda x, w: x @ w.t() * float("nan"))

def turned(weight):
    return Baseline([weight.dequantize(torch.bfloat16)], lambda x, w: w @ x.t())

def raises(weight):
    raise RuntimeError("no such instruction\\nand more")

def absent(weight):
    import a_package_that_nobody_has

BASELINES = {"right": right, "padded": padded, "wrong": wrong, "no number": no_number, "turned": turned, "raises": raises,
             "absent": absent, "not for these": lambda weight: None}
"""


@pytest.fixture
def peers(tmp_path):
    path = tmp_path / "peers.py"
    path.write_text(PEERS)
    return path


def test_baselines_are_checked_and_timed_beside_the_kernels(peers):
    problems = bench.parse_grid("--m=1,3 --scheme=W4A16:g32 64x96", BF16)
    report = bench.run_problems(problems, seconds=1e-3, kernels=[REFERENCE, RIGHT], baselines=bench.read_baselines(peers))
    (found,) = report.problems
    results = {result.kernel: result for result in found.baselines}
    assert list(results) == ["right", "padded", "wrong", "no number", "turned", "raises", "absent"]
    for name in ("right", "padded"):
        one = results[name]
        assert one.status == "ok" and set(one.measured_seconds) == set(one.best_seconds) == {1, 3} and 0 < one.error < 0.01
    assert results["right"].packed_bytes == 64 * 96 * 4
    for name, status, words in (
        ("wrong", "failed", "differs by 0.1"), ("no number", "failed", "differs by nan"), ("turned", "failed", "[64, 1]"),
        ("raises", "failed", "RuntimeError: no such instruction"), ("absent", "refused", "a_package_that_nobody_has"),
    ):  # fmt: skip
        one = results[name]
        assert one.status == status and words in one.reason and not one.measured_seconds, name
    assert found.status == "passed" and report.ok and report.conditions["baselines"] == list(bench.read_baselines(peers))
    assert set(found.kernels[0].measured_seconds) == {1, 3}


def test_each_call_of_a_baseline_reads_another_copy(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 14)
    seen = []

    def call(x, w):
        seen.append(w.data_ptr())
        return x @ w.t()

    maker = lambda weight: bench.Baseline([weight.dequantize(BF16)], call)
    problems = bench.parse_grid("--m=1 --scheme=W4A16:g32 64x96", BF16)
    bench.run_problems(problems, seconds=1e-3, kernels=[REFERENCE, RIGHT], baselines={"seen": maker})
    assert len(set(seen)) == -(-(2 << 14) // (64 * 96 * 2)) > 1


def test_the_baselines_of_the_page(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "bench.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "BASELINES" in block)
    (tmp_path / "page.py").write_text(code)
    problems = bench.parse_grid("--m=1,20 --kernel=reference --scheme=W8A8,W4A16:g32 64x96", BF16)
    report = bench.run_problems(problems, seconds=1e-3, baselines=bench.read_baselines(tmp_path / "page.py"))
    (result,), others = (problem.baselines for problem in report.problems)
    assert result.kernel == "torch _int_mm" and result.status == "ok" and not others, result.reason


def test_the_command_prints_baselines(peers, tmp_path):
    words = ("--shape", "64x96", "--scheme", "W4A16:g32", "--m", "1", "--seconds", 0.01, "--device", "cpu")
    done = command("bench", *words, "--baselines", f"{peers}:right,wrong", "--out", tmp_path / "a.json", COLUMNS="70")
    assert done.returncode == 0, done.stderr
    assert "  right " in done.stdout and "failed: M=1: its result differs" in " ".join(done.stdout.split())
    assert [r["kernel"] for r in json.loads((tmp_path / "a.json").read_text())["problems"][0]["baselines"]] == ["right", "wrong"]


@pytest.mark.parametrize(
    ("content", "names", "words"),
    [
        (None, "", "no such file"), ("1 / 0", "", "ZeroDivisionError"), ("", "", "NoneType"), ("BASELINES = {}", "", "dict"),
        ("BASELINES = {'a': 1}", "", "functions"), ("BASELINES = {1: print}", "", "functions"),
        ("BASELINES = {'a': print, 'b': print}", ":b,c", "found c, expected a, b"),
    ],
)  # fmt: skip
def test_bad_files_of_baselines(content, names, words, tmp_path):
    path = tmp_path / "peers.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        bench.read_baselines(f"{path}{names}")
    assert str(path) in str(caught.value)


# ---- a GPU's times ------------------------------------------------------------------------------------------------------------


class Gpu:
    """A bench whose device is called a GPU; what measures there is replaced."""

    def __init__(self, monkeypatch, sustained):
        self.bench = object.__new__(running._Bench)
        self.bench.device, self.bench.seconds, self.bench.clock = torch.device("cuda"), 1.0, Clock()
        self.bench.sustained, self.rests, self.eager = sustained, [], []
        monkeypatch.setattr(timing, "replay_seconds", self._replay)
        monkeypatch.setattr(timing, "rested_seconds", self._rested)
        monkeypatch.setattr(timing, "in_turn", lambda calls, *_: self.eager.append(calls) or {"it": [7.0, 9.0, 8.0]})

    def _replay(self, calls, target):
        assert target == pytest.approx(1.0 / 5 / self.count)
        return [self._value(calls), self._value(calls) + 2, self._value(calls) + 1]

    def _rested(self, calls, rest):
        self.rests.append(rest)
        return self._value(calls), 10 * self._value(calls)

    @staticmethod
    def _value(calls):
        value = calls[0]()
        if value is None:
            raise RuntimeError("cannot be captured")
        return value

    def times(self, m, values):
        """Dense linear takes 1 s; then the entrants' calls, by name: what a call gives, and whether a graph can hold it."""
        found = bench.ProblemResult("", "", 0, 0, "", "", "", (1, 1), [m], "P", "", 0, "bfloat16")
        entrants = {}
        for name, (value, captured) in values.items():
            entrant = Peer(name, lambda weight: None)
            entrant.cuda_graph = captured
            entrants[entrant] = [lambda value=value: value]
        self.count = 1 + len(entrants)
        self.bench._time_gpu({None: [lambda: 1.0], **entrants}, m, found)
        return found, {entrant.result.kernel: entrant.result for entrant in entrants}


def test_replays_of_graphs_and_eager_calls(monkeypatch):
    gpu = Gpu(monkeypatch, sustained=False)
    found, results = gpu.times(4, {"a": (3.0, True), "eager": (5.0, False), "bad": (None, True)})
    assert found.dense_seconds == {4: 2.0} and not found.dense_sustained_seconds and not gpu.rests
    assert results["a"].measured_seconds == {4: 4.0} and results["a"].best_seconds == {4: 3.0} and results["a"].calls == {4: 3}
    assert results["eager"].measured_seconds == {4: 8.0} and len(gpu.eager) == 1
    assert results["bad"].status == "failed" and "cannot be captured" in results["bad"].reason


def test_sustained_times_of_kernels_baselines_and_dense_linear(monkeypatch):
    gpu = Gpu(monkeypatch, sustained=True)
    found, results = gpu.times(128, {"a": (3.0, True), "eager": (5.0, False)})
    assert found.dense_seconds == {128: 1.0} and found.dense_sustained_seconds == {128: 10.0} and gpu.rests == [0.15, 0.15]
    assert results["a"].measured_seconds == {128: 3.0} and results["a"].sustained_seconds == {128: 30.0}
    assert results["eager"].measured_seconds == {128: 8.0} and not results["eager"].sustained_seconds
    gpu.times(4, {})
    assert gpu.rests[2:] == [0.05]


def test_a_kernel_says_whether_a_graph_can_hold_it():
    candidates = choose(bench.scheme_of("W4A16:g32", 64, 64), "cuda:sm90", Policy()).candidates
    assert {Contender(c, False).cuda_graph for c in candidates} == {True, False}
    assert all(Contender(c, False).cuda_graph == c.kernel.cuda_graph for c in candidates)
