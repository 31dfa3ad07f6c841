"""tests/gpu/sanitize.py reads compute-sanitizer's reports as its manual prints them."""

import importlib.util
from pathlib import Path

import pytest

from experts_oracle import specs_of


@pytest.fixture(scope="module")
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", Path(__file__).parent / "gpu" / "sanitize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at gemv_mma+0x1f0
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
========= Error: Race reported between Write access at wgmma_persistent+0x1200 in wgmma_persistent.py:210
=========     and Read access at wgmma_persistent+0x1400 in wgmma_persistent.py:220 [512 hazards]
=========
========= Error: Race reported between Read access at wgmma_persistent+0x220 in wgmma_persistent.py:{line}
=========     and Write access at wgmma_persistent+0x69a0 in wgmma_persistent.py:{line} [16 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_reports_name_their_kernel(sanitize):
    assert [r.kernel for r in sanitize.records(MEMCHECK)] == ["gemv_mma", "void at::native::vectorized_elementwise_kernel<"]
    first, second = sanitize.records(RACECHECK)
    assert first.kernel == second.kernel == "wgmma_persistent"
    assert first.lines == ("wgmma_persistent.py:210", "wgmma_persistent.py:220")
    assert sanitize.finished(MEMCHECK) and sanitize.finished(RACECHECK)


def test_generated_code_is_the_warp_specialization_prologue(sanitize):
    lines = {kernel: sorted(int(at.partition(":")[2]) for at in sanitize.prologue_lines(kernel)) for kernel in sanitize.OURS}
    kernel = lines["wgmma_persistent"]
    assert len(lines["gemv_mma"]) == 1 and kernel[1] > kernel[0] + 20
    for at in kernel[:2]:
        text = RACECHECK.replace("{line}", str(kernel[0]), 1).replace("{line}", str(at))
        assert [sanitize.generated(r) for r in sanitize.records(text)] == [False, True]
    assert not any(sanitize.generated(r) for r in sanitize.records(RACECHECK.replace("{line}", "1")))


def test_a_clean_report_has_none_and_a_truncated_one_is_no_report(sanitize):
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.records(clean) == [] and sanitize.finished(clean)
    assert not sanitize.finished(MEMCHECK[: MEMCHECK.index("========= ERROR")])


def test_what_fails_in_a_report(sanitize):
    row = {"finished": True, "reports": 0, "generated": 0}
    faults = {tool: {fault: row | {"reports": 1}} for tool, fault in sanitize.PLANTED.items()}
    tools = {tool: {"grid": row, "control": row} | faults.get(tool, {}) for tool in sanitize.TOOLS}
    assert not sanitize.complaints({"tools": tools})
    assert not sanitize.complaints({"tools": tools | {"racecheck": {"grid": row | {"generated": 4}, "control": row}}})
    for tool, runs in {
        "memcheck": tools["memcheck"] | {"short": row}, "initcheck": tools["initcheck"] | {"grid": row | {"finished": False}},
        "racecheck": {"grid": row, "control": row | {"finished": False}},
        "synccheck": {"grid": row | {"reports": 1}, "control": row},
    }.items():  # fmt: skip
        assert len(sanitize.complaints({"tools": tools | {tool: runs}})) == 1


def test_the_layers_are_what_the_kernels_accept(sanitize):
    import sanitized_layers as layers

    from bitline.kernels.hopper.linear import GluonHopperLinearKernel
    from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel
    from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel

    names = [name for name, *_ in layers.grid() + layers.activation_grid() + layers.w4a8_grid()]
    assert len(set(names)) == len(names)
    assert all(GluonHopperLinearKernel.can_implement(spec) for _, spec, _ in layers.grid())
    assert all(GluonHopperScaledMMLinearKernel.can_implement(spec) for _, spec in layers.activation_grid())
    assert all(GluonHopperW4A8LinearKernel.can_implement(spec) for _, spec in layers.w4a8_grid())
    for _, down, gate, k in layers.experts_grid():
        assert GluonHopperLinearKernel.can_experts(*specs_of(down, gate, k), gate)
    for _, spec, batches in layers.grid():
        assert min(batches) <= 16 < max(batches) and spec.n * spec.k < 1 << 20
