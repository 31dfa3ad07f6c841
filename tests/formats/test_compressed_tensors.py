"""compressed-tensors: producers' own files bit for bit, and every layout against a reference that shares no code."""

import copy
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitline.errors import CheckpointError
from bitline.formats.base import TensorInfo
from bitline.formats.compressed_tensors import config as ct_config
from bitline.formats.compressed_tensors import presets
from bitline.formats.compressed_tensors.packing import act_order_of
from bitline.formats.compressed_tensors.reader import READER
from bitline.formats.io.safetensors_source import SafetensorsSource

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"
EXPECTED = json.loads((FIXTURES / "expected_ct.json").read_text())


class Source:
    """Tensors and a config in memory."""

    def __init__(self, config, tensors, path=Path("ckpt")):
        self.path, self.config, self.data = path, config, tensors
        self.tensors = {
            k: TensorInfo(k, t.dtype, tuple(t.shape), path / "model.safetensors", t.nbytes) for k, t in tensors.items()
        }

    def read(self, name):
        return self.data[name]


def case(name):
    return SafetensorsSource(FIXTURES / name)


# ---- real files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_real_checkpoints_are_bit_exact(name):
    source = case(name)
    assert READER.matches(source)
    layers = {layer.name: layer for layer in READER.layers(source)}
    codes = {n.rpartition(".")[0] for n, t in source.tensors.items() if n.endswith("_proj.weight") or n.endswith("weight_packed")}
    assert set(layers) == codes
    for module, facts in EXPECTED[name].items():
        weight = layers[module].weight()
        assert weight.spec == layers[module].spec
        values = weight.dequantize(getattr(torch, facts["dtype"]))
        assert hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() == facts["sha256"], module
        assert layers[module].nbytes == sum(source.tensors[t].nbytes for t in layers[module].tensors)
        assert layers[module].oddities == ()
    claimed = {name for layer in layers.values() for name in layer.tensors}
    assert not any(n.startswith(tuple(f"{layer}." for layer in layers)) for n in source.tensors.keys() - claimed)


@pytest.mark.parametrize(
    ("name", "label", "scheme"),
    [
        ("ct_fp8_block", "float-quantized", "float8_e4m3fn 128x128 a:float8_e4m3fn-dynamic-group128"),
        ("ct_fp8_static", "float-quantized", "float8_e4m3fn tensor a:float8_e4m3fn-static-tensor"),
        ("ct_nvfp4", "nvfp4-pack-quantized", "float4_e2m1 g16 a:float4_e2m1-dynamic-group16-e4m3"),
        ("ct_mxfp8", "mxfp8-quantized", "float8_e4m3fn g32 a:float8_e4m3fn-dynamic-group32-e8m0"),
        ("ct_w4a16_channel_asym", "pack-quantized", "uint4+zero channel"),
        ("ct_w4afp8", "int-quantized", "uint4b8 g128 a:float8_e4m3fn-dynamic-token"),
        ("ct_w8a8_int8_static_azp", "int-quantized", "int8 channel a:int8-static-tensor-asym"),
        ("ctold_w3_g32_sym_padded", "pack-quantized", "uint3b4 g32"),
        ("ctold_w4_g32_sym_actorder_group", "pack-quantized", "uint4b8 g32 act-order"),
        ("ar_fp8static_autoround", "float-quantized", "float8_e4m3fn channel a:float8_e4m3fn-static-tensor"),
        ("ar_mxfp4_autoround", "mxfp4-pack-quantized", "float4_e2m1 g32 a:float4_e2m1-dynamic-group32-e8m0"),
    ],
)
def test_real_checkpoints_have_their_scheme(name, label, scheme):
    layer = next(iter(READER.layers(case(name))))
    assert (layer.format, layer.spec.scheme) == (f"compressed-tensors {label}", scheme)


def test_a_mixed_checkpoint_has_the_format_of_each_group():
    kinds = {layer.name.split(".")[3]: layer.format.split()[1] for layer in READER.layers(case("ct_mixed_w4a16_fp8"))}
    assert kinds == {"self_attn": "float-quantized", "mlp": "pack-quantized"}


# ---- layouts against a reference -------------------------------------------------------------------------------------


def config(weights=None, *, fmt="pack-quantized", targets=("Linear",), ignore=("lm_head",), act=None, **more):
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, **(weights or {})}
    group = {"targets": list(targets), "weights": args, "input_activations": act, "output_activations": None}
    inner = {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}, "ignore": list(ignore)}
    return {"quantization_config": inner | more}


def pack(values, bits, dense):
    """Rows of integers 0..2**bits-1 to int32, with Python's own integers."""
    per_int32, rows = 32 // bits, []
    for row in values.tolist():
        if dense:
            number = sum(int(v) << (bits * i) for i, v in enumerate(row))
            rows.append([number >> (32 * i) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
        else:
            parts = [row[i : i + per_int32] for i in range(0, len(row), per_int32)]
            rows.append([sum(int(v) << (bits * i) for i, v in enumerate(p)) for p in parts])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def packed(n, k, bits, groups, *, dense=True, symmetric=True, seed=0):
    """A pack-quantized layer "a.b" and the signed codes and zero points in it."""
    rng = np.random.default_rng(seed)
    half = 1 << (bits - 1)
    q, z = rng.integers(-half, half, (n, k)), rng.integers(-half, half, (n, groups))
    tensors = {
        "a.b.weight_packed": pack(q + half, bits, dense),
        "a.b.weight_scale": torch.from_numpy(rng.normal(size=(n, groups)).astype(np.float32)),
        "a.b.weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["a.b.weight_zero_point"] = pack((z + half).T, bits, dense).t().contiguous()
    return tensors, q, z if not symmetric else np.zeros_like(z)


def reference(q, z, scale, g_idx):
    """(q - z) * scale, one element at a time, float32."""
    out = np.empty(q.shape, np.float32)
    for i in range(q.shape[0]):
        for j in range(q.shape[1]):
            out[i, j] = np.float32(q[i, j] - z[i, g_idx[j]]) * np.float32(scale[i, g_idx[j]])
    return torch.from_numpy(out)


def only(config, tensors):
    (layer,) = READER.layers(Source(config, tensors))
    return layer


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_codes_of_all_bits(bits, dense, symmetric):
    n, k, g = 11, 96, 32
    tensors, q, z = packed(n, k, bits, 3, dense=dense, symmetric=symmetric, seed=bits)
    tensors["a.b.bias"] = torch.arange(float(n))
    version = "0.20.0" if dense else "0.12.2"
    layer = only(config({"num_bits": bits, "symmetric": symmetric, "group_size": g}, version=version), tensors)
    weight = layer.weight()
    assert torch.equal(weight.dequantize(), reference(q, z, tensors["a.b.weight_scale"].numpy(), np.arange(k) // g))
    assert torch.equal(weight.bias, tensors["a.b.bias"]) and "a.b.bias" in layer.tensors
    if dense or 32 % bits == 0:  # the codes are the file's own bytes
        assert weight.codes.data_ptr() == tensors["a.b.weight_packed"].data_ptr()


@pytest.mark.parametrize("dense", [True, False])
def test_where_both_packings_fit_the_version_decides(dense):
    tensors, q, z = packed(2, 20, 3, 1, dense=dense, seed=4)
    layer = only(config({"num_bits": 3, "strategy": "channel"}, version="0.18.1" if dense else "0.17.9"), tensors)
    assert torch.equal(layer.weight().dequantize(), reference(q, z, tensors["a.b.weight_scale"].numpy(), [0] * 20))


@pytest.mark.parametrize("k", [37, 64])
def test_channel_and_tensor_scales(k):
    tensors, q, z = packed(5, k, 4, 1, symmetric=False)
    layer = only(config({"strategy": "channel", "symmetric": False, "group_size": None}), tensors)
    assert layer.spec.group_size == -1
    assert torch.equal(layer.weight().dequantize(), reference(q, z, tensors["a.b.weight_scale"].numpy(), [0] * k))
    for shape in [(), (1,)]:
        whole = tensors | {
            "a.b.weight_scale": torch.full(shape, 0.5),
            "a.b.weight_zero_point": torch.full(shape, -3, dtype=torch.int8),
        }
        layer = only(config({"strategy": "tensor", "symmetric": False, "group_size": None}), whole)
        assert layer.spec.block == (5, k)
        assert torch.equal(layer.weight().dequantize(), reference(q, np.full((5, 1), -3), np.full((5, 1), 0.5), [0] * k))


def test_int8_zero_points_and_unused_zero_points():
    tensors, q, z = packed(6, 32, 4, 2, symmetric=False)
    scale = tensors["a.b.weight_scale"].numpy()
    old = tensors | {"a.b.weight_zero_point": torch.from_numpy(z.astype(np.int8))}
    assert torch.equal(only(config({"symmetric": False}), old).weight().dequantize(), reference(q, z, scale, np.arange(32) // 16))
    assert torch.equal(only(config(), tensors).weight().dequantize(), reference(q, 0 * z, scale, np.arange(32) // 16))
    with pytest.raises(CheckpointError, match=r"zero points are out of range.*a\.b\.weight_zero_point"):
        only(config({"symmetric": False}), old | {"a.b.weight_zero_point": torch.full((6, 2), 8, dtype=torch.int8)}).weight()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kind", ["regular", "uneven", "unused", "sorted"])
def test_act_order(kind, dense):
    n, k, bits = 4, 64, 3
    tensors, q, z = packed(n, k, bits, 4, dense=dense, symmetric=False)
    g_idx = np.arange(k) // 16
    if kind == "regular":
        g_idx = np.random.default_rng(1).permutation(g_idx)
    elif kind == "uneven":
        g_idx = np.random.default_rng(1).integers(0, 4, k)
    stored = np.full(k, -1) if kind == "unused" else g_idx
    tensors["a.b.weight_g_idx"] = torch.from_numpy(stored.astype(np.int32))
    layer = only(config({"num_bits": bits, "symmetric": False, "actorder": "group"}), tensors)
    assert layer.spec.act_order == (kind in ("regular", "uneven")) and layer.spec.ragged == (kind == "uneven")
    assert torch.equal(layer.weight().dequantize(), reference(q, z, tensors["a.b.weight_scale"].numpy(), g_idx))


def test_unexpected_act_order_is_a_warning_or_refused():
    tensors, *_ = packed(4, 64, 4, 4)
    assert only(config({"actorder": "weight"}), tensors).oddities == ()
    assert "no weight_g_idx" in only(config({"actorder": "group"}), tensors).oddities[0]
    index = torch.arange(64, dtype=torch.int32).flip(0) // 16
    assert "does not mention" in only(config({"actorder": "static"}), tensors | {"a.b.weight_g_idx": index}).oddities[0]
    for bad in (index + 1, index - 1):
        with pytest.raises(CheckpointError, match=r"not an act-order index.*weight_g_idx.*0\.\.3"):
            only(config(), tensors | {"a.b.weight_g_idx": bad})
    with pytest.raises(CheckpointError, match=r"found \[3\], expected \[64\]"):
        only(config(), tensors | {"a.b.weight_g_idx": index[:3]})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.sampled_from([1, 2, 4, 8]))
def test_act_order_keeps_each_column_in_its_group(g_idx, group):
    perm, index = act_order_of(torch.tensor(g_idx, dtype=torch.int32), group, 4)
    stored = list(range(len(g_idx))) if perm is None else perm.tolist()
    groups = [j // group for j in range(len(g_idx))] if index is None else index.tolist()
    assert [groups[stored.index(k)] for k in range(len(g_idx))] == g_idx


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_storage(bits, symmetric):
    rng, half = np.random.default_rng(bits), 1 << (bits - 1)
    q, z = rng.integers(-half, half, (5, 48)).astype(np.int8), rng.integers(-half, half, (5, 3)).astype(np.int8)
    scale = torch.from_numpy(rng.normal(size=(5, 3)).astype(np.float32))
    tensors = {"a.b.weight": torch.from_numpy(q), "a.b.weight_scale": scale}
    if not symmetric:
        tensors["a.b.weight_zero_point"] = torch.from_numpy(z)
    layer = only(config({"num_bits": bits, "symmetric": symmetric}, fmt="int-quantized"), tensors)
    zero = z.astype(int) * (not symmetric)
    assert torch.equal(layer.weight().dequantize(), reference(q.astype(int), zero, scale.numpy(), np.arange(48) // 16))
    if bits == 8 and symmetric:
        assert layer.weight().codes.data_ptr() == tensors["a.b.weight"].data_ptr()


def test_integers_that_do_not_fit_their_bits():
    tensors = {"a.b.weight": torch.full((2, 16), 8, dtype=torch.int8), "a.b.weight_scale": torch.ones(2, 1)}
    with pytest.raises(CheckpointError, match=r"values do not fit 4 bits.*a\.b\.weight.*found 8\.\.8, expected -8\.\.7"):
        only(config(fmt="int-quantized"), tensors).weight()


@pytest.mark.parametrize("structure", [[8, 16], "8x16"])
def test_fp8_blocks_with_ragged_edges(structure):
    raw = torch.randn(19, 40).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3).bfloat16()
    args = {"num_bits": 8, "type": "float", "strategy": "block", "group_size": None, "block_structure": structure}
    layer = only(config(args, fmt="float-quantized"), {"a.b.weight": raw, "a.b.weight_scale": scale})
    expected = torch.stack(
        [torch.stack([raw[i, j].float() * scale[i // 8, j // 16].float() for j in range(40)]) for i in range(19)]
    )
    assert layer.spec.block == (8, 16) and torch.equal(layer.weight().dequantize(), expected)


@pytest.mark.parametrize(
    ("strategy", "shape"), [("tensor", ()), ("tensor", (1,)), ("tensor", (1, 1)), ("channel", (6,)), ("channel", (6, 1))]
)
@pytest.mark.parametrize("fmt", ["float-quantized", "naive-quantized"])
def test_fp8_scales_of_every_shape(strategy, shape, fmt):
    raw, scale = torch.randn(6, 40).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    args = {"num_bits": 8, "type": "float", "strategy": strategy, "group_size": None}
    layer = only(config(args, fmt=fmt), {"a.b.weight": raw, "a.b.weight_scale": scale})
    assert layer.format == f"compressed-tensors {fmt}"
    assert torch.equal(layer.weight().dequantize(), raw.float() * (scale.reshape(-1, 1) if scale.numel() == 6 else scale))


def test_mxfp6_is_a_bit_stream_of_e2m3():
    codes = torch.randint(0, 64, (3, 64))
    number = [sum(int(c) << (6 * i) for i, c in enumerate(row)).to_bytes(48, "little") for row in codes]
    raw = torch.tensor([list(b) for b in number], dtype=torch.uint8)
    scale = torch.randint(120, 135, (3, 2), dtype=torch.uint8)

    def e2m3(c):
        e, m = (c >> 3) & 3, c & 7
        return (-1) ** (c >> 5) * (m / 8 if e == 0 else (1 + m / 8) * 2 ** (e - 1))

    expected = torch.tensor(
        [[e2m3(int(codes[i, j])) * 2.0 ** (int(scale[i, j // 32]) - 127) for j in range(64)] for i in range(3)]
    )
    args = {"num_bits": 6, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}
    layer = only(config(args, fmt="mxfp6-pack-quantized"), {"a.b.weight_packed": raw, "a.b.weight_scale": scale})
    assert torch.equal(layer.weight().dequantize(), expected)


def test_a_global_scale_of_zero_is_refused():
    files = case("ct_nvfp4a16")
    name = "model.layers.0.mlp.down_proj.weight_global_scale"
    source = Source(files.config, {n: torch.zeros(1) if n == name else files.read(n) for n in files.tensors})
    with pytest.raises(CheckpointError, match=rf"global scale.*{name}.*found 0"):
        next(layer for layer in READER.layers(source) if layer.name.endswith("down_proj")).weight()


# ---- activations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "text"),
    [
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, "int8-dynamic-token"),
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": False}, "int8-dynamic-token-asym"),
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "tensor"}, "float8_e4m3fn-dynamic-tensor"),
        (
            {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128},
            "float8_e4m3fn-dynamic-group128",
        ),
        ({"num_bits": 8, "type": "float", "dynamic": False, "strategy": None}, "float8_e4m3fn-static-tensor"),
        ({"num_bits": 4, "type": "int", "dynamic": True, "strategy": "token"}, "int4-dynamic-token"),
    ],
)
def test_activation_schemes(act, text):
    tensors, *_ = packed(4, 32, 4, 2)
    layer = only(config(act=act), tensors | {"a.b.input_scale": torch.tensor([0.5])})
    assert str(layer.spec.act) == text
    assert (layer.weight().input_scale is not None) == ("static" in text)


def test_static_activations_need_their_tensors():
    act = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor", "symmetric": False}
    tensors, *_ = packed(4, 32, 4, 2)
    with pytest.raises(CheckpointError, match=r"lacks a tensor.*a\.b\.input_scale"):
        only(config(act=act), tensors)
    tensors["a.b.input_scale"] = torch.tensor([0.5])
    with pytest.raises(CheckpointError, match=r"lacks a tensor.*a\.b\.input_zero_point"):
        only(config(act=act), tensors)
    weight = only(config(act=act), tensors | {"a.b.input_zero_point": torch.tensor([-5], dtype=torch.int8)}).weight()
    assert float(weight.input_scale) == 0.5 and int(weight.input_zero) == -5
    with pytest.raises(CheckpointError, match=r"a\.b\.input_scale\].*found \[2\]"):
        only(config(act=act), tensors | {"a.b.input_scale": torch.ones(2)})


# ---- which scheme --------------------------------------------------------------------------------------------------


def schemes(groups, ignore=()):
    inner = {"config_groups": groups, "ignore": list(ignore)}
    return ct_config.parse(inner, Path("config.json"))


def test_names_precede_patterns_and_patterns_precede_classes():
    weights = {"num_bits": 8}
    groups = {
        name: {"targets": targets, "weights": weights}
        for name, targets in {
            "class": ["Linear"],
            "pattern": ["re:.*down_proj"],
            "first": ["re:model.*q_proj$"],
            "name": ["x.down_proj"],
        }.items()
    }
    groups["attention"] = {"targets": ["LlamaAttention"], "weights": None}
    found = schemes(groups, ["lm_head", "re:visual.*"])
    assert found.find("x.down_proj").name == "name"
    assert found.find("y.down_proj").name == "pattern"
    assert found.find("model.q_proj").name == "first"
    assert found.find("the.model.q_proj").name == "class"  # re.match: from the start of the name
    assert found.find("model.embed_tokens") is None
    ignored = {"lm_head": True, "language_model.lm_head": True, "x.lm_head": False, "visual.a": True, "a.visual": False}
    assert {name: found.ignored(name) for name in ignored} == ignored


def test_tensors_win_over_a_wrong_ignore_list():
    tensors, *_ = packed(4, 32, 4, 2)
    assert "ignore list" in only(config(ignore=["re:.*b"]), tensors).oddities[0]


def test_tensors_win_over_the_declared_format():
    tensors = {"a.b.weight": torch.zeros(2, 16, dtype=torch.int8), "a.b.weight_scale": torch.ones(2, 1)}
    layer = only(config(fmt="pack-quantized"), tensors)
    assert layer.format.endswith("int-quantized") and "the config says pack-quantized" in layer.oddities[0]


def test_float_weights_are_not_layers():
    tensors = {"a.b.weight": torch.zeros(2, 16), "a.norm.weight": torch.zeros(16), "a.attn.k_scale": torch.ones(1)}
    assert list(READER.layers(Source(config(), tensors))) == []


@pytest.mark.parametrize(
    ("preset", "scheme"),
    [
        ("W4A16", "uint4b8 g16"), ("w4a16_asym", "uint4+zero g16"), ("W4A8", "uint4b8 g16 a:int8-dynamic-token"),
        ("W4AFP8", "uint4b8 g16 a:float8_e4m3fn-dynamic-token"),
    ],
)  # fmt: skip
def test_preset_names_take_group_sizes_from_the_scales(preset, scheme):
    tensors, *_ = packed(8, 32, 4, 2, symmetric=False)
    raw = {"quant_method": "compressed-tensors", "config_groups": {preset: ["Linear"]}}
    assert only({"quantization_config": raw}, tensors).spec.scheme == scheme
    tensors["a.b.weight_scale"] = tensors["a.b.weight_scale"][:, :1].contiguous()
    del tensors["a.b.weight_zero_point"]
    if "asym" not in preset:
        assert only({"quantization_config": raw}, tensors).spec.group_size == -1


def test_float_presets_parse():
    for name in presets._FLOAT_PRESETS:
        assert schemes({name: ["Linear"]}).find("a").weights.is_float
    assert schemes({"UNQUANTIZED": ["Linear"]}).find("a") is None


def test_auto_round_overrides_single_layers():
    raw = {
        "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 16, "sym": True,
        "extra_config": {"a.b": {"bits": 8}, r".*\.c$": {"sym": False}},
    }  # fmt: skip
    eight, *_ = packed(4, 32, 8, 2)
    four, *_ = packed(4, 32, 4, 2, symmetric=False)
    tensors = eight | {k.replace("a.b", "x.c"): v for k, v in four.items()}
    found = {layer.name: layer.spec.scheme for layer in READER.layers(Source({"quantization_config": raw}, tensors))}
    assert found == {"a.b": "uint8b128 g16", "x.c": "uint4+zero g16"}
    with pytest.raises(CheckpointError, match="extra_config is not an object"):
        list(READER.layers(Source({"quantization_config": raw | {"extra_config": [1]}}, tensors)))
    for wrong in ({"bits": "4"}, {"extra_config": {"(": {}}}, {"extra_config": {"a.b": 3}}, {"data_type": "mx_uint"}):
        with pytest.raises(CheckpointError, match="quantization config is not valid"):
            list(READER.layers(Source({"quantization_config": raw | wrong}, tensors)))


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "are rotated.*R1"),
        ({"transform_config": {"config_groups": 5}}, "are rotated"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask.*2:4 sparse"),
        ({"format": "marlin-24"}, "marlin-24.*not supported"),
        ({"config_groups": {"g": {"targets": 3}}}, r"config_groups.*targets"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": "4"}}}}, r"Expected `int`, got `str`.*num_bits"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "complex"}}}}, r"type is 'complex'"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"strategy": "group"}}}}, "needs a group_size"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"strategy": "block", "block_structure": "8"}}}},
            "block_structure",
        ),
        ({"config_groups": {"W9A16": ["Linear"]}}, "field config_groups.W9A16.*'W9A16' is not a preset"),
        ({"config_groups": {"g": {"targets": ["re:("], "weights": {"num_bits": 4}}}}, "not a regular expression"),
        (
            {"config_groups": {"g": {"targets": ["re:z"], "weights": {"num_bits": 4}}}},
            "no config group targets it.*weight_packed",
        ),
        ({"config_groups": []}, "quantization config is not valid"),
        ({"sparsity_config": None, "transform_config": None, "unknown": 1}, None),
    ],
)
def test_configs_that_are_refused(change, message):
    tensors, *_ = packed(4, 32, 4, 2)
    changed = copy.deepcopy(config())
    changed["quantization_config"] |= change
    if message is None:
        assert only(changed, tensors)
        return
    with pytest.raises(CheckpointError, match=message):
        only(changed, tensors)


@pytest.mark.parametrize(
    "act",
    [
        {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "token"},
        {"num_bits": 6, "type": "float", "dynamic": True, "strategy": "token"},
        {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "attn_head"},
    ],
)
def test_activations_that_are_refused(act):
    with pytest.raises(CheckpointError, match=r"field config_groups\.group_0\]: found input_activations are .* not supported"):
        only(config(act=act), packed(4, 32, 4, 2)[0])


BAD_TENSORS = {
    "bits": ({}, {"num_bits": 5}, r"columns do not fit 32 codes of 5 bits.*weight_packed.*found 4, expected 5 \(dense\) or 6"),
    "float": ({}, {"type": "float"}, "codes do not fit their config group.*float 4 bits"),
    "shape rows": ({"weight_shape": torch.tensor([5, 32])}, {}, r"weight_shape does not fit.*\[5, 32\]"),
    "shape columns": ({"weight_shape": torch.tensor([4, 1 << 60])}, {}, "weight_shape does not fit"),
    "shape negative": ({"weight_shape": torch.tensor([4, -1])}, {}, "weight_shape does not fit"),
    "shape size": ({"weight_shape": torch.zeros(100, dtype=torch.int64)}, {}, "weight_shape does not fit"),
    "no shape": ({"weight_shape": None}, {}, r"lacks a tensor.*a\.b\.weight_shape"),
    "no scale": ({"weight_scale": None}, {}, r"lacks a tensor.*a\.b\.weight_scale"),
    "scale grid": ({"weight_scale": torch.ones(4, 3)}, {}, r"scales do not fit a \[4, 32\] weight.*found \[4, 3\], "),
    "scale dtype": ({"weight_scale": torch.ones(4, 2, dtype=torch.uint8)}, {}, r"another dtype.*weight_scale"),
    "no zeros": ({}, {"symmetric": False}, r"lacks a tensor.*weight_zero_point"),
    "zeros shape": ({"weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}, {"symmetric": False}, "zero points do not fit"),
    "bias": ({"bias": torch.ones(3)}, {}, r"bias does not fit.*\[3\].*\[4\]"),
    "experts": ({"weight_packed": torch.zeros(2, 4, 4, dtype=torch.int32)}, {}, r"not the matrix.*found \[2, 4, 4\]"),
    "codes dtype": ({"weight_packed": torch.zeros(4, 4, dtype=torch.int16)}, {}, "another dtype"),
    "strategy": ({}, {"strategy": "token"}, "not quantized this way.*strategy token"),
    "scales alone": ({"weight_packed": None}, {}, r"scales without codes.*a\.b\.weight_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_contradict_the_config(name):
    change, weights, message = BAD_TENSORS[name]
    tensors, *_ = packed(4, 32, 4, 2)
    tensors |= {f"a.b.{k}": v for k, v in change.items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        only(config(weights), {k: v for k, v in tensors.items() if v is not None}).weight()
    assert caught.value.file is not None and caught.value.tensor.startswith("a.b")


def test_bad_scales_name_file_and_tensor():
    tensors, *_ = packed(4, 32, 4, 2)
    tensors["a.b.weight_scale"][1, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.safetensors, tensor a\.b.*NaN or infinite"):
        only(config(), tensors).weight()
