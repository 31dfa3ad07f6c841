"""The Hopper kernels' packed layout, read on a CPU as the device code reads it; arithmetic of dequantization; configs."""

import dataclasses

import pytest
import torch

from bitline import bitstream, types
from bitline.errors import InputError
from bitline.kernels.hopper import layout
from bitline.kernels.hopper.config import MAX_FLAGS, SMEM_BYTES
from bitline.kernels.hopper.heuristics import (
    SMALL_M_COSTS,
    WGMMA_COSTS,
    _candidate_num_ctas,
    small_m_config,
    small_m_config_if_faster,
    stream_k_partition,
    wgmma_config,
)
from bitline.kernels.hopper.linear import GluonHopperLinearKernel, _fold_fragment_exponent
from bitline.kernels.hopper.plans import SmallMPlan
from bitline.kernels.hopper.scheme import DequantScheme, dequant_scheme
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

BASE = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
SHAPES = [(16, 64), (48, 256), (21, 131), (5, 65), (130, 1)]


def padded_codes(weight):
    n, k = weight.shape
    n16_tiles, columns = layout.padded_shape(n, k)
    padded = torch.zeros(n16_tiles * 16, columns, dtype=torch.uint8)
    padded[:n, :k] = weight.unpacked()
    return padded


def read_by_wgmma(packed, bits):
    """Codes [rows, columns] that lane 4*g + q of warp `tile` gets in its register fragment of each k16 step, by PTX's table. The
    int32 of a step are read at 32*step + lane."""
    tiles, blocks, planes, _ = packed.shape
    out = torch.zeros(tiles * 16, blocks * 64, dtype=torch.uint8)
    for step in range(4):
        for lane in range(32):
            g, q = lane // 4, lane % 4
            at = 32 * step + lane
            for r in range(2):
                for h in range(2):
                    for e in range(2):
                        int32 = packed[:, :, h if planes == 2 else 0, at]
                        shift = 16 * e + (8 * r if bits == 8 else 4 * (r + 2 * h))
                        code = (int32 >> shift) & ((1 << bits) - 1)
                        out[g + 8 * r :: 16, 16 * step + 8 * h + 2 * q + e :: 64] = code.to(torch.uint8)
    return out


def read_by_mma_sync(packed, bits):
    """Codes that lane 4*g + q multiplies with the 32 bytes of x at column 16*q: 16 bytes at int32 32*q + 4*g, int32 j // 2 … of
    MMA (h, j) against the pairs 2*j and 2*j + 1 of half h."""
    tiles, blocks, planes, _ = packed.shape
    out = torch.zeros(tiles * 16, blocks * 64, dtype=torch.uint8)
    for lane in range(32):
        g, q = lane // 4, lane % 4
        for h in range(2):
            for j in range(2):
                for i in range(4):  # registers a0 … a3: rows g, g + 8 with b0, then with b1
                    int32 = packed[:, :, h if planes == 2 else 0, 32 * q + 4 * g + 2 * j + i // 2]
                    for e in range(2):
                        shift = 16 * e + (8 * (i % 2) if bits == 8 else 4 * (i % 2 + 2 * h))
                        column = 16 * q + 8 * h + 2 * (2 * j + i // 2) + e
                        out[g + 8 * (i % 2) :: 16, column::64] = ((int32 >> shift) & ((1 << bits) - 1)).to(torch.uint8)
    return out


@pytest.mark.parametrize("read", [read_by_wgmma, read_by_mma_sync])
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("scalar", [types.uint4b8, types.uint8b128], ids=str)
def test_both_instructions_read_the_canonical_codes(scalar, n, k, read):
    weight = random_weight(BASE.replace(n=n, k=k, weight=scalar, block=(1, k)), 1)
    packed = layout.pack_codes(weight.codes, scalar.bits, k, 0)
    assert torch.equal(read(packed, scalar.bits), padded_codes(weight))


@pytest.mark.parametrize("scalar", [types.int4, types.int8], ids=str)
def test_signed_codes_become_offset_binary(scalar):
    weight = random_weight(BASE.replace(weight=scalar), 1)
    mask = 1 << (scalar.bits - 1)
    packed = layout.pack_codes(weight.codes, scalar.bits, 520, mask)
    assert torch.equal(read_by_wgmma(packed, scalar.bits)[:200, :520], weight.unpacked() ^ mask)


def test_packing_in_chunks_is_packing_at_once(monkeypatch):
    weight = random_weight(BASE, 2)
    whole = layout.pack_codes(weight.codes, 4, 520, 0)
    monkeypatch.setattr(layout, "_CHUNK_BYTES", 1)
    assert torch.equal(layout.pack_codes(weight.codes, 4, 520, 0), whole)


def test_shards_pack_to_slices_of_the_packed_form():
    weight = random_weight(BASE.replace(n=192, k=512), 3)
    whole = GluonHopperLinearKernel.pack(weight)
    for dim, parts in ((0, 4), (1, 2)):
        shards = [GluonHopperLinearKernel.pack(weight.shard(dim, rank, parts)) for rank in range(parts)]
        for name in ("weight", "scale"):
            assert torch.equal(torch.cat([s[name] for s in shards], dim), whole[name])


def stage_swizzles():
    """(bytes copied, offsets written, bytes wanted, offsets read) of a warp, one for each 16-byte access of a lane, by the
    formulas of `small_m_pipelined`: a block of packed weights, then eight rows and 64 columns of x, whose bytes are counted row
    by row."""
    lanes = range(32)
    g, q = [lane // 4 for lane in lanes], [lane % 4 for lane in lanes]
    yield (
        [16 * lane for lane in lanes],
        [((lane // 8) * 8 + ((lane % 8) ^ (lane // 8 * 2))) * 16 for lane in lanes],
        [[128 * q[i] + 16 * g[i] for i in lanes]],
        [[128 * q[i] + (g[i] ^ (2 * q[i])) * 16 for i in lanes]],
    )
    rows = [4 * j + lane // 8 for j in range(2) for lane in lanes]
    first = [g[i] * 128 + ((2 * q[i]) ^ (g[i] % 2)) * 16 for i in lanes]
    yield (
        [128 * row + 16 * (i % 8) for i, row in enumerate(rows)],
        [128 * row + ((i % 8) ^ (i // 8 % 2)) * 16 for i, row in enumerate(rows)],
        [[128 * g[i] + 32 * q[i] + 16 * h for i in lanes] for h in range(2)],
        [first, [offset ^ 16 for offset in first]],
    )


def test_stages_give_each_lane_its_bytes_without_bank_conflicts():
    for copied, written, wanted, read in stage_swizzles():
        held = dict(zip(written, copied, strict=True))
        assert len(held) == len(copied)
        assert all([held[at] for at in offsets] == bytes_ for offsets, bytes_ in zip(read, wanted, strict=True))
        for offsets in (written, *read):
            for i in range(0, len(offsets), 8):  # eight lanes per phase of a 128-bit access
                assert len({at // 16 % 8 for at in offsets[i : i + 8]}) == 8


def dequantized(halves, mask, shifts, factor, dtype):
    """Half-words, shifted and masked as the device code does, as 16-bit floats."""
    pattern = sum(((halves << s if s >= 0 else halves >> -s) & m) for s, m in zip(shifts, mask, strict=True)) & 0xFFFF
    return pattern.to(torch.uint16).view(dtype).float() * factor


@pytest.mark.parametrize(
    "scalar, positions, factor, dtype",
    [
        (
            types.float4_e2m1,
            [*(((0x81C0,), (s,)) for s in (0, 3, 6)), ((0x8000, 0x100, 0xC0), (1, -5, -4))],
            2.0**126,
            torch.bfloat16,
        ),
        (types.float8_e4m3fn, [((0x87F0,), (0,)), ((0x80F0, 0x700), (4, -4))], 2.0**120, torch.bfloat16),
        (
            types.float4_e2m1,
            [((0x8E00,), (0,)), ((0x8E00,), (3,)), ((0x8000, 0xE00), (1, 9)), ((0x8000, 0xE00), (2, 6))],
            2.0**14,
            torch.float16,
        ),
    ],
    ids=["e2m1", "e4m3", "e2m1 fp16"],
)
def test_float_codes_are_dequantized_by_shift_and_mask(scalar, positions, factor, dtype):
    codes = torch.randint(0, 1 << scalar.bits, (4, 4, scalar.bits // 4, 128, 8 * 4 // scalar.bits))
    if scalar.bits == 8:
        codes[(codes & 127) == 127] = 0  # NaN is handled by the scale
    packed = (codes << torch.arange(codes.shape[-1]) * scalar.bits).sum(-1).to(torch.int64)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    moved = layout.spread_float_bits(packed, scalar.bits, dtype == torch.float16).view(torch.int16).to(torch.int64) & 0xFFFF
    values = torch.tensor(scalar.values())[codes.view(*packed.shape[:-1], 256, -1)]
    for i, (mask, shifts) in enumerate(positions):
        assert torch.equal(dequantized(moved, mask, shifts, factor, dtype), values[..., i])


@pytest.mark.parametrize("at, bits", [(0, 4), (4, 4), (0, 8)])
@pytest.mark.parametrize("top", [2.0**-9, 0.7, 1.0, 300.0])
def test_integers_are_scaled_as_bits_of_bfloat16(at, bits, top):
    """One fma, rounded once, gives the bfloat16 nearest to (code - implicit zero point) * scale, times 2**(F - 133)."""
    codes, zero_point = torch.arange(1 << bits), 1 << (bits - 1)
    scale = (torch.rand(500, 1).clamp(2.0**-10) * top).bfloat16()
    plain, power, alpha = _fold_fragment_exponent(scale, torch.ones(1), 133).tolist()
    factor = power / 2**at
    assert plain == 1 and alpha == 2.0**133 / power and float(scale.max()) * power <= 2.0**127
    scaled = (scale.float() * factor).bfloat16().double()
    assert torch.equal(scaled, scale.double() * factor)
    number = (codes << at).to(torch.int16).view(torch.bfloat16).double()
    minus = scaled * (-(zero_point << at) * 2.0**-133)
    assert torch.equal(minus.float().bfloat16().double(), minus)
    found = (number * scaled + minus).float().bfloat16().double() * alpha
    want = ((codes - zero_point) * scale.double()).float().bfloat16().double()
    assert torch.equal(found, want)


def test_scales_that_would_leave_the_range_are_refused():
    plain, power, alpha = _fold_fragment_exponent(torch.tensor([2.0**120]), torch.ones(1), 133).tolist()
    assert (plain, power, alpha) == (1, 2.0**6, 2.0**127)
    with pytest.raises(InputError, match=r"2\*\*121"):
        _fold_fragment_exponent(torch.tensor([1.0, -(2.0**121)]), torch.ones(1), 133)


@pytest.mark.parametrize(
    "block_k, offset, columns_per_scale, scheme",
    [(48, 0, 16, (4, 1)), (96, 0, 32, (2, 1)), (128, 64, 64, (1, 1)), (64, 32, 32, (2, 1)), (192, 0, 192, (1, 3)),
     (32, 16, 16, (4, 1)), (520, 0, 0, (1, 0)), (640, 120, 0, (1, 0))],
)  # fmt: skip
def test_scale_blocks_of_any_multiple_of_16_are_packed_as_aligned_ones(block_k, offset, columns_per_scale, scheme):
    spec = BASE.replace(n=16, weight=types.uint4, zero="int", block=(1, block_k), block_offset=(0, offset))
    weight, found = random_weight(spec, 1), dequant_scheme(spec)
    assert (found.scales_per_k_block, found.k_blocks_per_scale) == scheme and found.columns_per_scale == columns_per_scale
    packed = GluonHopperLinearKernel.pack(weight)
    for name, table in (("scale", weight.scale), ("zero", weight.zero)):
        rows = packed[name].view(torch.uint8 if name == "zero" else torch.bfloat16).permute(0, 3, 2, 1).reshape(16, -1)
        assert rows.shape[1] == (-(-576 // columns_per_scale) if columns_per_scale else 1)
        columns = torch.arange(520)
        entry = columns // columns_per_scale if columns_per_scale else columns * 0
        assert torch.equal(rows[:, entry], table[:, (columns + offset) // block_k])


def test_bytes_of_a_row_side_by_side():
    packed = torch.arange(0x03020100, 0x03020100 + 1, dtype=torch.int32).repeat(2, 2, 2, 128)
    assert torch.equal(layout.byte_pairs(packed), torch.full_like(packed, 0x03010200))


def test_a_scale_table_holds_rows_g_and_g_plus_8_side_by_side():
    values = torch.randn(21, 3)
    table = layout.scale_table(values, torch.arange(21))
    assert table.shape == (2, 3, 8, 2)
    for row in range(32):
        want = values[row] if row < 21 else torch.zeros(3)
        assert torch.equal(table[row // 16, :, row % 8, row // 8 % 2], want)
    blocks = layout.scale_table(values[:2], torch.arange(21) // 16)
    assert torch.equal(blocks[0, :, 3, 1], values[0]) and torch.equal(blocks[1, :, 4, 0], values[1])


def test_e4m3_nan_makes_its_row_nan():
    spec = BASE.replace(n=32, k=64, block=(32, 64), weight=types.float8_e4m3fn)
    weight = random_weight(spec, 1)
    codes = weight.codes.clone()
    codes[5, 9] = 0xFF
    packed = GluonHopperLinearKernel.pack(dataclasses.replace(weight, codes=codes))["scale"]
    rows = packed.permute(0, 3, 2, 1).reshape(32)
    assert rows.isnan().nonzero().tolist() == [[5]]


def test_bits_per_weight():
    for scale, most in ((torch.bfloat16, 4.125), (torch.float16, 4.25)):
        spec = BASE.replace(n=4096, k=4096, scale_dtype=scale)
        assert (GluonHopperLinearKernel.packed_bytes(spec) - 12) * 8 / (4096 * 4096) <= most
        packed = GluonHopperLinearKernel.pack(random_weight(spec.replace(n=64, k=256), 1))
        assert sum(t.nbytes for t in packed.values()) == GluonHopperLinearKernel.packed_bytes(spec.replace(n=64, k=256))


def test_what_it_accepts_and_refuses():
    e2m1 = BASE.replace(weight=types.float4_e2m1)
    accepted = [BASE, BASE.replace(block=(1, 32)), BASE.replace(block=(1, 48)), BASE.replace(block_offset=(0, 32)),
             BASE.replace(block=(1, 520)), BASE.replace(weight=types.uint4, zero="int"),
             BASE.replace(weight=types.int8, act_dtype=torch.float16), BASE.replace(act_order=True),
             e2m1.replace(act_dtype=torch.float16), e2m1.replace(act_dtype=torch.float16, block=(1, 32)),
             e2m1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(200, 520))]  # fmt: skip
    assert all(isinstance(dequant_scheme(s), DequantScheme) for s in accepted)
    for spec in (BASE.replace(weight=types.uint2b2), BASE.replace(block=(1, 40)), BASE.replace(weight=types.uint4, zero="float"),
                 BASE.replace(act=types.ActSpec(types.int8)), BASE.replace(block_offset=(0, 24))):  # fmt: skip
        verdict = GluonHopperLinearKernel.can_implement(spec)
        assert not verdict and verdict.reason and verdict.fix


def test_padding_does_not_depend_on_undefined_bits():
    weight = random_weight(BASE.replace(k=33, block=(1, 33)), 1)
    clean = bitstream.pack(weight.unpacked(), 4)
    assert torch.equal(layout.pack_codes(weight.codes, 4, 33, 0), layout.pack_codes(clean, 4, 33, 0))


def work_of(cta, num_ctas, whole_tiles, stream_k_stages, stages_per_tile):
    """`wgmma_persistent.get_work` of one CTA: (tile, k0, k1) in its order of work."""
    u0, u1 = cta * stream_k_stages // num_ctas, (cta + 1) * stream_k_stages // num_ctas
    found = [(cta + s * num_ctas, 0, stages_per_tile) for s in range(whole_tiles)]
    for j in range((u1 - 1) // stages_per_tile - u0 // stages_per_tile + 1 if u1 > u0 else 0):
        tile = u0 // stages_per_tile + j
        k0, k1 = u0 - tile * stages_per_tile if j == 0 else 0, min(stages_per_tile, u1 - tile * stages_per_tile)
        found.append((whole_tiles * num_ctas + tile, k0, k1))
    return found


@pytest.mark.parametrize("num_tiles", [1, 2, 7, 64, 133, 224, 642])
@pytest.mark.parametrize("stages", [1, 2, 9, 34, 68])
@pytest.mark.parametrize("num_ctas", [1, 7, 107, 128, 132])
def test_every_stage_of_every_tile_has_one_cta_and_all_partials_are_awaited(num_tiles, stages, num_ctas):
    num_ctas, whole_tiles, stream_k_stages = stream_k_partition(num_tiles, stages, num_ctas)
    done = torch.zeros(num_tiles, stages, dtype=torch.int64)
    partials = torch.zeros(num_tiles, dtype=torch.int64)
    awaited = torch.zeros(num_tiles, dtype=torch.int64)
    for cta in range(num_ctas):
        work = work_of(cta, num_ctas, whole_tiles, stream_k_stages, stages)
        assert work, "a CTA without work would wait for data that no producer loads"
        for tile, k0, k1 in work:
            assert 0 <= k0 < k1 <= stages
            done[tile, k0:k1] += 1
            partials[tile] += k0 > 0
            if k0 == 0 and k1 < stages:
                end = ((tile - whole_tiles * num_ctas + 1) * stages * num_ctas + stream_k_stages - 1) // stream_k_stages
                awaited[tile] = end - 1 - cta
    assert (done == 1).all() and torch.equal(partials, awaited)


@pytest.mark.parametrize("stages", [1, 2, 9, 34])
@pytest.mark.parametrize("num_tiles, num_ctas", [(32, 128), (64, 128), (43, 129), (160, 128), (12, 132), (66, 264)])
def test_in_a_distributed_reduction_each_slice_has_one_cta(num_tiles, num_ctas, stages):
    num_ctas, whole_tiles, stream_k_stages = stream_k_partition(num_tiles, stages, num_ctas)
    if not stream_k_stages or num_ctas * stages % stream_k_stages:
        return  # whole tiles, or fewer stages than CTAs
    ctas_per_tile = num_ctas * stages // stream_k_stages
    slices = 4 if ctas_per_tile % 4 == 0 else 2
    kept, arrived = torch.zeros(slices, num_ctas // ctas_per_tile), torch.zeros(slices, num_ctas // ctas_per_tile)
    for cta in range(num_ctas):
        rank, group = cta % ctas_per_tile, cta // ctas_per_tile
        work = work_of(cta, num_ctas, whole_tiles, stream_k_stages, stages)
        stream_k_tiles = [tile for tile, k0, k1 in work if k1 - k0 < stages]
        assert stream_k_tiles == [whole_tiles * num_ctas + group]  # one, so that nothing waits behind its wait
        for i in range(slices):
            kept[i, group] += rank == i * ctas_per_tile // slices
            arrived[i, group] += rank != i * ctas_per_tile // slices
    assert (kept == 1).all() and (arrived == ctas_per_tile - 1).all()


def test_stream_k_flags_fit():
    for config in WGMMA_COSTS:
        for num_tiles in (1, 2, 31, 64, 131, 132, 224, 1000):
            for num_ctas in _candidate_num_ctas(num_tiles, 132, config):
                stream_k_tiles = stream_k_partition(num_tiles, 32, num_ctas)[2] // 32
                assert 0 < num_ctas <= 132 * config.ctas_per_sm
                assert stream_k_tiles * config.num_consumer_warpgroups * (4 if config.split_reduce else 1) <= MAX_FLAGS


@pytest.mark.parametrize("warpgroups", [2, 4])
@pytest.mark.parametrize("stages_of_tiles", [[1], [3, 1, 5], [2, 2]])
def test_the_pingpong_schedule_neither_deadlocks_nor_overtakes(warpgroups, stages_of_tiles):
    """The named barriers of `mma_stage_pingpong`, of two warpgroups each, in every order in which they may run."""
    total = sum(stages_of_tiles)
    for order in range(warpgroups):
        arrived, done = [0] * warpgroups, [0] * warpgroups
        arrived[0] = 1  # by the last one, at the start
        log = []
        while any(count < total for count in done):
            ready = [c for c in range(warpgroups) if done[c] < total and arrived[c]]
            assert ready, "deadlock"
            c = ready[order % len(ready)]
            arrived[c] -= 1
            done[c] += 1
            log.append(c)
            if c < warpgroups - 1 or done[c] < total:
                arrived[(c + 1) % warpgroups] += 1
                assert arrived[(c + 1) % warpgroups] == 1  # a second arrival would be lost
        assert log == [i % warpgroups for i in range(total * warpgroups)] and not any(arrived)


def test_every_m_has_a_wgmma_config():
    for m in (17, 33, 96, 97, 300, 1000, 2049, 50000):
        for n, k in ((16, 64), (1024, 4096), (13653, 4304), (151936, 4096)):
            config = wgmma_config(m, n, k, 132)
            assert 1 <= config.num_ctas <= 132 * config.ctas_per_sm and config.cta_m < max(4 * m, 320)


@pytest.mark.parametrize(
    "n, k", [(1, 64), (100, 4160), (1024, 4096), (4096, 4096), (4104, 4160), (8192, 8192), (13653, 4304), (57344, 72)]
)
def test_small_m_configs_fit_the_layer_and_shared_memory(n, k):
    base = BASE.replace(n=n, k=k)
    for spec in (base, base.replace(weight=types.uint8, zero="int", block=(1, 16), scale_dtype=torch.float32)):
        scheme, (n16_tiles, columns) = dequant_scheme(spec), layout.padded_shape(n, k)
        for m in (1, 4, 8, 9, 16, 17, 24, 25, 32):
            if m <= 16:
                config = small_m_config(m, n16_tiles, columns // 64, scheme, k % 128 == 0)
            else:
                config = small_m_config_if_faster(m, n16_tiles, n, k, scheme)
            if config is None:
                continue  # wgmma is faster
            plan = SmallMPlan(spec, scheme, m, False, config)
            assert config.smem_bytes(scheme, m) <= SMEM_BYTES
            if config.stages:
                assert config.n16_per_cta <= n16_tiles and config.num_warps % config.warps_per_k_slice == 0
                assert config.k_tiles_per_iter == 1
            assert plan.num_ctas // config.split_k <= MAX_FLAGS
            iterations, per_iteration = plan.scalars[-1], config.k_slices * config.k_tiles_per_iter * config.split_k
            k_tiles = -(-columns // (64 * plan.constants[1].k_blocks_per_tile))
            assert (iterations - 1) * per_iteration < k_tiles <= iterations * per_iteration  # every K tile has a warp
            assert plan.num_ctas == -(-n16_tiles // config.n16_per_cta) * config.split_k


@pytest.mark.parametrize("m", [8, 16, 24, 32])
def test_small_m_configs_are_fitted_to_every_scheme(m):
    fp32 = BASE.replace(k=1024, scale_dtype=torch.float32)
    for spec in [fp32.replace(weight=types.uint8, zero="int", block=(1, g)) for g in (16, 32, 64, 1024)] + [BASE]:
        scheme = dequant_scheme(spec)
        for row in SMALL_M_COSTS[m // 8]:
            for ctas_per_sm in (1, 2, 4):
                config = row.config.fit_stages(scheme, m, ctas_per_sm)
                if config:
                    assert 2 <= config.stages <= row.config.stages
                    assert ctas_per_sm * (config.smem_bytes(scheme, m) + 1024) <= 227 * 1024
        assert scheme.bits == 8 or row.config.fit_stages(scheme, m)


def test_wgmma_configs_are_fitted_to_every_scheme():
    fp32 = BASE.replace(k=1024, scale_dtype=torch.float32)
    specs = [fp32.replace(weight=types.uint8, zero="int", block=(1, g)) for g in (16, 32, 64, 1024)] + [BASE]
    for spec in specs:
        for config in WGMMA_COSTS:
            fitted = config.fit_stages(dequant_scheme(spec))
            assert fitted.stages >= 2 and fitted.smem_bytes(dequant_scheme(spec)) <= SMEM_BYTES
