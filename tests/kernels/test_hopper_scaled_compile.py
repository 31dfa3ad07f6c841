"""The Hopper kernels with quantized activations compile for sm_90a into the instructions claimed of them. No GPU needed."""

import pytest
from compile_targets import hopper_reports

pytest.importorskip("triton")


@pytest.mark.parametrize("step", [pytest.param(13, id="13th"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)])
def test_compiles(step, tmp_path):
    found = hopper_reports("hopper_scaled_targets.py", tmp_path, step)
    assert len(found) >= 110 // step
    for kernel in found:
        want = "s32.s8.s8" if kernel["label"].startswith("int8") else "f32.e4m3.e4m3"
        assert kernel["wgmma"] == [want], kernel
        if "loop" not in kernel:
            continue  # Triton's package has no disassembler here
        assert kernel["mmas"] >= 4, kernel
        assert kernel["spills"] == 0, f"{kernel['label']} spills in its main loop"
        if kernel["kernel"] == "scaled_persistent":  # an addition per accumulator, or two instructions, and little else
            by_row = "offset" in kernel["label"] or "e8m0" in kernel["label"]  # a weight scale for each row, not one for all
            assert kernel["loop"] <= kernel["mmas"] // 4 * (2 * kernel["accumulators"] + (70 if by_row else 60)), kernel
        if kernel["kernel"] == "scaled_large_m":  # one instruction per accumulator
            assert kernel["loop"] <= kernel["mmas"] // 4 * (kernel["accumulators"] + 60), kernel
