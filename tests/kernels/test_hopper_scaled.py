"""Host side of the Hopper kernels with quantized activations: schemes, packed layout, configs, launches, without a GPU."""

import copy
import runpy
from pathlib import Path

import pytest
import torch

from bitline import InputError, Platform, choose, types
from bitline.kernels.hopper import scaled_linear
from bitline.kernels.hopper.config import SMEM_BYTES, LargeMConfig, WgmmaConfig
from bitline.kernels.hopper.scaled_config import (
    SCALED_SMALL_M,
    fit_scaled_stages,
    m_bucket,
    scaled_small_m_config,
    scaled_smem_bytes,
)
from bitline.kernels.hopper.scaled_heuristics import GROUPED_COSTS, scaled_persistent_config
from bitline.kernels.hopper.scaled_linear import EagerScaledLinear, GluonHopperScaledMMLinearKernel
from bitline.kernels.hopper.scaled_plans import persistent_plan
from bitline.kernels.hopper.scaled_scheme import check_spec, scaled_scheme
from bitline.testing.generators import random_weight
from bitline.types import ActSpec, LinearSpec

F8, I8 = types.float8_e4m3fn, types.int8
FP8 = LinearSpec(200, 520, F8, (1, 520), scale_dtype=torch.float32, act=ActSpec(F8))
BLOCKS = FP8.replace(block=(128, 128), act=ActSpec(F8, True, "group", 128))
INT8 = FP8.replace(weight=I8, act=ActSpec(I8))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (FP8.replace(act=None), "does not quantize activations"),
        (FP8.replace(weight=I8), "weight type int8"),
        (INT8.replace(act=ActSpec(I8, True, "tensor", symmetric=False)), "zero point of the whole input"),
        (BLOCKS.replace(act=ActSpec(F8)), "weight scales change along K, activation scales do not"),
        (BLOCKS.replace(block=(1, 32), act=ActSpec(F8, True, "group", 32, scale="e8m0")), "activation scheme"),
        (BLOCKS.replace(block=(128, 192)), "scale blocks of 192 columns"),
        (BLOCKS.replace(block_offset=(0, 64)), "from 64 on"),
        (BLOCKS.replace(act_order=True), "act-order"),
        (INT8.replace(block=(1, 130)), "scales change along K"),
        (INT8.replace(weight=types.uint8, zero="int"), "zero points"),
        (INT8.replace(k=65540, block=(1, 65540)), "can overflow"),
        (FP8.replace(act=ActSpec(types.float8_e5m2)), "activations of float8_e5m2"),
    ],
    ids=str,
)
def test_refusals_have_reasons(spec, reason):
    verdict = check_spec(spec)
    assert not verdict and reason in verdict.reason and verdict.fix


@pytest.mark.parametrize(
    "spec", [FP8, BLOCKS, INT8, FP8.replace(n=64, k=128, block=(1, 128)), FP8.replace(n=1, k=1, block=(1, 1))]
)
def test_packed_blocks_hold_the_codes(spec):
    weight = random_weight(spec, 3)
    packed = GluonHopperScaledMMLinearKernel.pack(weight)
    blocks_n, blocks_k = -(-spec.n // 64), -(-spec.k // 128)
    assert packed["weight"].shape == (blocks_n * blocks_k * 64, 128)
    rows = packed["weight"].view(torch.uint8).view(blocks_n, blocks_k, 64, 128).transpose(1, 2).reshape(blocks_n * 64, -1)
    want = weight.codes[:, : spec.k] if spec.weight is F8 else weight.unpacked()
    assert torch.equal(rows[: spec.n, : spec.k], want.view(torch.uint8))
    assert not rows[spec.n :].any() and not rows[:, spec.k :].any()
    assert packed["weight"].data_ptr() != weight.codes.data_ptr()
    sizes = sum(t.nbytes for t in packed.values())
    assert sizes <= GluonHopperScaledMMLinearKernel.packed_bytes(spec) + 8


def test_act_order_is_undone_when_packing():
    weight = random_weight(FP8.replace(act_order=True), 3)
    plain = GluonHopperScaledMMLinearKernel.pack(weight)["weight"]
    rows = plain.view(torch.uint8).view(4, 5, 64, 128).transpose(1, 2).reshape(256, 640)[:200, :520]
    assert torch.equal(rows[:, weight.perm.long()], weight.codes[:, :520].view(torch.uint8))


@pytest.mark.parametrize("n", [1, 8, 63, 576, 1000, 4096, 8192, 18432, 28672, 57344, 152064])
@pytest.mark.parametrize("m", [1, 2, 9, 17, 33, 64])
def test_small_m_tiles_cover_the_rows_evenly(m, n):
    for k in (128, 4096, 28672):
        c = scaled_small_m_config(m, n, k, 132)
        tiles = -(-n // c.rows)
        assert c.tile_m >= m and c.rows % c.box_rows == 0 and 64 % c.box_rows == 0 and c.smem_bytes() <= SMEM_BYTES
        assert c.rows <= 64 * c.n64_per_warpgroup * c.num_consumer_warpgroups <= 256
        assert (tiles - 1) * c.rows < n and c.stages >= 2
        rounds = -(-tiles // 132)
        assert rounds * c.rows <= max(8, n / 132 * 1.15 + 16 * rounds), "the busiest SM has far more rows than the others"
        assert not c.private or m == 1


def test_persistent_configs_fit():
    for grouped in (False, True):
        for config in GROUPED_COSTS:
            if isinstance(config, LargeMConfig):
                for columns in (False, True):
                    large = config.fit_stages(grouped, columns)
                    assert large.stages >= 3 and large.smem_bytes(grouped, columns) <= SMEM_BYTES
            else:
                fitted = fit_scaled_stages(config, grouped)
                assert fitted.stages >= 3 and scaled_smem_bytes(fitted, grouped) <= SMEM_BYTES
    assert scaled_persistent_config(4096, 8192, 8192, scaled_scheme(FP8), 132).cta_m == 256


def test_x_is_operand_a_where_scale_blocks_are_aligned_and_m_is_large():
    aligned = BLOCKS.replace(n=8192, k=8192)
    for spec, want in ((aligned, LargeMConfig), (aligned.replace(block_offset=(40, 0)), WgmmaConfig)):
        config = scaled_persistent_config(4096, 8192, 8192, scaled_scheme(spec), 132)
        assert isinstance(config, want) and config.num_ctas > 0
        plan = persistent_plan(spec, scaled_scheme(spec), 4096, False, 132)
        assert plan.kernel_name == ("scaled_large_m" if want is LargeMConfig else "scaled_persistent")


def test_costs_grow_and_the_kernel_is_chosen():
    for spec in (FP8.replace(n=8192, k=8192, block=(1, 8192)), INT8.replace(n=8192, k=8192, block=(1, 8192))):
        costs = [GluonHopperScaledMMLinearKernel.cost(spec, Platform.parse("cuda:sm90"), m) for m in (1, 64, 256, 1024, 4096)]
        assert costs == sorted(costs)
        choice = choose(spec, "cuda:sm90")
        assert choice.kernel is GluonHopperScaledMMLinearKernel or not GluonHopperScaledMMLinearKernel.is_supported(
            Platform.parse("cuda:sm90")
        )
        assert choose(spec, "cuda:sm80").kernel is not GluonHopperScaledMMLinearKernel


@pytest.mark.parametrize("spec", [FP8, BLOCKS, INT8.replace(bias=True)], ids=["fp8", "blocks", "int8 bias"])
@pytest.mark.parametrize("shape", [(520,), (1, 520), (3, 4, 520), (64, 520), (65, 520), (2, 150, 520)], ids=str)
def test_eager_calls_make_the_launch_of_the_plan(fake, spec, shape):
    packed = list(GluonHopperScaledMMLinearKernel.pack(random_weight(spec, 1)).values())
    bias = torch.ones(spec.n, dtype=spec.act_dtype) if spec.bias else None
    x = torch.ones(shape).bfloat16()
    m = x.numel() // spec.k
    eager, plan = EagerScaledLinear(packed, bias, spec), scaled_linear.plan_of(spec, m, bias is not None, -1)
    assert eager(x) is None  # not compiled yet
    plan(x.view(m, -1), packed, bias)
    assert not fake.calls or m > SCALED_SMALL_M
    if m > SCALED_SMALL_M:  # both kernels, once each by Triton's own path
        assert not fake.calls
    assert eager(x) is None  # nor recorded; it is now
    kept = []
    for call in (eager, eager, copy.deepcopy(eager)):
        fake.calls.clear()
        y = call(x)
        if y is None:  # a copy records its own
            plan(x.view(m, -1), packed, bias)
            call(x)
            fake.calls.clear()
            y = call(x)
        kept.append(y)
        assert y.shape == (*shape[:-1], spec.n) and y.is_contiguous()
        names = [name for name, _, _ in fake.calls]
        assert names in (
            [["scaled_small_m"]] if m <= SCALED_SMALL_M else [["quantize_x", f"scaled_{k}"] for k in ("persistent", "large_m")]
        )
        for _name, count, args in fake.calls:
            *_, packed_args = args[:5], args[5:]
            maps = sum(isinstance(a, tuple) and a[:1] == ("map",) for a in packed_args)
            assert len(packed_args) - 4 * maps == count  # a map is passed with its shape and strides
        assert y.data_ptr() in {a if isinstance(a, int) else a[1] for a in fake.calls[-1][2] if isinstance(a, (int, tuple)) and a}
    for other in (x.half(), torch.ones(m, 521).bfloat16()[:, 1:]):
        assert eager(other.view(m, 520) if other.is_contiguous() else other) is None


def test_a_second_layer_is_eager_from_its_first_call_on(fake):
    x = torch.ones(100, 520).bfloat16()
    for seed in (1, 2):  # the second finds the binaries of the first
        packed = list(GluonHopperScaledMMLinearKernel.pack(random_weight(FP8, seed)).values())
        spec = FP8.replace()
        eager = EagerScaledLinear(packed, None, spec)
        for _ in range(4):
            y = eager(x)
            if y is None:
                scaled_linear.plan_of(spec, 100, False, -1)(x, packed, None)
        assert y is not None and all(eager.launches.values())
        assert packed[0].data_ptr() in {a[1] for a in fake.calls[-1][2] if isinstance(a, tuple) and a[:1] == ("map",)}


def test_one_launch_has_one_workspace_per_stream(fake):
    packed = list(GluonHopperScaledMMLinearKernel.pack(random_weight(FP8, 1)).values())
    plan = scaled_linear.plan_of(FP8, 16, False, -1)
    x = torch.ones(16, 520).bfloat16()
    plan(x, packed, None)

    def used():
        plan(x, packed, None)
        return {address for address, shape in fake.maps if shape == (16, 528)}

    first = used()
    assert used() == first and len(first) == 1
    fake.stream = 8
    assert len(used()) == 2


def test_an_input_elsewhere_is_refused():
    packed = list(GluonHopperScaledMMLinearKernel.pack(random_weight(FP8, 1)).values())
    with pytest.raises(InputError, match="on one GPU"):
        scaled_linear.run(torch.ones(1, 520).bfloat16(), packed, None, FP8)
    assert GluonHopperScaledMMLinearKernel.apply(torch.ones(0, 520).bfloat16(), packed, None, FP8).shape == (0, 200)


def test_the_page_of_results_has_the_tables_of_the_results(capsys, monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    runpy.run_path(str(root / "benchmarks" / "scaled_tables.py"), run_name="__main__")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    written = (root / "docs" / "measured" / "h200-quantized-activations.md").read_text().splitlines()
    assert len(printed) > 40 and not set(printed) - set(written), "copy the tables that benchmarks/scaled_tables.py prints"


def test_buckets_of_m():
    assert [m_bucket(m) for m in (1, 2, 8, 9, 16, 17, 33, 64)] == [1, 8, 8, 16, 16, 32, 64, 64]
