"""GPTQ against its producers' own weights and against a reference that unpacks one code at a time."""

import numpy as np
import pytest
import torch
from reference_packers import CHECKPOINTS, EXPECTED, gptq, matches_producer, planar, random_layer, stream, values, write

from bitline import CheckpointError, open_checkpoint
from bitline.formats.io.safetensors_source import SafetensorsSource

CASES = [(c, m) for c, modules in EXPECTED.items() if open_checkpoint(CHECKPOINTS / c).format == "gptq" for m in modules]
K, N, G = 96, 32, 32


def config(bits=4, group_size=G, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, "desc_act": False, **more}


def one(folder, conf, tensors, **how):
    (layer,) = write(folder, conf, {"m.proj": tensors}, **how).layers()
    return layer


def implicit_zeros(bits, groups=K // G, n=N):
    return [[1 << (bits - 1)] * n for _ in range(groups)]


@pytest.mark.parametrize(("case", "module"), CASES, ids=[f"{c}-{m.rpartition('.')[2]}" for c, m in CASES])
def test_producers_weight(case, module):
    assert matches_producer(case, module)


@pytest.mark.parametrize("case", sorted({c for c, _ in CASES}))
def test_every_layer_of_a_producer_is_read_without_warnings(case):
    checkpoint = open_checkpoint(CHECKPOINTS / case)
    assert checkpoint.dense_names() == (["model.layers.0.self_attn.q_proj.weight"] if "dynamic" in case else [])
    for layer in checkpoint.layers():
        weight = layer.weight()
        assert (weight.spec, layer.oddities) == (layer.spec, ())
        assert layer.nbytes == sum(checkpoint.source.tensors[t].nbytes for t in layer.tensors)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_asymmetric(bits, version, tmp_path):
    codes, zeros, scales = random_layer(K, N, K // G, bits)
    pack = planar if bits in (5, 6, 7) else stream
    tensors = gptq(codes, zeros, scales, bits, v1=version == "gptq", pack=pack)
    layer = one(tmp_path, config(bits, checkpoint_format=version), tensors)
    assert layer.format == ("gptq v1" if version == "gptq" else "gptq v2")
    assert layer.spec.scheme == f"uint{bits}+zero g{G}"
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


def test_a_zero_point_of_0_borrows_from_the_next_field_and_is_restored(tmp_path):
    codes, _, scales = random_layer(32, 8, 1, 4)
    zeros = [[0, 5, 0, 0, 15, 0, 9, 1]]
    tensors = gptq(codes, zeros, scales, 4, v1=True)
    assert int(tensors["qzeros"][0, 0]) & 0xF == 15 and (int(tensors["qzeros"][0, 0]) >> 4) & 0xF == 3  # 5 - 1 - borrow
    assert one(tmp_path, config(), tensors).weight().zero.flatten().tolist() == zeros[0]


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_planar_packing(bits, tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, bits)
    layer = one(tmp_path, config(bits, format="gptq_p"), gptq(codes, zeros, scales, bits, pack=planar))
    assert layer.format == "gptq planar"
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


@pytest.mark.parametrize("packing", [None, "auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:exllamav2"])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7, 8])
def test_auto_round_packs_all_bits_as_a_stream(bits, packing, tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, bits)
    v1 = packing in (None, "auto_round:auto_gptq")
    conf = {"quant_method": "auto-round", "bits": bits, "group_size": G, "sym": False, "data_type": "int"}
    conf |= {"packing_format": packing} if packing else {}
    layer = one(tmp_path, conf, gptq(codes, zeros, scales, bits, v1=v1))
    assert layer.format == f"auto-round gptq {'v1' if v1 else 'v2'}"
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // G for k in range(K)]))


@pytest.mark.parametrize("stored", [7, 8, None], ids=["v1", "v2-mislabelled", "absent"])
def test_symmetric_ignores_qzeros(stored, tmp_path):
    codes, _, scales = random_layer(K, N, 3, 4)
    tensors = gptq(codes, [[stored or 0] * N] * 3, scales, 4)
    if stored is None:
        del tensors["qzeros"]
    layer = one(tmp_path, config(sym=True), tensors)
    assert (layer.spec.weight.name, layer.spec.zero) == ("uint4b8", "none")
    assert ["stored as gptq_v2 stores them" in warning for warning in layer.oddities] == [True] * (stored == 8)
    assert torch.equal(layer.weight().dequantize(), values(codes, implicit_zeros(4), scales, [k // G for k in range(K)]))


def test_unexpected_symmetric_qzeros_are_a_warning(tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, 4)
    layer = one(tmp_path, config(sym=True), gptq(codes, zeros, scales, 4))
    assert "qzeros, which are not used, hold 0 to 15" in layer.oddities[0]
    assert torch.equal(layer.weight().dequantize(), values(codes, implicit_zeros(4), scales, [k // G for k in range(K)]))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_act_order_with_full_groups_is_a_permutation(bits, tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, bits)
    groups = np.random.default_rng(1).permutation(K) // G
    layer = one(tmp_path, config(bits, desc_act=True), gptq(codes, zeros, scales, bits, groups=groups, v1=True))
    assert (layer.spec.act_order, layer.spec.ragged, layer.oddities) == (True, False, ())
    weight = layer.weight()
    assert weight.perm.tolist() == sorted(range(K), key=lambda k: groups[k])
    assert torch.equal(weight.dequantize(), values(codes, zeros, scales, groups))


@pytest.mark.parametrize("ordered", [False, True], ids=["shuffled", "sorted"])
def test_unequal_groups(ordered, tmp_path):
    codes, zeros, scales = random_layer(K, N, 4, 4)
    groups = np.random.default_rng(2).choice([0, 1, 3], K)  # group 2 has no column
    groups = np.sort(groups) if ordered else groups
    layer = one(tmp_path, config(group_size=24, desc_act=True), gptq(codes, zeros, scales, 4, groups=groups, v1=True))
    assert (layer.spec.act_order, layer.spec.ragged) == (not ordered, True)
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, groups))


def test_negative_g_idx_counts_from_the_last_group(tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, 4)
    groups = np.random.default_rng(3).permutation(K) // G
    raw = [g - 3 if k % 2 else g for k, g in enumerate(groups)]
    layer = one(tmp_path, config(desc_act=True), gptq(codes, zeros, scales, 4, groups=raw, v1=True))
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, groups))


@pytest.mark.parametrize("bad", [3, -4, 2**31 - 1])
def test_g_idx_out_of_range(bad, tmp_path):
    tensors = gptq(*random_layer(K, N, 3, 4), 4, groups=[0] * 50 + [bad] + [1] * (K - 51))
    with pytest.raises(CheckpointError, match=rf"m\.proj\.g_idx.*group {bad} at column 50.*0\.\.2"):
        one(tmp_path, config(), tensors)


def test_trivial_g_idx_is_dropped_and_an_unannounced_one_kept(tmp_path):
    layer = random_layer(K, N, 3, 4)
    spec = one(tmp_path / "a", config(desc_act=True), gptq(*layer, 4, groups=[k // G for k in range(K)])).spec
    assert not spec.act_order and not spec.ragged
    unannounced = one(tmp_path / "b", config(), gptq(*layer, 4, groups=[(k * 5) % K // G for k in range(K)]))
    assert unannounced.spec.act_order and "does not mention" in unannounced.oddities[0]
    missing = one(tmp_path / "c", config(desc_act=True), gptq(*layer, 4))
    assert not missing.spec.act_order and "no g_idx" in missing.oddities[0]


@pytest.mark.parametrize(("group_size", "groups"), [(-1, 1), (40, 3), (64, 2), (1000, 1)])
def test_group_sizes(group_size, groups, tmp_path):
    codes, zeros, scales = random_layer(K, N, groups, 4)
    layer = one(tmp_path, config(group_size=group_size), gptq(codes, zeros, scales, 4, v1=True))
    size = group_size if group_size in range(1, K) else K
    assert layer.spec.block == (1, size)
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, [k // size for k in range(K)]))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "act-order", "ragged"])
@pytest.mark.parametrize("bits", [3, 4])
def test_shards_concatenate_to_the_whole(bits, kind, dim, tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, bits)
    rng = np.random.default_rng(4)
    groups = {"plain": None, "act-order": rng.permutation(K) // G, "ragged": rng.integers(0, 3, K)}[kind]
    tensors = gptq(codes, zeros, scales, bits, groups=groups, v1=True) | {"bias": torch.randn(N).half()}
    weight = one(tmp_path, config(bits, desc_act=True), tensors).weight()
    assert torch.equal(weight.bias, tensors["bias"])
    whole = weight.dequantize()
    assert torch.equal(torch.cat([weight.shard(dim, r, 3).dequantize() for r in range(3)], dim), whole)


def test_scales_and_bias_keep_their_dtype(tmp_path):
    codes, zeros, scales = random_layer(K, N, 3, 4, dtype=torch.bfloat16)
    weight = one(tmp_path, config(), gptq(codes, zeros, scales, 4, v1=True) | {"bias": torch.ones(N)}).weight()
    assert (weight.scale.dtype, weight.spec.scale_dtype, weight.bias.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_config_in_a_side_file(tmp_path):
    layer = random_layer(K, N, 3, 4)
    conf = config()
    del conf["quant_method"]
    assert one(tmp_path, conf, gptq(*layer, 4), side="quantize_config.json").format == "gptq v1"


# ---- overrides -----------------------------------------------------------------------------------------------------------


def test_dynamic_uses_the_first_pattern_that_matches_from_the_start(tmp_path):
    small, large = gptq(*random_layer(K, N, 3, 4), 4), gptq(*random_layer(K, N, 2, 8), 8)
    rules = {"r.b": {"bits": 3}, r"+:.*\.b$": {"bits": 8, "group_size": 48, "sym": True}, ".*": {}, "m.a": {"bits": 2}}
    a, b = write(tmp_path, config(dynamic=rules), {"m.a": small, "m.b": large}).layers()
    assert (a.spec.scheme, b.spec.scheme) == ("uint4+zero g32", "uint8b128 g48")


def test_dynamic_that_skips_a_quantized_layer_is_a_warning(tmp_path):
    layer = one(tmp_path, config(dynamic={"-:.*proj": {}}), gptq(*random_layer(K, N, 3, 4), 4))
    assert layer.spec.weight.bits == 4 and "not quantized" in layer.oddities[0]


def test_extra_config_prefers_the_name_to_patterns(tmp_path):
    layers = {f"m.{x}": gptq(*random_layer(K, N, 3, w), w) for x, w in (("a", 4), ("b", 8), ("c", 2))}
    extra = {"m.b": {"bits": 8}, "[bc]$": {"bits": 2}, "lm_head": {"bits": 16}}
    conf = {"quant_method": "auto-round", "bits": 4, "group_size": G, "sym": True, "extra_config": extra}
    records = write(tmp_path, conf, layers).layers()
    assert [r.spec.weight.bits for r in records] == [4, 8, 2]


def test_extra_config_under_another_wrapper(tmp_path):
    layers = {"model.language_model.layers.0.a": gptq(*random_layer(K, N, 3, 8), 8)}
    extra = {"model.layers.0.a": {"bits": 8}, "model.layers.1.a": {"bits": 2}}
    conf = {"quant_method": "auto-round", "bits": 4, "group_size": G, "sym": True, "extra_config": extra}
    (record,) = write(tmp_path, conf, layers).layers()
    assert record.spec.weight.bits == 8


@pytest.mark.parametrize(
    "dynamic", [{"-:(": {}}, {"a{99999999999}": {}}, ["x"], {"x": 3}, {"x": {"bits": "4"}}, {"x": {"group_size": 0}}],
    ids=["bracket", "overflow", "list", "number", "text", "zero"],
)  # fmt: skip
def test_bad_overrides(dynamic, tmp_path):
    with pytest.raises(CheckpointError, match=r"dynamic|override"):
        one(tmp_path, config(dynamic=dynamic), gptq(*random_layer(K, N, 3, 4), 4))


# ---- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "disagree about bits.*4 bits each.*bits = 8 in config.json"),
        ({"bits": 3}, "disagree about bits"),
        ({"group_size": 64}, "disagree about groups.*3 groups of 96.*group_size = 64 in config.json"),
        ({"group_size": -1}, "disagree about groups"),
        ({"bits": 16}, "bits.*2 to 8"),
        ({"bits": None}, "bits.*not a whole number.*nothing"),
        ({"bits": True}, "bits.*not a whole number"),
        ({"group_size": [1, 2]}, "group_size.*not a whole number"),
        ({"group_size": -5}, "group_size.*not valid"),
        ({"sym": "yes"}, "sym.*not true or false"),
        ({"pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ({"checkpoint_format": "marlin"}, "not supported yet.*marlin"),
        ({"is_marlin_format": True}, "not supported yet.*marlin"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "contradict"),
        ({"quant_method": "auto-round", "act_bits": 8}, "quantized activations"),
    ],
    ids=str,
)
def test_configs_that_contradict_or_are_unknown(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        one(tmp_path, config() | change, gptq(*random_layer(K, N, 3, 4), 4))


def without(name):
    return lambda t: t.pop(name)


def replaced(name, change):
    return lambda t: t.update({name: change(t[name])})


@pytest.mark.parametrize(
    ("damage", "tensor"),
    [
        (without("scales"), "scales"),
        (without("qzeros"), "qzeros"),
        (replaced("qweight", lambda t: t.long()), "qweight"),
        (replaced("qweight", lambda t: t[:, :-1].clone()), "qweight"),
        (replaced("qweight", lambda t: t[:-1].clone()), "g_idx"),
        (replaced("qweight", lambda t: t.flatten()), "qweight"),
        (replaced("qweight", lambda t: t[:0].clone()), "qweight"),
        (replaced("scales", lambda t: t.int()), "scales"),
        (replaced("scales", lambda t: t[:2].clone()), "qzeros"),
        (replaced("scales", lambda t: t[:, 1:].clone()), "qweight"),
        (replaced("qzeros", lambda t: t[:, 1:].clone()), "qzeros"),
        (replaced("g_idx", lambda t: t[1:].clone()), "g_idx"),
        (replaced("g_idx", lambda t: t.float()), "g_idx"),
        (lambda t: t.update(bias=torch.zeros(N + 1)), "bias"),
        (lambda t: t.update(bias=torch.zeros(N, dtype=torch.int32)), "bias"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_tensors_that_do_not_fit_are_named(damage, tensor, tmp_path):
    tensors = gptq(*random_layer(K, N, 3, 4), 4, groups=[k // G for k in range(K)])
    damage(tensors)
    with pytest.raises(CheckpointError) as caught:
        one(tmp_path, config(), tensors).weight()
    assert caught.value.tensor == f"m.proj.{tensor}"
    assert caught.value.file and caught.value.found and (caught.value.expected or caught.value.fix)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(value, tmp_path):
    tensors = gptq(*random_layer(K, N, 3, 4), 4)
    tensors["scales"][1, 5] = value
    layer = one(tmp_path, config(), tensors)
    with pytest.raises(CheckpointError, match=r"m\.proj\.scales.*NaN or infinite.*\[5, 1\]"):
        layer.weight()


def test_layers_reads_no_weights(tmp_path, monkeypatch):
    write(tmp_path, config(sym=True), {"m.proj": gptq(*random_layer(K, N, 3, 4), 4, groups=[0] * K)})
    read, original = [], SafetensorsSource.read
    record = lambda self, name, rows=None: read.append((name, rows)) or original(self, name, rows)
    monkeypatch.setattr(SafetensorsSource, "read", record)
    (layer,) = open_checkpoint(tmp_path).layers()
    assert sorted(read) == [("m.proj.g_idx", None), ("m.proj.qzeros", 1)]
    assert layer.tensors == ("m.proj.qweight", "m.proj.scales", "m.proj.qzeros", "m.proj.g_idx")


def test_gptq_tensors_under_the_name_of_awq_are_refused(tmp_path):
    conf = config() | {"quant_method": "awq", "zero_point": True}
    with pytest.raises(CheckpointError, match="GPTQ packs along K"):
        one(tmp_path, conf, gptq(*random_layer(K, N, 3, 4), 4))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("order", [False, True])
def test_columns_that_do_not_fill_the_last_int32(bits, order, tmp_path):
    k, g = 100, 32
    codes, zeros, scales = random_layer(k, N, 4, bits)
    groups = [(i * 37 % k if order else i) // g for i in range(k)]
    full = 32 if 32 % bits else 32 // bits
    padded = codes + [[0] * N] * (-k % full)
    tensors = gptq(padded, zeros, scales, bits, groups=groups)
    layer = one(tmp_path / "a", config(bits=bits, desc_act=order, checkpoint_format="gptq_v2"), tensors)
    assert layer.spec.k == k and layer.weight().spec == layer.spec
    assert torch.equal(layer.weight().dequantize(), values(codes, zeros, scales, groups))


def test_a_trivial_g_idx_is_a_warning_where_the_config_says_desc_act(tmp_path):
    tensors = gptq(*random_layer(K, N, 3, 4), 4, groups=[k // G for k in range(K)])
    assert "g_idx has the columns in input order" in one(tmp_path / "a", config(desc_act=True), tensors).oddities[0]
    assert one(tmp_path / "b", config(desc_act=False), tensors).oddities == ()
