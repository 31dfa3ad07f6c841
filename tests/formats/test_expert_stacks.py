"""Experts stacked in one tensor: each is a layer, equal to the same layer stored as a module."""

import pytest
import torch
from producers import one, write
from reference_minifloats import finite_fp8, random_bytes

from bitline import CheckpointError
from bitline.formats.common.expert_stacks import ExpertStacks
from bitline.formats.common.module_names import ByModuleName

E, N, K = 3, 32, 64
STACK = "model.layers.0.mlp.experts.down_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FBGEMM = {"quant_method": "fbgemm_fp8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
MO_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
PACK_QUANTIZED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "version": "0.20.0", "config_groups": {"g": {
    "targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}}}  # fmt: skip


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def weights(seed=0):
    return finite_fp8(E, N, K, seed=seed)


def nvfp4():
    return {
        "weight": random_bytes(E, N, K // 2), "weight_scale": rand(E, N, K // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": rand(E), "input_scale": rand(E),
    }  # fmt: skip


def pack_quantized():
    g = torch.Generator().manual_seed(2)
    return {
        "weight_packed": torch.randint(-(1 << 31), 1 << 31, (E, N, K // 8), generator=g).int(),
        "weight_scale": rand(E, N, K // 32).bfloat16(), "weight_shape": torch.tensor([E, N, K]),
    }  # fmt: skip


def zeros(bits):
    """pack-quantized or int-quantized weights with zero points, which differ from expert to expert."""
    g = torch.Generator().manual_seed(3)
    if bits == 4:
        return pack_quantized() | {
            "weight_zero_point": torch.randint(-(1 << 31), 1 << 31, (E, N // 8, K // 32), generator=g).int()
        }
    return {
        "weight": torch.randint(-128, 128, (E, N, K), generator=g).to(torch.int8), "weight_scale": rand(E, N, 1),
        "weight_zero_point": torch.randint(-128, 128, (E, N, 1), generator=g).to(torch.int8),
    }  # fmt: skip


def asymmetric(bits):
    scheme = {"num_bits": bits, "symmetric": False} | (
        {"group_size": 32, "strategy": "group"} if bits == 4 else {"strategy": "channel"}
    )
    kind = "pack-quantized" if bits == 4 else "int-quantized"
    return PACK_QUANTIZED | {"format": kind, "config_groups": {"g": {"targets": ["Linear"], "weights": scheme}}}


CASES = {  # config, tensors of a module, suffixes of the same tensors of a stacked parameter
    "blocks": (FP8 | {"weight_block_size": [16, 32]}, {"weight": weights(), "weight_scale_inv": rand(E, 2, 2)},
               {"weight_scale_inv": "_scale_inv"}),
    "static": (FP8 | {"activation_scheme": "static"},
               {"weight": weights(), "weight_scale_inv": rand(E), "activation_scale": rand(E, seed=1), "bias": rand(E, N)},
               {"weight_scale_inv": "_scale_inv", "activation_scale": "_activation_scale", "bias": "_bias"}),
    "shared scale": (FP8, {"weight": weights(), "weight_scale": torch.tensor(0.5)}, {"weight_scale": "_weight_scale"}),
    "fbgemm": (FBGEMM, {"weight": weights(), "weight_scale": rand(E, N, 1)}, {"weight_scale": "_scale"}),
    "modelopt fp8": (MO_FP8, {"weight": weights(), "weight_scale": rand(E), "input_scale": rand(1)},
                     {"weight_scale": "_weight_scale", "input_scale": "_input_scale"}),
    "modelopt nvfp4": (NVFP4, nvfp4(), {s: f"_{s}" for s in ("weight_scale", "weight_scale_2", "input_scale")}),
    "packed": (PACK_QUANTIZED, pack_quantized(), None),
    "packed zeros": (asymmetric(4), zeros(4), None),
    "int8 zeros": (asymmetric(8), zeros(8), None),
}  # fmt: skip


def as_module(parts, e):
    """The tensors of one expert as a module."""
    out = {}
    for name, part in parts.items():
        out[name] = part[e] if part.shape[:1] == (E,) and name != "weight_shape" else part
    if "weight_shape" in out:
        out["weight_shape"] = torch.tensor([N, K])
    return out


def same(record, expected):
    ours, theirs = record.weight(), expected.weight()
    assert ours.spec == theirs.spec and torch.equal(ours.dequantize(), theirs.dequantize())
    for name in ("input_scale", "bias"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_expert_is_a_layer(case, own, tmp_path):
    config, parts, names = CASES[case]
    if own:
        stacked = {f"{STACK}.{suffix}": part for suffix, part in parts.items()}
    elif names is None:
        return
    else:
        stacked = {STACK: parts["weight"]} | {STACK + name: parts[suffix] for suffix, name in names.items()}
    checkpoint = write(tmp_path / "stack", config, {}, modules=stacked)
    layers = checkpoint.layers()
    assert [layer.name for layer in layers] == [f"{STACK}.{e}" for e in range(E)] and checkpoint.dense_names() == []
    assert set(layers[0].tensors) == set(stacked)
    for e, layer in enumerate(layers):
        same(layer, one(tmp_path / f"{e}", config, as_module(parts, e)))


@pytest.mark.parametrize(
    ("case", "model", "transposed"),
    [
        ("fbgemm", "llama", ("weight",)),  # [E, in, out] and scales [E, out, 1]
        ("modelopt nvfp4", "llama", ("weight", "weight_scale")),  # only one orientation fits
        ("modelopt fp8", "llama4_text", ("weight",)),  # a shared scale: only the model type decides
    ],
)
def test_transposed_stacks(case, model, transposed, tmp_path):
    config, parts, names = CASES[case]
    stored = lambda t, name: t.view(torch.uint8).transpose(1, 2).contiguous().view(t.dtype) if name in transposed else t
    stacked = {STACK: stored(parts["weight"], "weight")}
    stacked |= {STACK + name: stored(parts[suffix], suffix) for suffix, name in names.items()}
    folder = tmp_path / "stack"
    checkpoint = write(folder, config, {}, modules=stacked, model=model)
    for e, layer in enumerate(checkpoint.layers()):
        same(layer, one(tmp_path / f"{e}", config, as_module(parts, e)))


def test_unstacked_scales_beside_a_stack_are_refused(tmp_path):
    tensors = {STACK: weights(), STACK + "_scale_inv": rand(2, 2)}
    with pytest.raises(CheckpointError, match=r"(?s)does not account for|not the matrix"):
        write(tmp_path, FP8 | {"weight_block_size": [16, 32]}, {}, modules=tensors).layers()


def test_a_square_stack_of_a_transposing_model_is_refused(tmp_path):
    tensors = {STACK: finite_fp8(E, N, N), STACK + "_scale": rand(E, N, 1)}
    with pytest.raises(CheckpointError, match="input dimension is ambiguous"):
        write(tmp_path, FBGEMM, {}, modules=tensors, model="llama4").layers()


def test_other_tensors_are_unchanged(tmp_path):
    tensors = {STACK: weights(), STACK + "_scale_inv": rand(E), "norm.weight": rand(K)}
    source = write(tmp_path, FP8, {}, modules=tensors).source
    stacks = ExpertStacks(source, (torch.float8_e4m3fn,))
    assert torch.equal(stacks.read("norm.weight"), tensors["norm.weight"]) and STACK not in stacks.tensors
    assert torch.equal(stacks.read("norm.weight", 4), tensors["norm.weight"][:4])
    assert stacks.tensors[f"{STACK}.1.weight"].shape == (N, K) and stacks.tensors[f"{STACK}.1.weight"].name == STACK


@pytest.mark.parametrize(
    ("names", "module", "found"),
    [
        (["model.layers.0.q_proj"], "model.layers.0.q_proj", 0),
        (["model.layers.0.q_proj"], "model.language_model.layers.0.q_proj", 0),
        (["language_model.model.layers.0.q_proj"], "model.layers.0.q_proj", 0),
        (["model.layers.0.qkv_proj"], "model.layers.0.k_proj", 0), (["layers.0.gate_up_proj"], "model.layers.0.up_proj", 0),
        (["layers.0.gate_proj", "layers.0.up_proj"], "layers.0.gate_up_proj", None),  # they disagree
        (["layers.0.gate_proj"], "layers.0.gate_up_proj", None), (["layers.0.q_proj"], "layers.1.q_proj", None),
        (["lm_head"], "language_model.lm_head", 0), ([], "x", None),
    ],
)  # fmt: skip
def test_module_name_aliases(names, module, found):
    assert ByModuleName({name: i for i, name in enumerate(names)}).find(module) == found
