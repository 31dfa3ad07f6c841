"""The W8A8 Triton kernels under Triton's interpreter, in a process of its own: interpreted and compiled code do not mix."""

import pytest
import torch
from interpreter import needs_interpreter, run_interpreted, tiers

import bitline
from bitline import Platform, types
from bitline.kernels.triton.scaled_mm import TritonFp8BlockScaledMMKernel, TritonInt8ScaledMMLinearKernel, _scale_interval
from bitline.testing.conformance import check_kernel
from bitline.types import ActSpec, LinearSpec
from thinning import thinned

pytest.importorskip("triton")

INT8 = LinearSpec(40, 200, types.int8, (1, 200), act=ActSpec(types.int8))
FP8 = LinearSpec(
    200, 330, types.float8_e4m3fn, (128, 128), scale_dtype=torch.float32, act=ActSpec(types.float8_e4m3fn, True, "group", 128)
)
INT8_SPECS = [
    INT8,
    INT8.replace(block=(40, 200), bias=True, act=ActSpec(types.int8, True, "tensor")),
    INT8.replace(act=ActSpec(types.int8, True, "token", 0, False), act_dtype=torch.float16),
    INT8.replace(act=ActSpec(types.int8, False, "tensor", 0, False), act_dtype=torch.float32),
    INT8.replace(act=ActSpec(types.int8, False, "tensor"), weight=types.uint4b8),
    INT8.replace(act_order=True, n=33, k=77, block=(1, 77)),
]
FP8_SPECS = [
    FP8,
    FP8.replace(bias=True, act_dtype=torch.float16, n=33),
    FP8.replace(block_offset=(72, 32)),
    FP8.replace(block=(1, 330)),
    FP8.replace(
        block=(1, 32), scale_dtype=torch.float8_e8m0fnu, act=ActSpec(types.float8_e4m3fn, True, "group", 32, scale="e8m0")
    ),
]


@tiers
def test_under_the_interpreter(tier):
    run_interpreted(__file__, tier)


@needs_interpreter
@pytest.mark.parametrize("spec", thinned(INT8_SPECS, 6, start=1), ids=lambda s: s.scheme)
def test_int8(spec):
    assert check_kernel(TritonInt8ScaledMMLinearKernel, [spec], Platform.detect("cpu")).passed


@needs_interpreter
@pytest.mark.parametrize("spec", thinned(FP8_SPECS, 5, start=4), ids=lambda s: s.scheme)
def test_fp8_blocks(spec):
    assert check_kernel(TritonFp8BlockScaledMMKernel, [spec], Platform.detect("cpu")).passed


def test_no_tile_crosses_a_scale_block():
    """A tile of K with more than one scale would silently use the first."""
    for block, offset, group in ((128, 0, 128), (128, 32, 128), (64, 0, 128), (128, 64, 32), (32, 0, 32), (96, 0, 96)):
        act = ActSpec(types.float8_e4m3fn, True, "group", group)
        spec = FP8.replace(k=4096, block=(128, block), block_offset=(0, offset), act=act)
        step = _scale_interval(spec)
        for start in range(0, 4096, step):
            stop = min(start + step, 4096) - 1
            assert (start + offset) // block == (stop + offset) // block and start // group == stop // group
    assert "within 8 columns" in TritonFp8BlockScaledMMKernel.can_implement(FP8.replace(block_offset=(0, 8))).reason


def test_where_they_are_offered():
    def names(spec, platform):
        return [c.name for c in bitline.choose(spec, platform).candidates if c.verdict]

    for platform in ("cuda:sm80", "cuda:sm90", "rocm:gfx942", "rocm:gfx1100", "xpu"):
        assert "TritonInt8ScaledMMLinearKernel" in names(INT8, platform)
    assert "TritonInt8ScaledMMLinearKernel" not in names(INT8, "cuda:sm75")
    for platform, offered in (("cuda:sm90", True), ("cuda:sm80", False), ("rocm:gfx1201", True), ("rocm:gfx942", False)):
        assert ("TritonFp8BlockScaledMMKernel" in names(FP8, platform)) == offered
