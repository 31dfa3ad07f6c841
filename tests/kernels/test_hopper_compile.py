"""The Hopper kernels compile ahead of time for sm_90a, and the machine code is what is claimed of it. No GPU needed."""

import pytest
from compile_targets import hopper_reports

pytest.importorskip("triton")

# Instructions of the main loop per weight of a thread, at most: what the kernels had when they were measured.
SMALL_M = {"g128": 2.8, "odd g128": 3.0, "odd bias g128": 3.0, "int8": 3.3, "g64 zero": 3.8, "uint8 zero": 4.0, "FP8": 3.1}
PIPELINED = {8: 2.0, 16: 3.0, 24: 3.5, 32: 4.0}  # by M
WGMMA = {"g128": 3.1, "int8": 2.5, "uint8 zero": 3.1, "FP8": 3.2}


def most_instructions(label, m):
    if " pipelined " in label:
        return PIPELINED[m]
    table, most = (SMALL_M, 3.3) if m <= 16 else (WGMMA, 3.5)
    return max((v for name, v in table.items() if label.endswith(name)), default=most)


@pytest.mark.parametrize("step", [pytest.param(48, id="48th"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)])
def test_compiles(step, tmp_path):
    found = hopper_reports("hopper_targets.py", tmp_path, step)
    assert len(found) >= 80 // step
    for kernel in found:
        label, m = kernel["kernel"].split(" M=")
        assert kernel["a_in_registers"], f"{kernel['kernel']}: operand A is not in registers"
        if "loop" not in kernel:
            continue  # Triton's package has no disassembler here
        assert kernel["mmas"] > 0, kernel
        assert kernel["loop"] <= most_instructions(label, int(m)) * kernel["weights"], kernel
        most = 8 if int(m) > 256 and "g128" not in label else 4 if " pipelined 7 " in label and int(m) == 24 else 0
        assert kernel["spills"] <= most, f"{kernel['kernel']} spills in its main loop"
