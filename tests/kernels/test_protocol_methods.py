"""A serving engine's layers, method by method, on producers' checkpoints: fused, sharded, on every kernel that runs here."""

from dataclasses import replace
from pathlib import Path

import protocol_methods as engine
import pytest
import torch
from safetensors.torch import load_file

import bitline
from bitline.errors import InputError
from bitline.kernels import registry
from bitline.platform import Platform
from bitline.protocol.adapter import protocol_class
from bitline.protocol.layer_reader import read_layer
from bitline.testing.tolerance import compare

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"
BF16 = torch.bfloat16
CASES = {
    "gq_w4g128_sym_v1": ("mp", engine.GPTQ, {}),
    "gq_w4g32_sym_descact_v1": ("mp", engine.GPTQ, {"group": 32, "desc_act": True}),
    "gq_w2g32_sym_v1": ("mp", engine.GPTQ, {"group": 32, "bits": 2}),
    "ar_w3g32_sym_autogptq": ("mp", engine.GPTQ, {"group": 32, "bits": 3}),
    "ar_w8g128_sym_autogptq": ("mp", engine.GPTQ, {"bits": 8}),
    "autoawq_gemm": ("mp", engine.AWQ, {}),
    "ct_w4a16_g128_sym": ("mp", engine.PackQuantized, {}),
    "ct_w4a16_g128_asym": ("mp", engine.PackQuantized, {"zero_points": True}),
    "ct_w4a16_channel_asym": ("mp", engine.PackQuantized, {"zero_points": True, "group": -1}),
    "ctold_w4_g32_sym_actorder_group": ("mp", engine.PackQuantized, {"group": 32, "has_g_idx": True}),
    "ct_w4a8_int": ("mp", engine.W4A8, {}),
    "ct_w4afp8": ("mp", engine.W4A8, {"act": torch.float8_e4m3fn}),
    "ct_w8a8_int8_dynamic": ("int8", engine.Int8, {}),
    "ct_w8a8_int8_static_azp": ("int8", engine.Int8, {"static": True, "symmetric": False}),
    "ct_fp8_dynamic": ("fp8", engine.FP8, {}),
    "ct_fp8_static": ("fp8", engine.FP8, {"per_channel": False}),
    "ct_fp8_block": ("fp8_block", engine.FP8Block, {}),
    "ct_nvfp4": ("nvfp4", engine.NVFP4, {}),
    "ct_nvfp4a16": ("nvfp4", engine.NVFP4, {"use_a16": True}),
    "ct_mxfp4a16": ("mxfp4", engine.MX, {}),
    "ct_mxfp8": ("mxfp8", engine.MX, {"bits": 8}),
}
UNFUSABLE = ("ctold_w4_g32_sym_actorder_group",)  # each of the fused layers has its own g_idx
QKV = {"q": "model.layers.0.self_attn.q_proj", "k": "model.layers.0.self_attn.k_proj", "v": "model.layers.0.self_attn.v_proj"}
DOWN = {"down": "model.layers.0.mlp.down_proj"}


def tensors(case, prefix):
    file = load_file(FIXTURES / case / "model.safetensors")
    return {name.removeprefix(prefix + "."): tensor for name, tensor in file.items() if name.startswith(prefix + ".")}


def made(case, kind, rank, world, kernel=None, heads=2):
    """A loaded layer and, for each fused layer, (its rows, the canonical weight that they should be)."""
    _, method, options = CASES[case]
    names = DOWN if kind == "row" else QKV
    canonical = {part: bitline.open_checkpoint(FIXTURES / case).layer(name).weight().with_act_dtype(BF16)
                 for part, name in names.items()}  # fmt: skip
    replicas = max(1, world // heads) if kind == "qkv" else 1
    shards = {part: (world // replicas, rank // replicas) if part in "kv" else (world, rank) for part in names}
    rows = {part: w.spec.n // (1 if kind == "row" else shards[part][0]) for part, w in canonical.items()}
    layer = engine.Linear(method(kernel, **options), next(iter(canonical.values())).spec.k, rows, kind, rank, world, replicas)
    for part, prefix in names.items():
        for name, tensor in tensors(case, prefix).items():
            if name not in method.unused:
                layer.load(method.renamed.get(name, name), tensor, part)
    parts, at = [], 0
    for part, weight in canonical.items():
        shard = weight.shard(1 if kind == "row" else 0, shards[part][1], shards[part][0])
        parts.append((slice(at, at + rows[part]), shard))
        at += rows[part]
    return layer, shared_input(parts)


def shared_input(parts):
    """Fused layers have one static activation scale: the range that covers all of theirs."""
    weights = [w for _, w in parts]
    if weights[0].input_scale is None:
        return parts
    scale, zero = torch.stack([w.input_scale.float() for w in weights]), None
    if weights[0].input_zero is not None:
        zeros = torch.stack([w.input_zero.float() for w in weights])
        low, high = ((-128 - zeros) * scale).min(), ((127 - zeros) * scale).max()
        scale = (high - low) / 255
        zero = (-128 - low / scale).round().to(torch.int32)
    else:
        scale = scale.min() if weights[0].spec.weight.name == "float4_e2m1" else scale.max()
    return [(rows, replace(w, input_scale=scale, input_zero=zero)) for rows, w in parts]


def check(layer, parts, m=5):
    x = torch.randn(m, layer.input_size_per_partition, generator=torch.Generator().manual_seed(m)).to(BF16)
    y = layer(x)
    for rows, weight in parts:
        found = compare(y[:, rows], x, weight)
        assert found.ok, str(found)
    return x, y


@pytest.mark.parametrize("kind", ["qkv", "row"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_layers_of_every_rank(case, world, kind):
    if case in UNFUSABLE and kind == "qkv":
        with pytest.raises(InputError, match="fused layers share this parameter"):
            made(case, kind, 0, world)
        return
    for rank in range(world):
        layer, parts = made(case, kind, rank, world)
        layer.method.process(layer)
        x, y = check(layer, parts)
        layer.method.process(layer)
        assert torch.equal(layer(x), y)


def test_a_fused_layer_can_be_loaded_again():
    layer, _ = made("gq_w4g32_sym_descact_v1", "qkv", 0, 1)
    order = layer.g_idx.data.flip(0)
    for part in QKV:
        layer.load("g_idx", order, part)
    assert torch.equal(layer.g_idx.data, order)
    with pytest.raises(InputError, match="'q' and 'k'"):
        layer.load("g_idx", order.flip(0), "q")
        layer.load("g_idx", order, "k")


def kernels_here():
    here = Platform.detect("cpu")
    return [e for e in registry.entries() if "cpu" in e.platforms and e.kernel.is_supported(here) and e.source == "bitline"]


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_that_can_runs_the_same_layer_and_releases_its_sources(case):
    family, ran, kind = CASES[case][0], [], "row" if case in UNFUSABLE else "qkv"
    for entry in kernels_here():
        kernel = protocol_class(entry.kernel, family)
        layer, parts = made(case, kind, 1, 2)
        layer.method.process(layer)
        weight = read_layer(layer, layer.method.kernel.config, layer.method.kernel.names)
        if not entry.kernel.can_implement(weight.spec):
            continue
        layer, parts = made(case, kind, 1, 2, kernel)
        layer.method.process(layer)
        x, y = check(layer, parts)
        layer.method.process(layer, free_source=True)
        assert torch.equal(layer(x), y)
        held = {name for name, p in layer.named_parameters() if p.numel()}
        assert held <= {"input_global_scale"}, held  # a parameter of the method, not of the kernel
        layer.method.process(layer)
        assert torch.equal(layer(x), y)
        ran.append(entry.name)
    assert "ReferenceLinearKernel" in ran
