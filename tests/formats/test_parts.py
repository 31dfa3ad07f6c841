"""Parts of layers: the bits of the whole weight's narrow, for every format, reading only the units that a part touches."""

import json
import math

import gguf_files
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from reference_packers import CHECKPOINTS, awq, gptq, planar, random_layer, stream, write
from safetensors.torch import save_file

from bitline import CheckpointError, QuantizedWeight, WeightError, open_checkpoint
from bitline.errors import BitlineError
from bitline.formats.base import LayerRecord, whole_units
from bitline.formats.gguf.blocks import BLOCKS
from bitline.formats.gguf.ggml_types import BLOCK_SIZES
from bitline.formats.gguf.source import GGUFSource
from bitline.formats.io.mapped_file import map_part
from bitline.formats.io.safetensors_source import SafetensorsSource
from bitline.weight import TENSOR_FIELDS

FIXTURES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())
# Fixtures whose formats lay codes out along the flattened weight: only read whole.
FLAT = ("bnb_fp4", "bnb_nf4", "hqq")


def bits_of(tensor):
    """The bytes of a tensor in row-major order; a view may have any strides."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def assert_same(part, whole):
    assert part.spec == whole.spec
    for name in TENSOR_FIELDS:
        a, b = getattr(part, name), getattr(whole, name)
        assert (a is None) == (b is None), name
        if a is None:
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, name
        if name == "codes":  # bits past the last column are anything
            assert torch.equal(part.unpacked(), whole.unpacked())
        else:
            assert torch.equal(bits_of(a), bits_of(b)), name


def cuts(n, k):
    """Rows and columns: halves, thirds, single ones, inside units, at both ends, and both at once."""
    ranges = lambda size: [(0, size // 2), (size // 2, size), (size // 3, size // 2 + 1), (size - 1, size), (0, 1), (0, size)]
    return [
        *((rows, None) for rows in ranges(n)), *((None, columns) for columns in ranges(k)),
        ((n // 4, n // 2), (k // 4, k // 2)), ((n // 3, n), (k // 3, k - 1)),
    ]  # fmt: skip


def check(record):
    whole = record.weight()
    for rows, columns in cuts(*whole.shape):
        expected = whole if rows is None else whole.narrow(0, *rows)
        assert_same(record.weight(rows, columns), expected if columns is None else expected.narrow(1, *columns))


@pytest.fixture
def asked(monkeypatch):
    """Bytes of the tensors that readers have asked for, in a list of one."""
    count = [0]
    for source in (SafetensorsSource, GGUFSource):
        for name in ("read", "read_part"):

            def counted(self, *args, _read=getattr(source, name), **options):
                tensor = _read(self, *args, **options)
                count[0] += tensor.nbytes
                return tensor

            monkeypatch.setattr(source, name, counted)
    return count


def check_bytes(record, asked, most=0.6):
    """A half of rows, and of columns, takes little more than half of the bytes."""
    used = []
    n, k = record.spec.n, record.spec.k
    for rows, columns in ((None, None), ((0, n // 2), None), (None, (0, k // 2))):
        asked[0] = 0
        record.weight(rows, columns)
        used.append(asked[0])
    for dim, (part, size) in enumerate(zip(used[1:], (n, k), strict=True)):
        unit = record.units[dim]
        if unit and whole_units((0, size // 2), unit, size)[1] == size // 2:
            assert part <= most * used[0], (record.name, dim, used)
        elif not unit:
            assert part == used[0]


@pytest.mark.parametrize("name", FIXTURES)
def test_layers_of_every_format(name, asked):
    seen = set()
    for record in open_checkpoint(CHECKPOINTS / name).layers():
        if record.spec not in seen:
            seen.add(record.spec)
            check(record)
            # Columns of an act-order weight need the scales of all groups.
            check_bytes(record, asked, 0.85 if record.spec.act_order else 0.7)
            whole_only = name.startswith(FLAT), name.startswith((*FLAT, "autoawq_gemv"))
            assert tuple(unit == 0 for unit in record.units) == whole_only


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if not kind.startswith("IQ") or kind.startswith("IQ4")])
@pytest.mark.parametrize("extras", [False, True])
def test_gguf_types(kind, extras, tmp_path, asked):
    if kind not in GGMLQuantizationType.__members__:
        pytest.skip("newer than the gguf package")
    n, k = 24, 3 * BLOCK_SIZES[kind][0]
    rng = np.random.default_rng(0)
    tensors = {"blk.0.attn_q.weight": (kind, gguf_files.random_blocks(kind, n, k, rng, edges=False))}
    if extras:
        tensors |= {"blk.0.attn_q.bias": ("F32", rng.normal(size=n).astype(np.float32)),
                    "blk.0.attn_q.scale": ("F32", np.array([0.5], np.float32))}  # fmt: skip
    gguf_files.write(tmp_path / "m.gguf", tensors)
    (record,) = open_checkpoint(tmp_path / "m.gguf").layers()
    assert record.units == (1, BLOCK_SIZES[kind][0])
    check(record)
    check_bytes(record, asked)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_stacked_experts_of_gguf(kind, tmp_path):
    n, k = 16, 2 * BLOCK_SIZES[kind][0]
    blocks = gguf_files.random_blocks(kind, 3 * n, k, np.random.default_rng(0), edges=False)
    gguf_files.write(tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (kind, blocks.reshape(3, n, -1))})
    for record in open_checkpoint(tmp_path / "m.gguf").layers():
        check(record)


def test_stacked_experts_of_gpt_oss(tmp_path, asked):
    generator = torch.Generator().manual_seed(0)
    byte = lambda *shape: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    save_file({"m.experts.up_blocks": byte(3, 24, 4, 16), "m.experts.up_scales": byte(3, 24, 4) % 200,
               "m.experts.up_bias": torch.randn(3, 24, generator=generator)}, tmp_path / "model.safetensors")  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    records = open_checkpoint(tmp_path).layers()
    assert len(records) == 3 and records[0].units == (1, 32)
    for record in records:
        check(record)
        check_bytes(record, asked, 0.7)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_fp8_experts(transposed, tmp_path, asked):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(2, 256, 384, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, 3, generator=generator)
    if transposed:
        codes, scale = codes.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
    save_file({"m.experts.down_proj": codes, "m.experts.down_proj_scale_inv": scale}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
              "model_type": "llama4" if transposed else "qwen3_moe"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    records = open_checkpoint(tmp_path).layers()
    assert [r.units for r in records] == [(128, 128)] * 2 and (records[0].spec.n, records[0].spec.k) == (256, 384)
    for record in records:
        check(record)
        check_bytes(record, asked)


ORDERS = {
    "none": None, "trivial": lambda j: j // 32, "negative": lambda j: j // 32 - 3, "permuted": lambda j: (7 * j % 96) // 32,
    "ragged": lambda j: min((7 * j % 96) // 20, 2),
}  # fmt: skip


@pytest.mark.parametrize(("bits", "pack"), [(2, stream), (3, stream), (3, planar), (4, stream), (5, planar), (8, stream)])
@pytest.mark.parametrize("order", ORDERS)
def test_gptq_orders_and_widths(bits, pack, order, tmp_path):
    k, n = 96, 64
    groups = None if ORDERS[order] is None else [ORDERS[order](j) for j in range(k)]
    layer = gptq(*random_layer(k, n, 3, bits), bits, groups=groups, v1=pack is stream, pack=pack)
    layer["bias"] = torch.arange(n).half()
    form = "gptq_p" if pack is planar else "gptq"
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "checkpoint_format": form}
    record = write(tmp_path, config, {"m.q": layer}).layer("m.q")
    assert record.units[1] == (1 if order in ("permuted", "ragged") else 32)
    check(record)


@pytest.mark.parametrize("zeros", [True, False])
def test_parts_that_look_symmetric_alone(zeros, tmp_path):
    """Zero points that are implicit in one part and not in the other: both parts keep them."""
    codes, points, scales = random_layer(64, 32, 2, 4)
    points = [[8] * 16 + row[16:] for row in points] if zeros else [[8] * 32] * 2
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}
    record = write(tmp_path, config, {"m.q": awq(codes, points, scales)}).layer("m.q")
    assert record.spec.zero == ("int" if zeros else "none")
    check(record)


def test_uneven_sizes(tmp_path):
    """Rows and columns that are no multiples of an int32, a group or a block."""
    codes, points, scales = random_layer(44, 20, 2, 4)
    g_idx = [j // 32 for j in range(44)]
    layer = gptq(codes + [[0] * 20] * 4, points, scales, 4, groups=g_idx)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
    record = write(tmp_path / "gptq", config, {"m.q": layer}).layer("m.q")
    check(record)
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    fp8 = {"weight": weight, "weight_scale_inv": torch.rand(2, 3), "bias": torch.randn(200)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    record = write(tmp_path / "fp8", config, {"m.q": fp8}).layer("m.q")
    assert record.units == (128, 128)
    check(record)


# ---- errors and edges ------------------------------------------------------------------------------------------------------


def test_impossible_ranges():
    record = open_checkpoint(CHECKPOINTS / "ct_fp8_block").layers()[0]
    n, k = record.spec.n, record.spec.k
    for rows, columns in (((0, 0), None), ((-1, 2), None), ((0, n + 1), None), (None, (k, k)), ((5, 3), None)):
        with pytest.raises(WeightError, match=rf"cannot read a part.*{record.name}.*range within"):
            record.weight(rows, columns)


def test_damage_is_found_in_the_part_that_has_it(tmp_path):
    codes, points, scales = random_layer(64, 32, 2, 4)
    scales[1, 3] = torch.nan
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
    record = write(tmp_path, config, {"m.q": gptq(codes, points, scales, 4)}).layer("m.q")
    for part in ({}, {"rows": (0, 8)}, {"columns": (32, 64)}):
        with pytest.raises(CheckpointError, match=r"m\.q\.scales.*NaN"):
            record.weight(**part)
    assert record.weight(rows=(8, 32)).shape == (24, 64) and record.weight(columns=(0, 32)).shape == (32, 32)


def test_a_file_that_became_shorter(tmp_path):
    codes, points, scales = random_layer(64, 32, 2, 4)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
    record = write(tmp_path, config, {"m.q": gptq(codes, points, scales, 4)}).layer("m.q")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(BitlineError, match="became shorter"):
        record.weight(rows=(0, 8))


def test_a_reader_without_parts_is_read_whole():
    """Records of plug-ins that know nothing of parts."""
    whole = open_checkpoint(CHECKPOINTS / "ct_nvfp4").layers()[0].weight()
    reads = []

    def read() -> QuantizedWeight:
        reads.append(1)
        return whole

    record = LayerRecord("m", "toy", whole.spec, ("m.weight",), read)
    assert record.units == (0, 0)
    assert_same(record.weight(rows=(3, 50), columns=(5, 100)), whole.narrow(0, 3, 50).narrow(1, 5, 100))
    assert len(reads) == 1


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("chunk", [1, 40, 1 << 22])
@pytest.mark.parametrize("run", [1, 9, 1 << 11])
def test_map_part(shape, chunk, run, tmp_path, monkeypatch):
    monkeypatch.setattr("bitline.formats.io.mapped_file.CHUNK_BYTES", chunk)
    monkeypatch.setattr("bitline.formats.io.mapped_file.MIN_RUN_BYTES", run)
    data = torch.arange(math.prod(shape), dtype=torch.int16)
    (tmp_path / "data").write_bytes(b"head" + data.numpy().tobytes())
    rng = np.random.default_rng(len(shape))
    for _ in range(40):
        starts = [int(rng.integers(0, size)) for size in shape]
        ranges = [(a, int(rng.integers(a + 1, size + 1))) for a, size in zip(starts, shape, strict=True)]
        found = map_part(tmp_path / "data", 4, shape, 2, ranges, "t").view(torch.int16)
        expected = data.view(shape)[tuple(slice(a, b) for a, b in ranges)]
        assert torch.equal(found, expected.reshape(-1))
