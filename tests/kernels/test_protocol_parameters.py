"""Parameters of vLLM's protocol: boundaries inside int32s and blocks, no rounding, no guessed layouts."""

import pytest
import torch
from test_linear_protocol import MP, matrix, quantized
from torch import nn

import bitline
from bitline.errors import InputError
from bitline.kernels import linear
from bitline.protocol.foreign_kernel import config_of, write_layer
from bitline.protocol.layer_reader import read_layer
from bitline.testing.tolerance import compare

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_fused_layers_that_end_inside_blocks(world):
    """Two layers of 1536 rows on eight ranks: 192 rows each, in blocks of 128."""
    rows, k = 1536, 256
    weights = [bitline.quantize(matrix(rows, k, seed).to(BF16), "FP8_BLOCK") for seed in (1, 2)]
    act, key = linear.kFp8Dynamic128Sym, linear.kFp8Static128BlockSym
    for rank in range(world):
        part = rows // world
        layer, where = nn.Module(), {"tp_rank": rank, "tp_size": world}
        layer.weight = linear.ModelWeightParameter(torch.empty(2 * part, k, dtype=E4M3), **where)
        layer.weight_scale_inv = linear.BlockScaleParameter(torch.empty(-(-2 * part // 128), k // 128), (128, 128), **where)
        for i, weight in enumerate(weights):
            fused = {"shard_id": i, "shard_offset": i * part, "shard_size": part}
            layer.weight.load_merged_column_weight(weight.codes.view(E4M3), **fused)
            layer.weight_scale_inv.load_merged_column_weight(weight.scale, **fused)
        kernel = linear.init_fp8_linear_kernel(act, key, (2 * part, k), BF16)
        kernel.process_weights_after_loading(layer)
        x = matrix(3, k, rank).to(BF16)
        y = kernel.apply_weights(layer, x)
        for i, weight in enumerate(weights):
            found = compare(y[:, i * part : (i + 1) * part], x, weight.shard(0, rank, world))
            assert found.ok, str(found)


def test_scales_of_fused_layers_of_another_size_are_refused():
    p = linear.BlockScaleParameter(torch.zeros(3, 1), (128, 128), tp_rank=0, tp_size=2)
    with pytest.raises(InputError, match="another size"):
        p.load_merged_column_weight(torch.zeros(5, 1), shard_id=0, shard_offset=0, shard_size=192)
    q = linear.ModelWeightParameter(torch.zeros(24, 16))
    with pytest.raises(InputError, match="another size"):
        q.load_qkv_weight(torch.zeros(20, 16), shard_id="q", shard_offset=0, shard_size=16)
    with pytest.raises(InputError, match="unknown shard_id"):
        q.load_qkv_weight(torch.zeros(16, 16), shard_id="z", shard_offset=0, shard_size=16)


@pytest.mark.parametrize("make", [linear.ChannelScaleParameter, linear.GroupScaleParameter, linear.PerTensorScaleParameter])
def test_a_scale_takes_the_checkpoints_dtype_where_its_own_would_round(make):
    values = torch.tensor([[1.0009765625], [65504.0]]).to(torch.float16).view(-1, 1)
    values = values if make is not linear.PerTensorScaleParameter else values[:1].view(1)
    p = make(torch.zeros(values.shape, dtype=BF16))
    p.load_column_parallel_weight(values)
    assert p.dtype == torch.float16 and torch.equal(p.data, values)
    wide = make(torch.zeros(values.shape))
    wide.load_column_parallel_weight(values)
    assert wide.dtype == torch.float32 and torch.equal(wide.data, values.float())


def test_scales_of_fused_layers_in_two_dtypes_are_kept_in_one_that_holds_both():
    p = linear.ChannelScaleParameter(torch.zeros(4, 1, dtype=BF16))
    half, brain = torch.full((2, 1), 1.0009765625, dtype=torch.float16), torch.full((2, 1), 2.0**100, dtype=BF16)
    p.load_merged_column_weight(half, shard_offset=0, shard_size=2)
    p.load_merged_column_weight(brain, shard_offset=2, shard_size=2)
    assert p.dtype == torch.float32 and torch.equal(p.data, torch.cat([half.float(), brain.float()]))


@pytest.mark.parametrize(("own", "files"), [
    (BF16, torch.float16), (torch.float16, BF16), (BF16, torch.float32), (torch.int8, torch.uint8), (torch.uint8, torch.int8),
    (torch.int32, torch.float32), (E4M3, torch.float8_e5m2),
])  # fmt: skip
def test_anything_but_a_scale_refuses_what_its_dtype_does_not_hold(own, files):
    with pytest.raises(InputError, match="rounded"):
        linear.ModelWeightParameter(torch.zeros(2, 2).to(own)).load_row_parallel_weight(torch.zeros(2, 2).to(files))


def test_e8m0_scales_load_from_bytes_and_from_e8m0():
    exponents = torch.tensor([[120, 127, 130]], dtype=torch.uint8)
    p = linear.GroupScaleParameter(torch.zeros(1, 3, dtype=torch.uint8), 32)
    p.load_column_parallel_weight(exponents.view(torch.float8_e8m0fnu))
    assert torch.equal(p.data, exponents)
    p = linear.GroupScaleParameter(torch.zeros(1, 3, dtype=torch.uint8).view(torch.float8_e8m0fnu), 32)
    p.load_column_parallel_weight(exponents)
    assert torch.equal(p.data.view(torch.uint8), exponents)


def test_one_scale_loads_from_any_shape_of_one_element():
    for shape in ((), (1,), (1, 1)):
        p = linear.PerTensorScaleParameter(torch.zeros(shape))
        p.load_column_parallel_weight(torch.tensor([3.0]))
        assert p.data.reshape(()) == 3
    p = linear.PerTensorScaleParameter(torch.zeros(3))
    p.load_qkv_weight(torch.tensor(1.0), shard_id="v")
    p.load_merged_column_weight(torch.tensor([2.0]), shard_id=0)
    assert p.data.tolist() == [2, 0, 1]
    for wrong in ({"shard_id": 3}, {"shard_id": "w"}):
        with pytest.raises(InputError, match="unknown shard_id"):
            p.load_merged_column_weight(torch.tensor([2.0]), **wrong)


@pytest.mark.parametrize(("packed_dim", "n", "k"), [(1, 16, 12), (0, 12, 16)])
def test_a_shard_that_ends_inside_an_int32_is_refused(packed_dim, n, k):
    """Twelve 4-bit codes take two int32s, and so do sixteen: the shape does not say which the shard has."""
    layer = nn.Module()
    shape = (n, 1) if packed_dim == 1 else (2, k)
    layer.qweight = linear.PackedParameter(torch.zeros(shape, dtype=torch.int32), packed_dim, 8, tp_rank=0, tp_size=2)
    layer.scales = linear.GroupScaleParameter(torch.ones(n, 1), -1)
    k = 6 if packed_dim == 1 else k
    config = linear.MPLinearLayerConfig((k, n), (k, n), linear.uint4b8, BF16, -1, False, False)
    with pytest.raises(InputError, match="ends inside an int32"):
        read_layer(layer, config, {})


def test_zero_points_of_a_group_that_two_ranks_share():
    weight = quantized("W4A16_ASYM", {"group_size": 64}, 16, 192)
    full, x = write_layer(weight, "mp"), matrix(2, 192, 7).to(BF16)
    for rank in range(2):
        layer, where = nn.Module(), {"tp_rank": rank, "tp_size": 2}
        layer.weight_packed = linear.PackedParameter(torch.zeros(16, 12, dtype=torch.int32), 1, 8, **where)
        layer.weight_scale = linear.GroupScaleParameter(torch.zeros(16, 2, dtype=BF16), 64, **where)
        layer.weight_zero_point = linear.PackedParameter(torch.zeros(2, 2, dtype=torch.int32), 0, 8, group_size=64, **where)
        for name, param in layer.named_parameters():
            param.load_row_parallel_weight(getattr(full, name).data)
        config = linear.MPLinearLayerConfig((192, 16), (96, 16), linear.uint4, BF16, 64, True, False)
        kernel = linear.init_linear_kernel(config)
        kernel.process_weights_after_loading(layer)
        part = x[:, 96 * rank : 96 * rank + 96]
        found = compare(kernel.apply_weights(layer, part), part, weight.shard(1, rank, 2))
        assert found.ok, str(found)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (64, 192)])
def test_a_transposed_view_without_dimensions(n, k):
    weight = quantized("FP8_DYNAMIC", {}, n, k)
    config, layer = config_of(weight.spec, "fp8"), write_layer(weight, "fp8")
    plain = layer.weight.data
    for data in (plain, plain.t()):
        layer.weight = nn.Parameter(data, requires_grad=False)
        assert torch.equal(read_layer(layer, config, {}).dequantize(), weight.dequantize())
    int8 = quantized("W8A8", {}, n, k)
    layer = write_layer(int8, "int8")
    layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)
    config = linear.Int8ScaledMMLinearLayerConfig(False, True, True)  # without a shape
    assert torch.equal(read_layer(layer, config, {}).dequantize(), int8.dequantize())


def test_input_scale_ub_is_the_activation_limit():
    weight = quantized("FP8_DYNAMIC", {})
    config, layer = config_of(weight.spec, "fp8"), write_layer(weight, "fp8")
    layer.input_scale_ub = nn.Parameter(torch.tensor(1200.0), requires_grad=False)
    assert read_layer(layer, config, {}).spec.act.limit == 1200


def test_scales_whose_shape_has_two_readings_are_refused():
    layer = nn.Module()
    layer.qweight = linear.PackedParameter(torch.zeros(8, 64, dtype=torch.int32), 0, 8, input_dim=0, output_dim=1)
    layer.scales = nn.Parameter(torch.ones(64, 64), requires_grad=False)
    layer.g_idx = nn.Parameter(torch.arange(64, dtype=torch.int32), requires_grad=False)
    config = linear.MPLinearLayerConfig((64, 64), (64, 64), linear.uint4b8, BF16, 32, False, True)
    with pytest.raises(InputError, match="two ways"):
        read_layer(layer, config, {})


@pytest.mark.parametrize(("input_dim", "output_dim"), [(0, 0), (2, 0), (0, -1)])
def test_a_layout_names_two_dimensions_of_the_parameter(input_dim, output_dim):
    p = linear.ModelWeightParameter(torch.zeros(2, 3))
    with pytest.raises(InputError, match="no such dimensions"):
        linear.permute_param_layout_(p, input_dim, output_dim)
    assert tuple(p.shape) == (2, 3)


def test_permuting_a_parameter_that_names_one_dimension():
    p = linear.ChannelScaleParameter(torch.zeros(6, 1))
    linear.permute_param_layout_(p, input_dim=0, output_dim=1)
    assert tuple(p.shape) == (1, 6) and p.output_dim == 1
    with pytest.raises(InputError, match="no dimension"):
        linear.permute_param_layout_(linear.PerTensorScaleParameter(torch.zeros(1, 1)), 0, 1)


def test_weight_types_have_vllms_names():
    for name, bias, size in (("uint4b8", 8, 4), ("uint8b128", 128, 8), ("uint4", 0, 4), ("uint8", 0, 8), ("int4", 0, 4),
                             ("uint2b2", 2, 2), ("uint3b4", 4, 3), ("uint5b16", 16, 5), ("uint6b32", 32, 6),
                             ("uint7b64", 64, 7)):  # fmt: skip
        kind = getattr(linear, name)
        assert (kind.bias, kind.size_bits, kind.has_bias()) == (bias, size, bias > 0)
        assert kind.max() - kind.min() == 2**size - 1
    assert (linear.float8_e4m3fn.max(), linear.float4_e2m1.max(), linear.int8.min()) == (448, 6, -128)
    assert MP.weight_type is linear.uint4b8
