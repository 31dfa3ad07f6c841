"""torchao against its own weights, and against the definition on tensors made here."""

import json

import pytest
import torch
from producers import cases, check, one

from bitline import CheckpointError

CONFIG = {"quant_method": "torchao"}


def metadata(kind, **data):
    return {"m.proj.weight": json.dumps({"_type": kind, "_data": data})}


def int8_inputs(how):
    return {
        "_type": "QuantizeTensorToInt8Kwargs",
        "_data": {"granularity": {"_type": how}, "mapping_type": {"_data": "SYMMETRIC"}},
    }


@pytest.mark.parametrize("case", cases("torchao_"))
def test_producers_own_weight(case):
    check(case)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("width", [2, 3, 5, 8])
def test_integers_of_few_bits(width, asymmetric, tmp_path):
    g = torch.Generator().manual_seed(width)
    half = 1 << (width - 1)
    codes = torch.randint(-half, half, (6, 70), generator=g).to(torch.int8)
    zero = torch.randint(-half, half, (6, 3), generator=g).to(torch.int8) * asymmetric
    scale = torch.rand(6, 3, generator=g)
    tensors = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": zero}
    facts = metadata("IntxUnpackedToInt8Tensor", target_dtype={"_data": f"int{width}"}, block_size=[1, 32])
    record = one(tmp_path, CONFIG, tensors, facts)
    assert record.spec.zero == ("int" if asymmetric else "none") and record.spec.weight.bits == width
    group = torch.arange(70) // 32
    assert torch.equal(record.weight().dequantize(), (codes.float() - zero.float()[:, group]) * scale[:, group])


@pytest.mark.parametrize(("how", "granularity"), [("PerRow", "token"), ("PerTensor", "tensor")])
def test_inputs(how, granularity, tmp_path):
    tensors = {"_weight_qdata": torch.ones(4, 8, dtype=torch.int8), "_weight_scale": torch.ones(4, 1), "bias": torch.ones(4)}
    record = one(tmp_path, CONFIG, tensors, metadata("Int8Tensor", block_size=[1, 8], act_quant_kwargs=int8_inputs(how)))
    assert str(record.spec.act) == f"int8-dynamic-{granularity}" and record.spec.bias


def test_kinds_that_belong_to_a_kernel_are_named(tmp_path):
    tensors = {"_weight_qdata": torch.ones(4, 8, dtype=torch.int32), "_weight_scale": torch.ones(4, 1)}
    with pytest.raises(CheckpointError, match=r"not supported yet.*'Int4TilePackedTo4dTensor'.*IntxUnpacked"):
        one(tmp_path, CONFIG, tensors, metadata("Int4TilePackedTo4dTensor"))
