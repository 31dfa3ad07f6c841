"""bitsandbytes against its own weights, and against a reference that dequantizes the flattened weight one code at a time."""

import json

import numpy as np
import pytest
import torch
from producers import cases, check, one, write

from bitline import CheckpointError, types

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}
TABLES = {"nf4": types.nf4, "fp4": types.fp4_bnb}


@pytest.mark.parametrize("case", cases("bnb_"))
def test_producers_weight(case):
    check(case)


def layer(n, k, block, kind="nf4", nested=0, storage=torch.uint8, scale_dtype=torch.float32):
    """Tensors of one layer, and its weight in float32."""
    g = torch.Generator().manual_seed(n * k + block)
    codes = torch.randint(16, (n * k,), generator=g).tolist()
    count = -(-n * k // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [n, k]}
    padded = codes + [0] * (-len(codes) % (2 * storage.itemsize))
    packed = [padded[i] << 4 | padded[i + 1] for i in range(0, len(padded), 2)]
    tensors = {
        "weight": torch.tensor(packed, dtype=torch.uint8).view(storage).unsqueeze(1),
        "weight.quant_map": torch.tensor(TABLES[kind].table),
    }
    if nested:
        stored = torch.randint(256, (count,), generator=g).to(torch.uint8)
        table, nested_absmax = torch.randn(256, generator=g), torch.rand(-(-count // nested), generator=g)
        offset = np.float32(0.123456)
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": float(offset)}
        tensors |= {"weight.absmax": stored, "weight.nested_absmax": nested_absmax, "weight.nested_quant_map": table}
        scales = [table.numpy()[int(s)] * nested_absmax.numpy()[i // nested] + offset for i, s in enumerate(stored)]
    else:
        tensors["weight.absmax"] = torch.rand(count, generator=g).to(scale_dtype)
        scales = tensors["weight.absmax"].float().numpy()
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    table = np.array(TABLES[kind].table, dtype=np.float32)
    values = [table[code] * np.float32(scales[i // block]) for i, code in enumerate(codes)]
    return tensors, torch.from_numpy(np.array(values, dtype=np.float32)).view(n, k)


@pytest.mark.parametrize("nested", [0, 3])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("n", "k", "block", "size"),
    [(4, 128, 64, 64), (6, 96, 64, 32), (3, 128, 256, 128), (5, 7, 4, 1), (3, 33, 64, 1), (1, 1, 64, 1), (2, 24, 16, 8)],
)
def test_blocks_that_cross_rows(n, k, block, size, kind, nested, tmp_path):
    tensors, values = layer(n, k, block, kind, nested)
    record = one(tmp_path, CONFIG, tensors)
    assert record.spec.block == (1, size) and record.format == f"bitsandbytes {kind}" + (" nested" if nested else "")
    assert torch.equal(record.weight().dequantize(), values)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_stored_as_floats(storage, tmp_path):
    tensors, values = layer(5, 26, 64, storage=storage)
    assert torch.equal(one(tmp_path, CONFIG, tensors).weight().dequantize(), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_keep_their_dtype(dtype, tmp_path):
    tensors, values = layer(4, 128, 64, scale_dtype=dtype)
    weight = one(tmp_path, CONFIG, tensors | {"bias": torch.ones(4).to(dtype)}).weight()
    assert weight.scale.dtype == dtype and weight.bias.tolist() == [1] * 4
    assert torch.equal(weight.dequantize(), values)


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_concatenate_to_the_whole(dim, tmp_path):
    weight = one(tmp_path, CONFIG, layer(6, 96, 64, nested=4)[0]).weight()
    assert torch.equal(torch.cat([weight.shard(dim, r, 5).dequantize() for r in range(5)], dim), weight.dequantize())


def test_int8(tmp_path):
    tensors = {"weight": torch.tensor([[127, -128], [1, 64]], dtype=torch.int8), "SCB": torch.tensor([2.0, 127.0])}
    record = one(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors)
    assert record.spec.weight_only and record.spec.scheme == "int8 channel"
    expected = torch.tensor([[2.0, -256 / 127], [1, 64]])
    assert torch.equal(record.weight().dequantize(torch.bfloat16), expected.bfloat16())


def test_a_config_of_another_type_is_a_warning(tmp_path):
    record = one(tmp_path, CONFIG | {"bnb_4bit_quant_type": "fp4"}, layer(4, 64, 64)[0])
    assert record.oddities == ("the config says fp4, the tensors are nf4",)


def test_another_four_bit_type_is_refused(tmp_path):
    tensors, _ = layer(4, 64, 64)
    tensors["weight.quant_state.bitsandbytes__af4"] = tensors.pop("weight.quant_state.bitsandbytes__nf4")
    with pytest.raises(CheckpointError, match="found af4, expected nf4 or fp4"):
        write(tmp_path, CONFIG, tensors).layers()
