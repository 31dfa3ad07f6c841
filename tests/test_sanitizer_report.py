"""tests/gpu/sanitize.py reads compute-sanitizer's reports as its manual prints them."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", Path(__file__).parent / "gpu" / "sanitize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at decode+0x1f0
=========     by thread (0,0,0) in block (12,0,0)
=========     Access at 0x7f2e1e200000 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2e1e1f0000 of size 65536 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in launcher.so
=========
========= Invalid __global__ write of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>(int, T2)+0x90
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at wide+0x1200 in wide_device.py:210
=========     and Read access at wide+0x1400 in wide_device.py:220 [512 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_findings_name_their_kernel(sanitize):
    assert [kernel for kernel, _ in sanitize.records(MEMCHECK)] == [
        "decode", "void at::native::vectorized_elementwise_kernel<",
    ]  # fmt: skip
    assert [kernel for kernel, _ in sanitize.records(RACECHECK)] == ["wide"]
    assert sanitize.finished(MEMCHECK) and sanitize.finished(RACECHECK)


def test_a_clean_report_has_none_and_a_cut_one_is_no_report(sanitize):
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.records(clean) == [] and sanitize.finished(clean)
    assert not sanitize.finished(MEMCHECK[: MEMCHECK.index("========= ERROR")])


def test_the_grid_is_what_the_kernel_takes(sanitize):
    from bitline.kernels.hopper.linear import GluonHopperLinearKernel

    names = [name for name, _, _ in sanitize.grid()]
    assert len(set(names)) == len(names)
    assert all(GluonHopperLinearKernel.can_implement(spec) for _, spec, _ in sanitize.grid())
    for _, spec, rows in sanitize.grid():
        assert min(rows) <= 16 < max(rows) and spec.n * spec.k < 1 << 20
