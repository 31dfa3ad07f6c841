"""AWQ gemm against its producers' own weights and against a reference that unpacks one code at a time."""

import pytest
import torch
from reference_packers import CHECKPOINTS, EXPECTED, awq, matches_producer, random_layer, stream, values, write

from bitline import CheckpointError, open_checkpoint

CASES = [(c, m) for c, modules in EXPECTED.items() if open_checkpoint(CHECKPOINTS / c).format == "awq" for m in modules]
K, N, G = 96, 32, 32


def config(**more):
    return {"quant_method": "awq", "bits": 4, "group_size": G, "zero_point": True, "version": "gemm", **more}


def auto_round(bits, **more):
    shared = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "group_size": G, "sym": False}
    return shared | {"bits": bits, **more}


def one(folder, conf, tensors, **how):
    (layer,) = write(folder, conf, {"m.proj": tensors}, **how).layers()
    return layer


@pytest.mark.parametrize(("case", "module"), CASES, ids=[f"{c}-{m.rpartition('.')[2]}" for c, m in CASES])
def test_producers_weight(case, module):
    assert matches_producer(case, module)


@pytest.mark.parametrize("case", sorted({c for c, _ in CASES}))
def test_every_layer_of_a_producer_is_read_without_warnings(case):
    checkpoint = open_checkpoint(CHECKPOINTS / case)
    assert checkpoint.dense_names() == []
    assert all(layer.weight().spec == layer.spec and not layer.oddities for layer in checkpoint.layers())


@pytest.mark.parametrize("k", [96, 97, 100, 7])
def test_four_bits_for_any_k(k, tmp_path):
    codes, zeros, scales = random_layer(k, N, -(-k // G), 4)
    layer = one(tmp_path, config(), awq(codes, zeros, scales))
    assert (layer.format, layer.spec.k, layer.spec.zero) == ("awq gemm", k, "int")
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [i // G for i in range(k)]))


def test_more_columns_than_one_chunk(tmp_path):
    codes, zeros, scales = random_layer(16, 1096, 1, 4)
    layer = one(tmp_path, config(group_size=-1), awq(codes, zeros, scales))
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [0] * 16))


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_other_bits_of_auto_round(bits, tmp_path):
    codes, zeros, scales = random_layer(K, 64, 3, bits)
    layer = one(tmp_path, auto_round(bits), awq(codes, zeros, scales, bits))
    assert layer.spec.scheme == f"uint{bits}+zero g32"
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


@pytest.mark.parametrize(
    "conf",
    [config(zero_point=False), auto_round(4, sym=True), {**config(), "zero_point": None, "sym": True}],
    ids=["zero_point", "auto-round", "sym"],
)
def test_implicit_zero_points_everywhere_are_symmetric(conf, tmp_path):
    codes, _, scales = random_layer(K, N, 3, 4)
    layer = one(tmp_path, conf, awq(codes, [[8] * N] * 3, scales))
    assert (layer.spec.weight.name, layer.spec.zero, layer.oddities) == ("uint4b8", "none", ())
    assert torch.equal(layer.weight().dequantize(), values(codes, [[8] * N] * 3, scales, [k // G for k in range(K)]))


def test_zero_points_are_used_though_the_config_says_there_are_none(tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, 4)
    layer = one(tmp_path, config(zero_point=False), awq(codes, zeros, scales))
    assert layer.spec.zero == "int" and "they are used" in layer.oddities[0]
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


def test_zero_points_of_a_later_group_only_are_refused_when_read(tmp_path):
    codes, _, scales = random_layer(K, N, 3, 4)
    layer = one(tmp_path, config(zero_point=False), awq(codes, [[8] * N, [8] * N, [8] * (N - 1) + [7]], scales))
    assert layer.spec.zero == "none"
    with pytest.raises(CheckpointError, match=r"m\.proj\.qzeros.*found 7 to 8, expected 8"):
        layer.weight()


def test_no_qzeros(tmp_path):
    codes, _, scales = random_layer(K, N, 3, 4)
    layer = one(tmp_path / "a", config(zero_point=False), awq(codes, None, scales))
    assert torch.equal(layer.weight().dequantize(), values(codes, [[8] * N] * 3, scales, [k // G for k in range(K)]))
    with pytest.raises(CheckpointError, match=r"lacks.*m\.proj\.qzeros"):
        one(tmp_path / "b", config(), awq(codes, None, scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype(dtype, tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, 4, dtype=dtype)
    weight = one(tmp_path, config(), awq(codes, zeros, scales)).weight()
    assert weight.scale.dtype == weight.spec.scale_dtype == dtype
    assert torch.equal(weight.dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


@pytest.mark.parametrize("side", ["quant_config.json", "quantize_config.json"])
def test_config_in_a_side_file(side, tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, 4)
    old = {"zero_point": True, "q_group_size": G, "w_bit": 4, "version": "GEMM"}
    layer = one(tmp_path, old, awq(codes, zeros, scales) | {"bias": torch.arange(N).half()}, side=side)
    weight = layer.weight()
    assert torch.equal(weight.dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))
    assert weight.bias.tolist() == list(range(N))


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_concatenate_to_the_whole(dim, tmp_path):
    weight = one(tmp_path, config(), awq(*random_layer(K, N, 3, 4))).weight()
    assert torch.equal(torch.cat([weight.shard(dim, r, 5).dequantize() for r in range(5)], dim), weight.dequantize())


@pytest.mark.parametrize("version", ["gemv2", "Marlin", "exllama", "ipex"])
def test_other_versions_are_refused_by_name(version, tmp_path):
    with pytest.raises(CheckpointError, match=f"version {version!r} is not supported yet"):
        one(tmp_path, config(version=version), awq(*random_layer(K, N, 3, 4)))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7, 8])
def test_gptqmodel_interleaves_4_bits_only(bits, symmetric, tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, bits)
    zeros = [[1 << bits - 1] * N] * 3 if symmetric else zeros
    conf = config(bits=bits, zero_point=not symmetric, meta={"quantizer": ["gptqmodel:7.7.0"]})
    layer = one(tmp_path, conf, awq(codes, zeros, scales, bits, stream))
    assert layer.spec.weight.bits == bits and layer.spec.zero == ("none" if symmetric else "int")
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


def test_quark_exports_columns_without_interleaving(tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, 4)
    layer = one(tmp_path, config(pack_method="order"), awq(codes, zeros, scales, 4, stream))
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


def test_an_ignored_module_that_is_quantized_is_a_warning(tmp_path):
    tensors = awq(*random_layer(K, N, 3, 4))
    assert "not quantized" in one(tmp_path / "a", config(modules_to_not_convert=["proj"]), tensors).oddities[0]
    assert one(tmp_path / "b", config(modules_to_not_convert=["pro"]), tensors).oddities == ()
    with pytest.raises(CheckpointError, match="not a list of names"):
        one(tmp_path / "c", config(modules_to_not_convert="proj"), tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "disagree about bits.*4 bits each.*bits = 5"),
        ({"group_size": 48}, "disagree about groups.*group_size = 48"),
        ({"zero_point": 1}, "zero_point.*not true or false"),
        ({"quant_method": "gptq"}, "AWQ packs along N"),
    ],
    ids=str,
)
def test_configs_that_contradict_the_tensors(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        one(tmp_path, config() | change, awq(*random_layer(K, N, 3, 4)))


@pytest.mark.parametrize(
    ("name", "change", "tensor"),
    [
        ("qweight", lambda t: t[1:].clone(), None),
        ("qweight", lambda t: t[:, 1:].clone(), "qweight"),
        ("qweight", lambda t: t.short(), "qweight"),
        ("qzeros", lambda t: t[1:].clone(), "qzeros"),
        ("scales", lambda t: t[:, :24].clone(), "qweight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, tensor, tmp_path):
    tensors = awq(*random_layer(K, N, 3, 4))
    tensors[name] = change(tensors[name])
    if tensor is None:  # 95 columns in 3 groups of 32 are legal
        assert one(tmp_path, config(), tensors).spec.k == K - 1
        return
    with pytest.raises(CheckpointError) as caught:
        one(tmp_path, config(), tensors)
    assert caught.value.tensor == f"m.proj.{tensor}"


def test_scales_that_are_not_finite(tmp_path):
    tensors = awq(*random_layer(K, N, 3, 4))
    tensors["scales"][0, 0] = float("-inf")
    with pytest.raises(CheckpointError, match=r"m\.proj\.scales.*infinite"):
        one(tmp_path, config(), tensors).weight()
