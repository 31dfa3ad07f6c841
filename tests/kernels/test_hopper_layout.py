"""The Hopper kernels' packed layout, walked on a CPU as the device code walks it, and their decoders' arithmetic."""

import dataclasses

import pytest
import torch

from bitline import bitstream, types
from bitline.errors import InputError
from bitline.kernels.hopper import launch, layout
from bitline.kernels.hopper.heuristics import (
    _COSTS,
    _FEW,
    _programs,
    decode_tile,
    few_tile,
    shares,
    wide_tile,
)
from bitline.kernels.hopper.linear import GluonHopperLinearKernel, _folded
from bitline.kernels.hopper.scheme import Scheme, scheme_of
from bitline.testing.generators import random_weight
from bitline.types import LinearSpec

BASE = LinearSpec(200, 520, types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
SHAPES = [(16, 64), (48, 256), (21, 131), (5, 65), (130, 1)]


def padded_codes(weight):
    n, k = weight.shape
    tiles, columns = layout.padded(n, k)
    whole = torch.zeros(tiles * 16, columns, dtype=torch.uint8)
    whole[:n, :k] = weight.unpacked()
    return whole


def wgmma_walk(words, width):
    """What lane 4*g + q of warp `tile` gets as its register fragment of each step of 16 columns, by PTX's table: codes
    [rows, columns]. Words of a step are read at 32*step + lane."""
    tiles, blocks, planes, _ = words.shape
    out = torch.zeros(tiles * 16, blocks * 64, dtype=torch.uint8)
    for step in range(4):
        for lane in range(32):
            g, q = lane // 4, lane % 4
            at = 32 * step + lane
            for r in range(2):
                for h in range(2):
                    for e in range(2):
                        word = words[:, :, h if planes == 2 else 0, at]
                        shift = 16 * e + (8 * r if width == 8 else 4 * (r + 2 * h))
                        code = (word >> shift) & ((1 << width) - 1)
                        out[g + 8 * r :: 16, 16 * step + 8 * h + 2 * q + e :: 64] = code.to(torch.uint8)
    return out


def mma_walk(words, width):
    """What lane 4*g + q multiplies with the 32 bytes of x at column 16*q: 16 bytes of words at 32*q + 4*g, word j // 2 … of
    product (h, j) against the pairs 2*j and 2*j + 1 of half h."""
    tiles, blocks, planes, _ = words.shape
    out = torch.zeros(tiles * 16, blocks * 64, dtype=torch.uint8)
    for lane in range(32):
        g, q = lane // 4, lane % 4
        for h in range(2):
            for j in range(2):
                for i in range(4):  # registers a0 … a3: rows g, g + 8 with b0, then with b1
                    word = words[:, :, h if planes == 2 else 0, 32 * q + 4 * g + 2 * j + i // 2]
                    for e in range(2):
                        shift = 16 * e + (8 * (i % 2) if width == 8 else 4 * (i % 2 + 2 * h))
                        column = 16 * q + 8 * h + 2 * (2 * j + i // 2) + e
                        out[g + 8 * (i % 2) :: 16, column::64] = ((word >> shift) & ((1 << width) - 1)).to(torch.uint8)
    return out


@pytest.mark.parametrize("walk", [wgmma_walk, mma_walk])
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("scalar", [types.uint4b8, types.uint8b128], ids=str)
def test_both_readers_see_the_canonical_codes(scalar, n, k, walk):
    weight = random_weight(BASE.replace(n=n, k=k, weight=scalar, block=(1, k)), 1)
    words = layout.pack_words(weight.codes, scalar.bits, k, 0)
    assert torch.equal(walk(words, scalar.bits), padded_codes(weight))


@pytest.mark.parametrize("scalar", [types.int4, types.int8], ids=str)
def test_signed_codes_become_offset_binary(scalar):
    weight = random_weight(BASE.replace(weight=scalar), 1)
    flip = 1 << (scalar.bits - 1)
    words = layout.pack_words(weight.codes, scalar.bits, 520, flip)
    assert torch.equal(wgmma_walk(words, scalar.bits)[:200, :520], weight.unpacked() ^ flip)


def test_packing_in_runs_is_packing_at_once(monkeypatch):
    weight = random_weight(BASE, 2)
    whole = layout.pack_words(weight.codes, 4, 520, 0)
    monkeypatch.setattr(layout, "_CHUNK_BYTES", 1)
    assert torch.equal(layout.pack_words(weight.codes, 4, 520, 0), whole)


def test_rows_cut_before_packing_are_rows_of_the_packed_form():
    weight = random_weight(BASE.replace(n=192, k=512), 3)
    whole = GluonHopperLinearKernel.pack(weight)
    for dim, parts in ((0, 4), (1, 2)):
        shards = [GluonHopperLinearKernel.pack(weight.shard(dim, rank, parts)) for rank in range(parts)]
        for name in ("words", "scale"):
            assert torch.equal(torch.cat([s[name] for s in shards], dim), whole[name])


def ring_places():
    """(bytes copied, places written, bytes wanted, places read) of a warp, one for each 16-byte access of a lane, by the
    formulas of `ring_device`: a block of words, then eight rows and 64 columns of x, whose bytes are counted row by row."""
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
        [first, [at ^ 16 for at in first]],
    )


def test_the_ring_gives_each_lane_its_bytes_and_meets_no_bank_twice():
    for copied, written, wanted, read in ring_places():
        held = dict(zip(written, copied, strict=True))
        assert len(held) == len(copied)
        assert all([held[at] for at in places] == bytes_ for places, bytes_ in zip(read, wanted, strict=True))
        for places in (written, *read):
            for i in range(0, len(places), 8):  # eight lanes are served at a time
                assert len({at // 16 % 8 for at in places[i : i + 8]}) == 8


def decoded(halves, mask, shifts, factor, dtype):
    """Half-words, shifted and masked as the device code does, as the 16-bit floats that they are."""
    pattern = sum(((halves << s if s >= 0 else halves >> -s) & m) for s, m in zip(shifts, mask, strict=True)) & 0xFFFF
    return pattern.to(torch.uint16).view(dtype).float() * factor


@pytest.mark.parametrize(
    "scalar, fields, factor, dtype",
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
def test_float_codes_decode_by_shift_and_mask(scalar, fields, factor, dtype):
    codes = torch.randint(0, 1 << scalar.bits, (4, 4, scalar.bits // 4, 128, 8 * 4 // scalar.bits))
    if scalar.bits == 8:
        codes[(codes & 127) == 127] = 0  # NaN is handled by the scale
    places = torch.arange(codes.shape[-1]) * scalar.bits
    words = (codes << places).sum(-1).to(torch.int64)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    moved = layout.spread(words, scalar.bits, dtype == torch.float16).view(torch.int16).to(torch.int64) & 0xFFFF
    values = torch.tensor(scalar.values())[codes.view(*words.shape[:-1], 256, -1)]
    for f, (mask, shifts) in enumerate(fields):
        assert torch.equal(decoded(moved, mask, shifts, factor, dtype), values[..., f])


@pytest.mark.parametrize("at, bits", [(0, 4), (4, 4), (0, 8)])
@pytest.mark.parametrize("top", [2.0**-9, 0.7, 1.0, 300.0])
def test_integers_are_scaled_as_bits_of_bfloat16(at, bits, top):
    """One instruction, rounded once, gives the bfloat16 nearest to (code - middle) * scale, times 2**(F - 133)."""
    codes, middle = torch.arange(1 << bits), 1 << (bits - 1)
    scale = (torch.rand(500, 1).clamp(2.0**-10) * top).bfloat16()
    plain, power, alpha = _folded(scale, torch.ones(1), 133).tolist()
    factor = power / 2**at
    assert plain == 1 and alpha == 2.0**133 / power and float(scale.max()) * power <= 2.0**127
    scaled = (scale.float() * factor).bfloat16().double()
    assert torch.equal(scaled, scale.double() * factor)
    number = (codes << at).to(torch.int16).view(torch.bfloat16).double()
    minus = scaled * (-(middle << at) * 2.0**-133)
    assert torch.equal(minus.float().bfloat16().double(), minus)
    found = (number * scaled + minus).float().bfloat16().double() * alpha
    want = ((codes - middle) * scale.double()).float().bfloat16().double()
    assert torch.equal(found, want)


def test_scales_that_would_leave_the_range_are_refused():
    plain, power, alpha = _folded(torch.tensor([2.0**120]), torch.ones(1), 133).tolist()
    assert (plain, power, alpha) == (1, 2.0**6, 2.0**127)
    with pytest.raises(InputError, match=r"2\*\*121"):
        _folded(torch.tensor([1.0, -(2.0**121)]), torch.ones(1), 133)


@pytest.mark.parametrize(
    "group, cut, step, scheme", [(48, 0, 16, (4, 1)), (96, 0, 32, (2, 1)), (128, 64, 64, (1, 1)), (64, 32, 32, (2, 1)),
                                 (192, 0, 192, (1, 3)), (32, 16, 16, (4, 1)), (520, 0, 0, (1, 0)), (640, 120, 0, (1, 0))],
)  # fmt: skip
def test_groups_of_any_multiple_of_16_are_packed_in_steps(group, cut, step, scheme):
    spec = BASE.replace(n=16, weight=types.uint4, zero="int", block=(1, group), block_offset=(0, cut))
    weight, found = random_weight(spec, 1), scheme_of(spec)
    assert (found.fine, found.per) == scheme and found.step == step
    packed = GluonHopperLinearKernel.pack(weight)
    for name, table in (("scale", weight.scale), ("zero", weight.zero)):
        rows = packed[name].view(torch.uint8 if name == "zero" else torch.bfloat16).permute(0, 3, 2, 1).reshape(16, -1)
        assert rows.shape[1] == (-(-576 // step) if step else 1)
        columns = torch.arange(520)
        assert torch.equal(rows[:, columns // step if step else columns * 0], table[:, (columns + cut) // group])


def test_bytes_of_a_row_side_by_side():
    words = torch.arange(0x03020100, 0x03020100 + 1, dtype=torch.int32).repeat(2, 2, 2, 128)
    assert torch.equal(layout.byte_pairs(words), torch.full_like(words, 0x03010200))


def test_a_pair_table_holds_rows_g_and_g_plus_8_side_by_side():
    values = torch.randn(21, 3)
    table = layout.pair_table(values, torch.arange(21))
    assert table.shape == (2, 3, 8, 2)
    for row in range(32):
        want = values[row] if row < 21 else torch.zeros(3)
        assert torch.equal(table[row // 16, :, row % 8, row // 8 % 2], want)
    blocks = layout.pair_table(values[:2], torch.arange(21) // 16)
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


def test_what_it_takes_and_refuses():
    e2m1 = BASE.replace(weight=types.float4_e2m1)
    takes = [BASE, BASE.replace(block=(1, 32)), BASE.replace(block=(1, 48)), BASE.replace(block_offset=(0, 32)),
             BASE.replace(block=(1, 520)), BASE.replace(weight=types.uint4, zero="int"),
             BASE.replace(weight=types.int8, act_dtype=torch.float16), BASE.replace(act_order=True),
             e2m1.replace(act_dtype=torch.float16), e2m1.replace(act_dtype=torch.float16, block=(1, 32)),
             e2m1.replace(block=(1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(200, 520))]  # fmt: skip
    assert all(isinstance(scheme_of(s), Scheme) for s in takes)
    for spec in (BASE.replace(weight=types.uint2b2), BASE.replace(block=(1, 40)), BASE.replace(weight=types.uint4, zero="float"),
                 BASE.replace(act=types.ActSpec(types.int8)), BASE.replace(block_offset=(0, 24))):  # fmt: skip
        verdict = GluonHopperLinearKernel.can_implement(spec)
        assert not verdict and verdict.reason and verdict.fix


def test_codes_of_padding_do_not_depend_on_noise():
    weight = random_weight(BASE.replace(k=33, block=(1, 33)), 1)
    clean = bitstream.pack(weight.unpacked(), 4)
    assert torch.equal(layout.pack_words(weight.codes, 4, 33, 0), layout.pack_words(clean, 4, 33, 0))


def pieces(p, programs, whole, rest, stages):
    """`wide_device.segment` of one program: (tile, first stage, last stage + 1) in its order of work."""
    u0, u1 = p * rest // programs, (p + 1) * rest // programs
    found = [(p + s * programs, 0, stages) for s in range(whole)]
    for j in range((u1 - 1) // stages - u0 // stages + 1 if u1 > u0 else 0):
        tile = u0 // stages + j
        found.append((whole * programs + tile, u0 - tile * stages if j == 0 else 0, min(stages, u1 - tile * stages)))
    return found


@pytest.mark.parametrize("total", [1, 2, 7, 64, 133, 224, 642])
@pytest.mark.parametrize("stages", [1, 2, 9, 34, 68])
@pytest.mark.parametrize("programs", [1, 7, 107, 128, 132])
def test_every_stage_of_every_tile_has_one_program_and_the_parts_are_awaited(total, stages, programs):
    programs, whole, rest = shares(total, stages, programs)
    done = torch.zeros(total, stages, dtype=torch.int64)
    parts = torch.zeros(total, dtype=torch.int64)
    awaited = torch.zeros(total, dtype=torch.int64)
    for p in range(programs):
        work = pieces(p, programs, whole, rest, stages)
        assert work, "a program without work would wait for data that nobody brings"
        for tile, k0, k1 in work:
            assert 0 <= k0 < k1 <= stages
            done[tile, k0:k1] += 1
            parts[tile] += k0 > 0
            if k0 == 0 and k1 < stages:
                awaited[tile] = ((tile - whole * programs + 1) * stages * programs + rest - 1) // rest - 1 - p
    assert (done == 1).all() and torch.equal(parts, awaited)


@pytest.mark.parametrize("stages", [1, 2, 9, 34])
@pytest.mark.parametrize("total, programs", [(32, 128), (64, 128), (43, 129), (160, 128), (12, 132), (66, 264)])
def test_parts_of_a_tile_cut_alike_are_each_added_up_by_one_program(total, programs, stages):
    programs, whole, rest = shares(total, stages, programs)
    if not rest or programs * stages % rest:
        return  # whole tiles, or fewer stages than programs
    n = programs * stages // rest
    split = 4 if n % 4 == 0 else 2
    kept, arrived = torch.zeros(split, programs // n), torch.zeros(split, programs // n)
    for p in range(programs):
        cut = [tile for tile, k0, k1 in pieces(p, programs, whole, rest, stages) if k1 - k0 < stages]
        assert cut == [whole * programs + p // n]  # one, so that nothing waits behind its wait
        for i in range(split):
            kept[i, p // n] += p % n == i * n // split
            arrived[i, p // n] += p % n != i * n // split
    assert (kept == 1).all() and (arrived == n - 1).all()


def test_flags_of_a_launch_have_room():
    for tile in _COSTS:
        for total in (1, 2, 31, 64, 131, 132, 224, 1000):
            for programs in _programs(total, 132, tile):
                cut = shares(total, 32, programs)[2] // 32
                assert 0 < programs <= 132 * tile.each
                assert cut * tile.nb * (4 if tile.halves else 1) <= launch._SLOT


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("tiles", [[1], [3, 1, 5], [2, 2]])
def test_turns_of_warpgroups_neither_block_nor_overtake(groups, tiles):
    """`wide_device.turn` as barriers of two warpgroups each, in every order in which they may be run."""
    total = sum(tiles)
    for order in range(groups):
        given, done = [0] * groups, [0] * groups
        given[0] = 1  # by the last one, at the start
        log = []
        while any(count < total for count in done):
            ready = [c for c in range(groups) if done[c] < total and given[c]]
            assert ready, "nobody's turn"
            c = ready[order % len(ready)]
            given[c] -= 1
            done[c] += 1
            log.append(c)
            if c < groups - 1 or done[c] < total:
                given[(c + 1) % groups] += 1
                assert given[(c + 1) % groups] == 1  # a barrier that is given twice would lose one
        assert log == [i % groups for i in range(total * groups)] and not any(given)


def test_every_number_of_rows_has_a_tile():
    for m in (17, 33, 96, 97, 300, 1000, 2049, 50000):
        for n, k in ((16, 64), (1024, 4096), (13653, 4304), (151936, 4096)):
            tile = wide_tile(m, n, k, 132)
            assert 1 <= tile.p <= 132 * tile.each and tile.bm + tile.bm2 < max(4 * m, 320)


@pytest.mark.parametrize(
    "n, k", [(1, 64), (100, 4160), (1024, 4096), (4096, 4096), (4104, 4160), (8192, 8192), (13653, 4304), (57344, 72)]
)
def test_few_rows_have_a_tile_of_the_layers_rows_that_fits(n, k):
    base = BASE.replace(n=n, k=k)
    for spec in (base, base.replace(weight=types.uint8, zero="int", block=(1, 16), scale_dtype=torch.float32)):
        scheme, (tiles, columns) = scheme_of(spec), layout.padded(n, k)
        for m in (1, 4, 8, 9, 16, 17, 24, 25, 32):
            even = k % 128 == 0
            tile = decode_tile(m, tiles, columns // 64, scheme, even) if m <= 16 else few_tile(m, tiles, n, k, scheme)
            if tile is None:
                continue  # the kernel for more rows is faster
            plan = launch._DecodePlan(spec, scheme, m, False, tile)
            assert tile.shared_bytes(scheme, m) <= 226 * 1024
            assert not tile.depth or (tile.r * tile.groups <= tiles and tile.warps % tile.groups == 0 and tile.c == 1)
            assert plan.programs // tile.cut <= launch._SLOT
            steps, share = plan.numbers[-1], tile.warps // tile.groups * tile.c * tile.cut
            units = -(-columns // (64 * plan.constants[1].blocks))
            assert (steps - 1) * share < units <= steps * share  # every unit of K is somebody's
            assert plan.programs == -(-tiles // (tile.r * tile.groups)) * tile.cut


@pytest.mark.parametrize("m", [8, 16, 24, 32])
def test_tiles_of_few_rows_are_fitted_to_every_scheme(m):
    wide = BASE.replace(k=1024, scale_dtype=torch.float32)
    for spec in [wide.replace(weight=types.uint8, zero="int", block=(1, g)) for g in (16, 32, 64, 1024)] + [BASE]:
        for kind in _FEW[m // 8]:
            for each in (1, 2, 4):
                tile = kind.tile.fitted(scheme_of(spec), m, each)
                if tile:
                    assert (
                        2 <= tile.depth <= kind.tile.depth and each * (tile.shared_bytes(scheme_of(spec), m) + 1024) <= 227 * 1024
                    )
        assert scheme_of(spec).width == 8 or kind.tile.fitted(scheme_of(spec), m)


def test_every_tile_fits_shared_memory_with_every_scheme():
    wide = BASE.replace(k=1024, scale_dtype=torch.float32)
    specs = [wide.replace(weight=types.uint8, zero="int", block=(1, g)) for g in (16, 32, 64, 1024)] + [BASE]
    for spec in specs:
        for tile in _COSTS:
            fitted = tile.fitted(scheme_of(spec))
            assert fitted.stages >= 2 and fitted.shared_bytes(scheme_of(spec)) <= 226 * 1024
