"""The native core: loading, ISA levels, hiding, and threads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitline import InputError, native
from bitline.env import environment

core = native.core()
needs_core = pytest.mark.skipif(core is None, reason=f"no native core: {native.why_not()}")


def output_of(code, **variables):
    """What a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment() | {"BITLINE_NO_NATIVE": "0"} | variables,
    )
    return done.stdout.strip()


def test_it_is_built_where_there_is_a_compiler():
    hidden = os.environ.get("BITLINE_NO_NATIVE", "0") not in ("", "0")
    assert core is not None or hidden or not shutil.which("c++"), native.why_not()


def test_importing_bitline_does_not_load_it():
    loaded = "any('libbitline_native' in line for line in open('/proc/self/maps'))"
    found = output_of(f"import bitline, bitline.weight, bitline.kernels.registry\nprint({loaded}, end=' ')\n"
                f"from bitline import native\nnative.core()\nprint({loaded})")  # fmt: skip
    assert found == f"False {native.find() is not None}"


def test_a_hidden_core_is_absent_and_the_platform_says_so():
    code = "from bitline import native, Platform\nprint(native.core(), '|', native.why_not(), '|', Platform.detect())"
    found, why, platform = output_of(code, BITLINE_NO_NATIVE="1").split(" | ")
    assert found == "None" and "BITLINE_NO_NATIVE" in why and platform.endswith("no_native")


@needs_core
def test_an_isa_level_can_be_forced():
    code = "from bitline import native\nprint(native.isa(), native.core().all_finite(0, 0, 2, 0x7C00))"
    for wanted in native.isas():
        assert output_of(code, BITLINE_CPU_ISA=wanted.upper()) == f"{wanted} 1"
    code = "from bitline import native, InputError\ntry: native.core()\nexcept InputError as e: print(e)"
    assert "portable" in output_of(code, BITLINE_CPU_ISA="mmx")
    with pytest.raises(InputError, match="portable"):
        native.use_isa("sse9")
    above = [name for name in native.LEVELS if name not in native.isas()]
    for name in above:
        with pytest.raises(InputError, match=name):
            native.use_isa(name)


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_library_is_not_used(tmp_path, content):
    path = tmp_path / "core.so"
    path.write_bytes(content)
    code = "from bitline import native\nprint(native.core(), native.why_not())"
    found = output_of(code, BITLINE_NATIVE_LIBRARY=str(path))
    assert found.startswith("None ") and "core.so" in found
    assert "core.so" in output_of(code, BITLINE_NATIVE_LIBRARY=str(tmp_path / "absent" / "core.so"))


def test_a_library_of_other_sources_is_not_used():
    path = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    code = "from bitline import native\nprint(native.core(), native.why_not())"
    found = output_of(code, BITLINE_NATIVE_LIBRARY=str(path))
    assert found.startswith("None ") and "bitline_abi" in found and "install Bitline again" in found


@needs_core
def test_it_runs_on_torchs_threads_and_starts_none():
    """Once torch has its thread team, parallel loops start no thread and load no second OpenMP runtime."""
    code = """
import os, torch
from bitline import native
torch.set_num_threads(3)
x = torch.randn(1 << 20)
for _ in range(3): x.add_(1)
before = len(os.listdir("/proc/self/task"))
core = native.core()
core.empty_parallel_regions(50, 8)
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
print(len(os.listdir("/proc/self/task")) - before, core.num_threads(), core.threads_from, len(runtimes))
"""
    assert output_of(code) == "0 3 2 1"


@needs_core
def test_the_number_of_threads_is_torchs():
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert core.num_threads() == count
    finally:
        torch.set_num_threads(before)


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pool sleeps on futexes")


@needs_core
@on_linux
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_the_pool_runs_every_task_once(threads):
    for tasks in (1, 2, 3, 40, 4096):
        assert core.pool_loops(300 if tasks < 100 else 20, tasks, threads) == 0


@needs_core
@on_linux
def test_the_pool_serves_one_caller_at_a_time():
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(4) as callers:
        wrong = list(callers.map(lambda _: core.pool_loops(500, 10, 3), range(8)))
    assert max(wrong) == 0  # a caller whose loops were all refused returns -1


@needs_core
@pytest.mark.parametrize("threads", [2, 3, 9])
def test_an_awake_team_runs_every_task_once(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for tasks in (1, 2, 3, 40, 4096):
            assert core.awake_team_loops(200 if tasks < 100 else 20, tasks) == 0
    finally:
        torch.set_num_threads(before)


@needs_core
def test_one_team_is_awake_at_a_time():
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(4) as callers:
        assert not any(callers.map(lambda _: core.awake_team_loops(200, 10), range(8)))


@pytest.fixture
def three_threads():
    """torch with three threads; the machine counts as quiet behind it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    core.pretend_contended(0)
    torch.set_num_threads(before)


def teams_while_contended(contended: bool) -> tuple[int, int]:
    """torch's and the core's numbers of threads after a loop."""
    core.pretend_contended(10**12 if contended else 0)
    core.empty_parallel_regions(1, 4)
    return torch.get_num_threads(), core.num_threads()


@needs_core
@on_linux
@pytest.mark.skipif(core is not None and core.threads_from != 2, reason="torch has no OpenMP threads")
def test_torch_runs_alone_in_a_scope_while_its_threads_are_held_up(three_threads):
    assert teams_while_contended(True) == (3, 3)  # no scope
    with native.adapted_threads():
        assert teams_while_contended(True) == (1, 3)
        assert teams_while_contended(False) == (3, 3)
        with native.adapted_threads():
            assert teams_while_contended(True) == (1, 3)
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), native.adapted_threads():
        assert teams_while_contended(True) == (1, 3)
        _ = 1 // 0
    assert torch.get_num_threads() == 3


@needs_core
@on_linux
@pytest.mark.skipif(core is not None and core.threads_from != 2, reason="torch has no OpenMP threads")
def test_a_scope_keeps_a_number_of_threads_that_its_caller_sets(three_threads):
    with native.adapted_threads():
        assert teams_while_contended(True) == (1, 3)
        torch.set_num_threads(2)
        assert teams_while_contended(False) == (2, 2)
    assert torch.get_num_threads() == 2


@needs_core
@on_linux
def test_a_forked_process_has_a_pool_of_its_own():
    code = """
import os
from bitline import native
core = native.core()
assert core.pool_loops(10, 5, 3) == 0
child = os.fork()
if child == 0:
    os._exit(core.pool_loops(10, 5, 3))
print(os.waitpid(child, 0)[1], core.pool_loops(10, 5, 3))
"""
    assert output_of(code) == "0 0"


@needs_core
def test_concurrent_calls_from_python_threads(level):
    import concurrent.futures

    data = torch.randn(1 << 20)
    bad = data.clone()
    bad[-1] = torch.inf
    check = lambda x: core.all_finite(x.data_ptr(), x.numel(), 4, 0x7F800000)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(check, [data, bad] * 20)) == [1, 0] * 20


EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


@needs_core
@pytest.mark.parametrize("dtype", EXPONENTS)
def test_all_finite(level, dtype):
    for n in (0, 1, 7, 64, 1000, (1 << 18) + 3):
        x = torch.randn(n).to(dtype)
        check = lambda x: core.all_finite(x.data_ptr(), x.numel(), x.itemsize, EXPONENTS[x.dtype])
        assert check(x)
        for bad in (torch.nan, torch.inf, -torch.inf):
            for at in {0, n // 2, n - 1} if n else ():
                y = x.clone()
                y[at] = bad
                assert not check(y)


def test_doctor_reports_it():
    from bitline.cli.doctor import doctor_report
    from bitline.cli.doctor_text import native_line

    report = doctor_report()
    assert report["native"]["available"] == (core is not None)
    assert core is None or native.isa() in native_line(report)
    missing = native_line({"native": {"available": False, "reason": "not built"}, "compilers": {"C++": None}})
    assert "not built" in missing and "install g++" in missing
