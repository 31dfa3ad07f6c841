"""Host side of the Hopper kernels with 4-bit weights and 8-bit activations: schemes, packed layout, unpacking, configs."""

import random
import re

import pytest
import torch

from bitline import Platform, choose, types
from bitline.kernels.hopper.config import SMEM_BYTES
from bitline.kernels.hopper.scaled_linear import GluonHopperScaledMMLinearKernel, small_m_limit
from bitline.kernels.hopper.w4a8_config import RESIDENT_K, fit_persistent_stages, w4a8_small_m_config
from bitline.kernels.hopper.w4a8_heuristics import COSTS, w4a8_persistent_config
from bitline.kernels.hopper.w4a8_linear import GluonHopperW4A8LinearKernel
from bitline.kernels.hopper.w4a8_scheme import UNPACK_PTX, check_w4a8, w4a8_scheme
from bitline.testing.generators import random_weight
from bitline.types import ActSpec, LinearSpec

F8, I8, U4, I4, E2M1 = types.float8_e4m3fn, types.int8, types.uint4b8, types.int4, types.float4_e2m1
INT8 = LinearSpec(200, 520, U4, (1, 128), scale_dtype=torch.bfloat16, act=ActSpec(I8))
FP8 = INT8.replace(act=ActSpec(F8))
SPECS = [
    INT8, FP8, FP8.replace(weight=I4, block=(1, 520)), INT8.replace(weight=I4, block=(1, 64)), FP8.replace(block=(1, 32)),
    FP8.replace(weight=E2M1, block=(1, 32), scale_dtype=torch.float8_e8m0fnu), INT8.replace(n=67, k=129, block=(67, 129)),
    FP8.replace(block=(1, 256)), INT8.replace(n=5, k=3, block=(1, 3)), FP8.replace(block=(1, 520), act_order=True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (INT8.replace(act=None), "does not quantize activations"),
        (INT8.replace(weight=types.uint3b4), "uint3b4 weights"),
        (INT8.replace(weight=E2M1), "float4_e2m1 weights with activations of int8"),
        (INT8.replace(weight=types.uint4, zero="int"), "uint4 weights"),
        (INT8.replace(act=ActSpec(I8, symmetric=False)), "activation scheme"),
        (FP8.replace(act=ActSpec(F8, True, "group", 128)), "activation scheme"),
        (FP8.replace(block=(1, 48)), "groups of 48"),
        (FP8.replace(block=(1, 16)), "groups of 16"),
        (FP8.replace(block_offset=(0, 64)), "offset by 64"),
        (FP8.replace(block=(64, 520)), "scale blocks of 64 rows"),
        (FP8.replace(act_order=True), "act-order"),
        (FP8.replace(scale2_block=(200, 520)), "two levels"),
        (INT8.replace(k=65540), "can overflow"),
    ],
    ids=str,
)
def test_refusals_have_reasons(spec, reason):
    verdict = check_w4a8(spec)
    assert not verdict and reason in verdict.reason and verdict.fix


def run_ptx(assembly, words):
    """The eight int32 [n] that a statement of `UNPACK_PTX` makes of words int32 [n, 4]."""
    registers = {f"${8 + i}": words[:, i].long() & 0xFFFFFFFF for i in range(4)}
    value = lambda name: registers[name] if name in registers else torch.tensor(int(name, 0))
    for statement in filter(None, (s.strip() for s in re.sub(r"[{}]|\.reg[^;]*;", "", assembly).split(";"))):
        op, operands = statement.split(" ", 1)
        out, *args = (o.strip() for o in operands.split(","))
        a = [value(x) for x in args]
        registers[out] = {
            "mov.b32": lambda a: a[0], "and.b32": lambda a: a[0] & a[1], "or.b32": lambda a: a[0] | a[1],
            "shl.b32": lambda a: a[0] << a[1], "shr.u32": lambda a: a[0] >> a[1], "add.u32": lambda a: a[0] + a[1],
            "lop3.b32": lambda a: (a[0] & a[1]) | a[2],
        }[op](a) & 0xFFFFFFFF  # fmt: skip
        assert op != "lop3.b32" or args[3] == "0xEA"
    return [registers[f"${i}"] for i in range(8)]


def unpacked(packed, assembly, fp8):
    """Values [rows, columns] that lanes get in their fragments: PTX's m64nNk32 table, read back from packed int32."""
    tiles, blocks = packed.shape[:2]
    lanes = packed.view(tiles, blocks, 2, 32, 4)
    out = torch.full((tiles, 16, blocks, 128), float("nan"))
    for h in range(2):
        for lane in range(32):
            g, q = divmod(lane, 4)
            registers = run_ptx(assembly, lanes[:, :, h, lane].reshape(-1, 4))
            for i, register in enumerate(registers):  # two of a word: rows g and g + 8
                raw = register.to(torch.int64).view(-1, 1) >> torch.tensor([0, 8, 16, 24]) & 255
                codes = raw.to(torch.uint8).view(torch.float8_e4m3fn if fp8 else torch.int8).float()
                column = 64 * h + 16 * (i // 2) + 4 * q
                out[:, g + 8 * (i % 2), :, column : column + 4] = codes.view(tiles, blocks, 4)
    return out.reshape(tiles * 16, blocks * 128)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.key)
def test_fragments_times_scales_are_the_weight(spec):
    weight, scheme = random_weight(spec, 3), w4a8_scheme(spec)
    packed = GluonHopperW4A8LinearKernel.pack(weight)
    assert sum(t.nbytes for t in packed.values()) <= GluonHopperW4A8LinearKernel.packed_bytes(spec) + 8
    values = unpacked(packed["weight"], scheme.traits.unpack_ptx[0], scheme.traits.fp8)
    if scheme.small_m_traits(False).odd:
        odd = unpacked(packed["weight"], UNPACK_PTX["odd", True][0], True)
        assert torch.equal(odd, values + 2.0**-9)
    tiles, groups = packed["scale"].shape[:2]
    table = packed["scale"].view(tiles, groups, 8, 2).permute(0, 3, 2, 1).reshape(tiles * 16, groups)
    columns = spec.block[1] if scheme.traits.scaled_in_groups else 1 << 30
    by_column = table[:, torch.arange(values.shape[1]).div(columns, rounding_mode="floor").clamp(max=groups - 1)]
    want = weight.dequantize(torch.float32)
    assert torch.allclose((values * by_column)[: spec.n, : spec.k], want, rtol=1e-6, atol=0)
    assert not values[spec.n :].any() and not values[:, spec.k :].any()


@pytest.mark.parametrize(
    "spec", [INT8, FP8, FP8.replace(block=(1, 32)), FP8.replace(block=(1, 384)), INT8.replace(block=(1, 256))]
)
@pytest.mark.parametrize("m", [1, 2, 9, 17, 32])
def test_small_m_tiles_cover_the_rows_evenly(m, spec):
    for n in (1, 16, 63, 576, 1000, 4096, 8192, 18432, 28672, 57344, 152064):
        for k in (512, 4096, 28672):
            scheme = w4a8_scheme(spec.replace(n=n, k=k))
            c = w4a8_small_m_config(m, n, k, scheme, 132)
            tiles16 = -(-n // 16)
            tiles = -(-tiles16 // c.n16)
            assert c.tile_m >= m and c.n16 <= 16 and c.smem_bytes() <= SMEM_BYTES
            assert c.stages >= 2 and c.stages % 2 == 0
            rounds = -(-tiles // 132)
            assert rounds * c.n16 <= tiles16 / 132 + rounds, "the busiest SM has far more rows than the others"
            assert c.resident == (m == 1 and k <= RESIDENT_K)
            per_scale = scheme.traits.k_blocks_per_scale
            assert max(per_scale, c.k_blocks) % min(per_scale, c.k_blocks) == 0, "a stage ends within a scale's columns"
            assert c.scale_entries * per_scale >= c.k_blocks * scheme.traits.groups_per_k_block


class Barrier:
    """An mbarrier of one arrival: how many phases have completed."""

    def __init__(self):
        self.completed = 0

    def passes(self, parity):
        return self.completed % 2 != parity


def replay(stages, steps, tiles, seed):
    """The counts of the stages that the warpgroups of `w4a8_small_m` read, with loads that complete in any order; None where one
    reads a stage whose load has not completed, or one that is not its own."""
    pick = random.Random(seed)
    full, empty = [Barrier() for _ in range(stages)], [Barrier() for _ in range(stages)]
    total, issued, in_flight, held, read = steps * tiles, 0, [], [None] * stages, []
    work = [  # of each warpgroup, in order
        [t * steps + s for t in range(tiles) for s in range((t * steps + w) % 2, steps, 2)] for w in range(2)
    ]  # fmt: skip
    while len(read) < total:
        actor = pick.choice(["producer", "copy", 0, 1, 1])
        if actor == "producer" and issued < total:
            stage = issued % stages
            if issued < stages or empty[stage].passes((issued // stages - 1) % 2):
                in_flight.append(issued)
                issued += 1
        elif actor == "copy" and in_flight:
            count = in_flight.pop(pick.randrange(len(in_flight)))
            held[count % stages] = count
            full[count % stages].completed += 1
        elif actor in (0, 1) and work[actor]:
            count = work[actor][0]
            stage = count % stages
            if full[stage].passes(count // stages % 2):
                if held[stage] != count:
                    return None
                held[stage] = None
                empty[stage].completed += 1
                read.append(work[actor].pop(0))
    return sorted(read)


def test_warpgroups_that_share_k_read_every_stage_once_it_is_there():
    for stages in (2, 4, 6, 12, 16):
        for steps, tiles in ((1, 5), (14, 1), (13, 3), (28, 2)):
            for seed in range(20):
                assert replay(stages, steps, tiles, seed) == list(range(steps * tiles))
    assert any(replay(3, 14, 1, seed) is None for seed in range(200)), "an odd number of stages, which is wrong"


def test_persistent_configs_fit_and_grow():
    for spec in SPECS[:5]:
        scheme = w4a8_scheme(spec)
        assert all(fit_persistent_stages(config, scheme).stages >= 3 for config in COSTS)
    assert w4a8_persistent_config(4096, 8192, 8192, w4a8_scheme(FP8.replace(n=8192, k=8192)), 132).cta_m == 256
    assert w4a8_persistent_config(4096, 8192, 8192, w4a8_scheme(INT8.replace(n=8192, k=8192)), 132).cta_m < 256
    assert small_m_limit(FP8) < small_m_limit(FP8.replace(weight=F8, block=(1, 520)))


@pytest.mark.parametrize("spec", [INT8, FP8], ids=lambda s: s.key)
def test_costs_grow_and_the_kernel_is_chosen(spec):
    spec = spec.replace(n=8192, k=8192)
    costs = [GluonHopperW4A8LinearKernel.cost(spec, Platform.parse("cuda:sm90"), m) for m in (1, 16, 64, 256, 1024, 4096)]
    assert costs == sorted(costs)
    supported = GluonHopperW4A8LinearKernel.is_supported(Platform.parse("cuda:sm90"))
    if supported:
        assert choose(spec, "cuda:sm90").kernel is GluonHopperW4A8LinearKernel
    assert choose(spec, "cuda:sm80").kernel is not GluonHopperW4A8LinearKernel
    assert "GluonHopperW4A8LinearKernel" in GluonHopperScaledMMLinearKernel.can_implement(spec).fix
