"""Measured costs: the cache file read, written and mistrusted, and how they change a choice."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from bitline import LinearSpec, Platform, Policy, choose, tuning, types
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.kernels.registry import Entry
from bitline.tuning import LayerTimes
from test_select import entry, kernel

SPEC = LinearSpec(64, 128, types.uint4b8, (1, 32), act_dtype=torch.bfloat16)
KEY = tuning.key_of(SPEC)
SLOW, FAST = entry(kernel("Slow", 2e-6)), entry(kernel("Fast", 1e-6))
KERNELS = [Entry(ReferenceLinearKernel, ReferenceLinearKernel.platforms, 0), SLOW, FAST]
HERE = Platform.detect("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BITLINE_CACHE", str(tmp_path))
    monkeypatch.delenv("BITLINE_NO_TUNED", raising=False)
    monkeypatch.setattr(tuning, "_known", {})
    return tmp_path


def times(kernel, *seconds, sizes=(1, 256)):
    return LayerTimes({kernel: dict(zip(sizes, seconds, strict=True))})


def pick(platform=HERE, policy=None, **options):
    return choose(SPEC, platform, policy or Policy(), kernels=KERNELS, **options)


def forget(monkeypatch):
    """As a new process."""
    monkeypatch.setattr(tuning, "_known", {})


# ---- the file ------------------------------------------------------------------------------------------------------------


def test_round_trip(cache, monkeypatch):
    assert tuning.load(HERE) == {}
    path = tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5)})
    assert path == tuning.path_of(HERE) and path.parent == cache / "tuned" and list(path.parent.iterdir()) == [path]
    for _ in range(2):
        assert tuning.load(HERE)[KEY].of("Slow", (1, 256)) == (1e-7, 2e-5)
        forget(monkeypatch)
    found = json.loads(path.read_text())
    assert found["machine"]["device"] and found["machine"]["torch"] == torch.__version__ and found["schema"] == tuning.SCHEMA


def test_times_are_merged(monkeypatch):
    tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5), "other": times("Fast", 1.0, 1.0)})
    tuning.save(HERE, {KEY: times("Slow", 3e-7, sizes=(1,))})
    forget(monkeypatch)
    assert tuning.load(HERE)[KEY].of("Slow", (1, 256)) == (3e-7, 2e-5) and "other" in tuning.load(HERE)
    tuning.save(HERE, {KEY: LayerTimes(failed={"Slow": "wrong"})})
    assert tuning.load(HERE)[KEY].of("Slow", (1,)) == () and tuning.load(HERE)[KEY].failed == {"Slow": "wrong"}
    tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5)})
    assert not tuning.load(HERE)[KEY].failed


def test_only_so_many_layers_are_kept(monkeypatch):
    monkeypatch.setattr(tuning, "MAX_LAYERS", 2)
    for key in ("a", "b", "a", "c"):
        tuning.save(HERE, {key: times("Slow", 1.0, 1.0)})
    assert set(tuning.load(HERE)) == {"a", "c"}


def test_a_file_that_another_process_has_replaced_is_read_again():
    path = tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5)})
    content = json.loads(path.read_text())
    content["layers"][KEY]["seconds"]["Slow"]["256"] = 3e-5
    other = path.with_suffix(".other")
    other.write_text(json.dumps(content))
    other.replace(path)
    assert tuning.load(HERE)[KEY].of("Slow", (256,)) == (3e-5,)


def test_the_file_is_read_once(monkeypatch):
    tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5)})
    forget(monkeypatch)
    reads = []
    monkeypatch.setattr(tuning, "_read", lambda path, facts: reads.append(path) or {})
    for _ in range(5):
        pick()
    assert len(reads) == 1


def test_writers_at_the_same_time_leave_a_whole_file(monkeypatch):
    def write(i):
        for j in range(5):
            tuning.save(HERE, {f"{i} {j}": times("Slow", 1.0, 1.0)})

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    forget(monkeypatch)
    assert tuning.load(HERE) and list(tuning.path_of(HERE).parent.iterdir()) == [tuning.path_of(HERE)]


def test_another_machine_has_another_file(monkeypatch):
    path = tuning.path_of(HERE)
    with monkeypatch.context() as m:
        m.setattr(tuning, "__version__", "99")
        assert tuning.path_of(HERE) != path
    with monkeypatch.context() as m:
        m.setattr(tuning, "device_name", lambda device: "Another CPU @ 3 GHz /../..")
        assert tuning.path_of(HERE) != path and tuning.path_of(HERE).parent == path.parent
        assert tuning.path_of(HERE).name.startswith("another-cpu-3-ghz-")
    with monkeypatch.context() as m:
        m.setattr(tuning, "installed_packages", lambda: {"zentorch": "9"})
        assert tuning.path_of(HERE) != path
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert tuning.path_of(Platform.detect("cpu")) != path
    finally:
        torch.set_num_threads(threads)


GOOD = {"schema": 1, "machine": {}, "layers": {KEY: {"seconds": {"Slow": {"1": 1e-7, "256": 1e-7}}, "failed": {}}}}
HOSTILE = {
    "empty": b"",
    "not JSON": b"\x80\x04\x95pickle",
    "truncated": json.dumps(GOOD).encode()[:-5],
    "a list": b"[]",
    "deeply nested": b"[" * 200_000,
    "a deeply nested value": b'{"schema": 1, "machine": ' + b'{"a":' * 100_000,
    "another schema": {**GOOD, "schema": 2},
    "no schema": {k: v for k, v in GOOD.items() if k != "schema"},
    "another machine": {**GOOD, "machine": {"device": "abacus"}},
    "machine a list": {**GOOD, "machine": []},
    "layers a list": {**GOOD, "layers": []},
    "layers of numbers": {**GOOD, "layers": {KEY: 3}},
    "M is no number": {**GOOD, "layers": {KEY: {"seconds": {"Slow": {"one": 1e-7}}}}},
    "M is negative": {**GOOD, "layers": {KEY: {"seconds": {"Slow": {"-1": 1e-7}}}}},
    "seconds are text": {**GOOD, "layers": {KEY: {"seconds": {"Slow": {"1": "fast"}}}}},
    "seconds are null": {**GOOD, "layers": {KEY: {"seconds": {"Slow": {"1": None}}}}},
    "seconds are zero": {**GOOD, "layers": {KEY: {"seconds": {"Slow": {"1": 0}}}}},
    "seconds are negative": {**GOOD, "layers": {KEY: {"seconds": {"Slow": {"1": -1e-7}}}}},
    "seconds are tiny": {**GOOD, "layers": {KEY: {"seconds": {"Slow": {"1": 5e-324}}}}},
    "seconds are infinite": json.dumps({**GOOD, "layers": {KEY: {"seconds": {"Slow": {"1": float("inf")}}}}}).encode(),
    "seconds overflow": json.dumps(GOOD).replace("1e-07", "1e999").encode(),
    "a huge integer": json.dumps(GOOD).replace("1e-07", "9" * 10_000).encode(),
    "failures are numbers": {**GOOD, "layers": {KEY: {"failed": {"Slow": 1}}}},
    "not UTF-8": json.dumps(GOOD).encode().replace(b"Slow", b"S\xff\xfew"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_ignored_with_one_warning(name, caplog):
    content, path = HOSTILE[name], tuning.path_of(HERE)
    if isinstance(content, dict):
        if content["machine"] == {}:
            content = {**content, "machine": tuning.machine(HERE)}
        content = json.dumps(content).encode()
    path.parent.mkdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "bitline"):
        for _ in range(3):
            assert pick().best.name == "Fast" and not pick().best.measured_here
    assert [str(path) in record.getMessage() for record in caplog.records] == [True], caplog.text
    assert tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5)}) == path and tuning.load(HERE)[KEY].seconds  # and is replaced


def test_the_well_formed_file_of_these_cases_is_read():
    path = tuning.path_of(HERE)
    path.parent.mkdir()
    path.write_text(json.dumps({**GOOD, "machine": tuning.machine(HERE)}))
    assert pick().best.name == "Slow" and pick().best.measured_here


def test_a_huge_file_is_not_read(caplog):
    path = tuning.path_of(HERE)
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert tuning.load(HERE) == {} and "MiB" in caplog.text


@pytest.mark.parametrize("what", ["folder", "pipe", "dangling link", "link to itself"])
def test_what_is_no_file_is_ignored(what):
    path = tuning.path_of(HERE)
    path.parent.mkdir()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if what == "dangling link" else path)
    assert tuning.load(HERE) == {} and pick().best.name == "Fast"


def test_a_folder_that_cannot_be_written(cache, monkeypatch, caplog):
    (cache / "tuned").write_text("a file")
    assert tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5)}) is None
    assert "cannot keep" in caplog.text and pick().best.name == "Slow"  # this process knows it
    forget(monkeypatch)
    assert pick().best.name == "Fast"


@pytest.mark.parametrize("folder", ["/dev/null", "/proc/none", "x" * 5000, "with\nnewline"])
def test_an_impossible_cache_folder(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("BITLINE_CACHE", folder if folder.startswith("/") else str(tmp_path / folder))
    assert pick().best.name == "Fast"


def test_no_home_folder(monkeypatch):
    monkeypatch.delenv("BITLINE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def home():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", home)
    assert pick().best.name == "Fast" and tuning.save(HERE, {KEY: times("Slow", 1e-7, 2e-5)}) is None


# ---- the choice ----------------------------------------------------------------------------------------------------------


def test_a_measured_cost_changes_the_choice_and_explain_says_so():
    assert pick().best.name == "Fast"
    tuning.save(HERE, {KEY: times("Slow", 5e-7, 5e-7)})
    choice = pick()
    assert choice.best.name == "Slow" and choice.best.measured_here and choice.best.costs == (5e-7, 5e-7)
    lines = choice.explain().splitlines()
    assert "(measured here)" in next(line for line in lines if " Slow " in line) and "(modelled)" in next(
        line for line in lines if " Fast " in line
    )
    rows = {c["kernel"]: c for c in choice.to_dict()["candidates"]}
    assert rows["Slow"]["measured_here"] is True and rows["Fast"]["measured_here"] is False
    assert rows["Slow"]["seconds_per_token"] == pytest.approx(5e-7 * (1 + 1 / 256))


def test_a_slow_measurement_lets_an_estimate_win():
    tuning.save(HERE, {KEY: times("Fast", 1e-3, 1e-3)})
    assert pick().best.name == "Slow" and not pick().best.measured_here


def test_measured_kernels_rank_by_their_measurements():
    both = times("Slow", 5e-7, 5e-7).updated(times("Fast", 6e-7, 1e-7))
    assert [c.name for c in pick(measured={KEY: both}).candidates[:2]] == ["Slow", "Fast"]


def test_all_of_the_policy_s_m_have_to_be_measured():
    tuning.save(HERE, {KEY: times("Slow", 5e-7, sizes=(1,))})
    assert pick().best.name == "Fast" and pick(policy=Policy(m=1)).best.name == "Slow"
    assert pick(policy=Policy(m=(1, 16))).best.name == "Fast"


def test_a_kernel_that_failed_comes_last_and_says_why():
    tuning.save(HERE, {KEY: LayerTimes(failed={"Fast": "the error is 3"})})
    choice = pick()
    assert choice.best.name == "Slow" and choice.candidates[-1].name == "Fast" and choice.candidates[-1].verdict
    assert "failed when it was tuned here, the error is 3" in choice.explain()
    assert {c["kernel"]: c["failed_here"] for c in choice.to_dict()["candidates"]}["Fast"] == "the error is 3"
    assert "the error is 3" in pick(policy=Policy(kernel="Fast")).note
    tuning.save(HERE, {KEY: LayerTimes(failed={e.name: "wrong" for e in KERNELS})})
    assert pick().best.verdict  # still no dead end


def test_the_bias_does_not_matter():
    tuning.save(HERE, {KEY: times("Slow", 5e-7, 5e-7)})
    assert choose(SPEC.replace(bias=True, input_multiplier=True), HERE, Policy(), kernels=KERNELS).best.name == "Slow"


def test_a_platform_given_as_text_has_no_measured_costs():
    tuning.save(HERE, {KEY: times("Slow", 5e-7, 5e-7)})
    text = Platform.parse(str(HERE))
    assert text == HERE and HERE.device == "cpu" and text.device == ""
    assert pick(text).best.name == pick(str(HERE)).best.name == "Fast" and pick(None).best.name == "Slow"


def test_measured_costs_can_be_ignored(monkeypatch):
    tuning.save(HERE, {KEY: times("Slow", 5e-7, 5e-7)})
    assert pick(policy=Policy(tuned=False)).best.name == "Fast" and pick(measured={}).best.name == "Fast"
    monkeypatch.setenv("BITLINE_NO_TUNED", "1")
    assert pick().best.name == "Fast"
    monkeypatch.setenv("BITLINE_NO_TUNED", "0")
    assert pick().best.name == "Slow"


def test_emulation_that_was_measured_on_a_gpu_ranks_by_its_times():
    native, emulation = entry(kernel("Native", 1e-6)), entry(kernel("Emulation", 1e-7, emulates=True))
    for measured, best in (({}, "Native"), ({KEY: times("Emulation", 1e-7, 1e-7)}, "Emulation")):
        assert choose(SPEC, "cuda:sm90", Policy(), kernels=[native, emulation], measured=measured).best.name == best
