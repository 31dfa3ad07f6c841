"""vLLM's kernel protocol: layers with parameters, configs, and the selection functions."""

import logging
from fractions import Fraction

import pytest
import torch
from torch import nn

import bitline
from bitline import types
from bitline.errors import InputError, NoKernelError
from bitline.kernels import linear
from bitline.kernels.registry import unregister_kernel
from bitline.protocol.foreign_kernel import config_of, write_layer
from bitline.protocol.layer_reader import read_layer
from bitline.protocol.scaled_reader import merge_static_ranges
from bitline.select import Policy
from bitline.testing.generators import random_weight

BF16 = torch.bfloat16
CASES = [
    ("W4A16", {"group_size": 32}, "mp"), ("W4A16_ASYM", {"group_size": 64}, "mp"), ("W8A16", {}, "mp"),
    ("W2A16", {"group_size": 32}, "mp"), ("W8A8", {}, "int8"), ("FP8_DYNAMIC", {}, "fp8"), ("FP8_BLOCK", {}, "fp8_block"),
    ("NVFP4A16", {}, "nvfp4"), ("NVFP4", {}, "nvfp4"), ("MXFP4A16", {}, "mxfp4"), ("MXFP4", {}, "mxfp4"), ("MXFP8", {}, "mxfp8"),
]  # fmt: skip


def matrix(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.1


def quantized(scheme, options, n=64, k=192):
    return bitline.quantize(matrix(n, k).to(BF16), scheme, **options)


@pytest.mark.parametrize(("scheme", "options", "family"), CASES)
def test_a_layer_of_every_family_runs_and_can_be_processed_twice(scheme, options, family):
    weight = quantized(scheme, options)
    config = config_of(weight.spec, family)
    layer = write_layer(weight, family)
    before = {name: p.data.clone() for name, p in layer.named_parameters()}
    kernel = linear.init_linear_kernel(config)
    kernel.process_weights_after_loading(layer)
    x, bias = matrix(3, 192, 1).to(BF16), matrix(1, 64, 2)[0].to(BF16)
    expected = bitline.QuantLinear(weight, bias=bias, kernel=type(kernel).__name__)(x)
    assert torch.equal(kernel.apply_weights(layer, x, bias), expected)
    kernel.process_weights_after_loading(layer)
    assert torch.equal(kernel.apply_weights(layer, x.view(3, 1, 192), bias), expected.view(3, 1, 64))
    for name, p in layer.named_parameters():
        assert torch.equal(p.data.view(torch.uint8), before[name].view(torch.uint8)), name
    kernel.process_weights_after_loading(layer, free_source=True)
    assert sum(p.numel() for p in layer.parameters()) == 0
    kernel.process_weights_after_loading(layer)  # nothing left to process, and nothing lost
    assert torch.equal(kernel.apply_weights(layer, x, bias), expected)
    with pytest.raises(InputError, match="does not fit the layer"):
        kernel.apply_weights(layer, x.float(), bias)


@pytest.mark.parametrize(("scheme", "options", "family"), CASES)
def test_a_layer_reads_back_as_the_weight_that_it_was_written_from(scheme, options, family):
    weight = quantized(scheme, options)
    back = read_layer(write_layer(weight, family), config_of(weight.spec, family), {})
    assert torch.equal(back.dequantize(), weight.dequantize())
    assert back.spec == weight.spec


def gptq_layer(weight, act_order=False):
    """qweight int32 [K/8, N], scales [G, N] and qzeros [G, N/8], as vLLM holds GPTQ and AWQ layers."""
    layer, s = nn.Module(), weight.spec
    qweight = weight.codes.contiguous().view(torch.int32).t().contiguous()
    layer.qweight = linear.PackedParameter(qweight, packed_dim=0, packed_factor=8, input_dim=0, output_dim=1)
    layer.scales = linear.GroupScaleParameter(weight.scale.t().contiguous(), s.block[1], input_dim=0, output_dim=1)
    if weight.zero is not None:
        packed = bitline.bitstream.pack(weight.zero.t().contiguous(), 4).view(torch.int32)
        layer.qzeros = linear.PackedParameter(packed, packed_dim=1, packed_factor=8, input_dim=0, output_dim=1)
    return layer


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
@pytest.mark.parametrize("named", [True, False])
def test_gptq_parameters_by_their_dimensions_or_their_shapes(scheme, named):
    weight = quantized(scheme, {"group_size": 32}, 96, 192)
    layer = gptq_layer(weight)
    if not named:  # plain parameters, as a layer of another library has them
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(p.data, requires_grad=False))
    config = config_of(weight.spec, "mp")
    assert torch.equal(read_layer(layer, config, {}).dequantize(), weight.dequantize())
    kernel = linear.choose_mp_linear_kernel(config)(config, "qweight", "scales", "qzeros", "g_idx")
    kernel.process_weights_after_loading(layer)
    x = matrix(2, 192, 1).to(BF16)
    assert torch.equal(kernel.apply_weights(layer, x), bitline.QuantLinear(weight, kernel=type(kernel).__name__)(x))


def test_codes_packed_along_n_and_codes_in_bytes():
    weight = quantized("W4A16", {"group_size": 32}, 64, 96)
    config = config_of(weight.spec, "mp")
    layer = gptq_layer(weight)
    along_n = bitline.bitstream.pack(weight.unpacked().t().contiguous(), 4).view(torch.int32)  # [K, N/8]
    layer.qweight = linear.PackedParameter(along_n, packed_dim=1, packed_factor=8, input_dim=0, output_dim=1)
    assert torch.equal(read_layer(layer, config, {}).dequantize(), weight.dequantize())
    layer.qweight = nn.Parameter((weight.unpacked().to(torch.int16) - 8).to(torch.int8), requires_grad=False)
    signed = linear.MPLinearLayerConfig((96, 64), (96, 64), types.int4, BF16, 32, False, False)
    assert torch.equal(read_layer(layer, signed, {}).dequantize(), weight.dequantize())


def test_a_square_layer_that_can_be_read_in_two_ways_is_refused():
    layer = nn.Module()
    layer.qweight = nn.Parameter(torch.zeros(64, 8, dtype=torch.int32), requires_grad=False)
    layer.scales = nn.Parameter(torch.ones(64, 2), requires_grad=False)
    config = linear.MPLinearLayerConfig((64, 64), (64, 64), types.uint4b8, BF16, 32, False, False)
    with pytest.raises(InputError, match="two ways"):
        read_layer(layer, config, {})


def test_act_order_is_applied():
    weight = quantized("W4A16", {"group_size": 32})
    layer = write_layer(weight, "mp")
    g_idx = torch.arange(192) // 32
    g_idx = g_idx[torch.randperm(192, generator=torch.Generator().manual_seed(3))].int()
    layer.weight_g_idx = linear.RowParameter(g_idx)
    config = linear.MPLinearLayerConfig((192, 64), (192, 64), types.uint4b8, BF16, 32, False, True)
    values = weight.unpacked().float() - 8
    expected = values * weight.scales()[:, g_idx.long()]
    kernel = linear.init_linear_kernel(config)
    kernel.process_weights_after_loading(layer)
    x = matrix(4, 192, 5).to(BF16)
    torch.testing.assert_close(kernel.apply_weights(layer, x).float(), x.float() @ expected.t(), rtol=2e-2, atol=2e-2)


def test_per_tensor_scales_of_fused_layers_are_expanded_to_channels():
    layer = nn.Module()
    layer.logical_widths = [16, 32]
    layer.weight = nn.Parameter(torch.ones(48, 64, dtype=torch.int8), requires_grad=False)
    layer.weight_scale = linear.PerTensorScaleParameter(torch.tensor([0.5, 2.0]))
    config = linear.Int8ScaledMMLinearLayerConfig(False, False, True)
    weight = read_layer(layer, config, {})
    assert weight.spec.block == (1, 64)
    assert weight.dequantize()[:, 0].tolist() == [0.5] * 16 + [2.0] * 32


def test_static_ranges_of_fused_layers_are_merged_and_the_zero_point_is_rounded():
    scale, zero = merge_static_ranges(torch.tensor([0.1, 0.2]), torch.tensor([10, -30]))
    low, high = min(-138 * 0.1, -98 * 0.2), max(117 * 0.1, 157 * 0.2)
    assert float(scale) == pytest.approx((high - low) / 255)
    assert int(zero) == round(-128 - low / float(scale))
    assert float((-128 - zero) * scale) <= low + float(scale) and float((127 - zero) * scale) >= high - float(scale)
    assert merge_static_ranges(torch.tensor([0.1, 0.3]), None) == (torch.tensor(0.3), None)


# ---- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["row", "column"])
def test_ranks_load_the_shards_of_the_canonical_weight(tp, kind):
    weight = quantized("W4A16", {"group_size": 64}, 64, 256)
    full = write_layer(weight, "mp")
    for rank in range(tp):
        n, k = (64, 256 // tp) if kind == "row" else (64 // tp, 256)
        layer = nn.Module()
        where = {"tp_rank": rank, "tp_size": tp}
        layer.weight_packed = linear.PackedParameter(torch.zeros(n, k // 8, dtype=torch.int32), 1, 8, **where)
        layer.weight_scale = linear.GroupScaleParameter(torch.zeros(n, k // 64, dtype=weight.scale.dtype), 64, **where)
        for name in ("weight_packed", "weight_scale"):
            load = getattr(getattr(layer, name), f"load_{kind}_parallel_weight")
            load(getattr(full, name).data)
        config = linear.MPLinearLayerConfig((256, 64), (k, n), types.uint4b8, BF16, 64, False, False)
        part = weight.shard(1 if kind == "row" else 0, rank, tp)
        assert torch.equal(read_layer(layer, config, {}).dequantize(), part.dequantize())


def test_the_scale_of_a_group_that_two_ranks_share_is_loaded_by_both():
    weight = quantized("W4A16", {"group_size": 64}, 16, 192)
    full = write_layer(weight, "mp")
    for rank in range(2):
        layer = nn.Module()
        layer.weight_packed = linear.PackedParameter(torch.zeros(16, 12, dtype=torch.int32), 1, 8, tp_rank=rank, tp_size=2)
        layer.weight_scale = linear.GroupScaleParameter(torch.zeros(16, 2, dtype=weight.scale.dtype), 64, tp_rank=rank, tp_size=2)
        for name in ("weight_packed", "weight_scale"):
            getattr(layer, name).load_row_parallel_weight(getattr(full, name).data)
        config = linear.MPLinearLayerConfig((192, 16), (96, 16), types.uint4b8, BF16, 64, False, False)
        kernel = linear.init_linear_kernel(config)
        kernel.process_weights_after_loading(layer)
        part = weight.shard(1, rank, 2)
        x = matrix(2, 96, rank).to(BF16)
        expected = bitline.QuantLinear(part, kernel=type(kernel).__name__)(x)
        assert torch.equal(kernel.apply_weights(layer, x), expected)


def test_fused_columns_and_replicated_heads():
    q, kv = matrix(32, 16, 1), matrix(16, 16, 2)
    for rank in range(4):  # four ranks, two key and value heads of 8 rows: each is held twice
        p = linear.ModelWeightParameter(torch.zeros(24, 16), tp_rank=rank, tp_size=4)
        p.load_qkv_weight(q, shard_id="q", shard_offset=0, shard_size=8, num_heads=2)
        p.load_qkv_weight(kv, shard_id="k", shard_offset=8, shard_size=8, num_heads=2)
        p.load_qkv_weight(kv + 1, shard_id="v", shard_offset=16, shard_size=8, num_heads=2)
        held = kv[8 * (rank // 2) : 8 * (rank // 2) + 8]
        assert torch.equal(p.data, torch.cat([q[8 * rank : 8 * rank + 8], held, held + 1]))
    p = linear.ModelWeightParameter(torch.zeros(24, 16), tp_rank=1, tp_size=2)
    p.load_merged_column_weight(q, shard_offset=0, shard_size=16)
    p.load_merged_column_weight(kv, shard_offset=16, shard_size=8)
    assert torch.equal(p.data, torch.cat([q[16:], kv[8:]]))
    scales = linear.PerTensorScaleParameter(torch.zeros(3))
    for i, name in enumerate("qkv"):
        scales.load_qkv_weight(torch.tensor([float(i)]), shard_id=name)
    assert scales.data.tolist() == [0.0, 1.0, 2.0]


def test_block_scales_of_a_rank_that_starts_inside_a_block():
    scales = torch.arange(6.0).view(3, 2)  # 300 rows in blocks of 128
    parts = []
    for rank in range(2):
        p = linear.BlockScaleParameter(torch.zeros(2, 2), (128, 128), tp_rank=rank, tp_size=2)
        p.load_column_parallel_weight(scales, size=300)
        parts.append((p.data.tolist(), p.block_offset[0]))
    assert parts == [([[0, 1], [2, 3]], 0), ([[2, 3], [4, 5]], 22)]


def test_three_bit_codes_are_sharded_where_codes_end():
    packed = torch.arange(2 * 12, dtype=torch.int32).view(2, 12)  # 128 codes of 3 bits per row
    p = linear.PackedParameter(torch.zeros(2, 6, dtype=torch.int32), 1, Fraction(32, 3), tp_rank=1, tp_size=2)
    p.load_row_parallel_weight(packed)
    assert torch.equal(p.data, packed[:, 6:])
    p = linear.PackedParameter(torch.zeros(2, 4, dtype=torch.int32), 1, Fraction(32, 3), tp_rank=1, tp_size=3)
    with pytest.raises(InputError, match="inside a packed int32"):
        p.load_row_parallel_weight(packed)


def test_a_parameter_refuses_what_does_not_fit_or_would_be_rounded():
    p = linear.ModelWeightParameter(torch.zeros(4, 4, dtype=BF16))
    with pytest.raises(InputError, match="does not fit"):
        p.load_column_parallel_weight(torch.zeros(5, 4, dtype=BF16))
    with pytest.raises(InputError, match="rounded"):
        p.load_column_parallel_weight(torch.zeros(4, 4))


def test_permuting_only_permutes():
    p = linear.PackedParameter(
        torch.arange(12, dtype=torch.int32).view(2, 6), packed_dim=0, packed_factor=8, input_dim=0, output_dim=1
    )
    data = p.data.clone()
    linear.permute_param_layout_(p, input_dim=1, output_dim=0, packed_dim=1)
    assert torch.equal(p.data, data.t()) and (p.input_dim, p.output_dim, p.packed_dim) == (1, 0, 1)
    assert p.data.data_ptr() == p.data.t().data_ptr()
    with pytest.raises(InputError, match="not a permutation"):
        linear.permute_param_layout_(p, input_dim=1, output_dim=0, packed_dim=0)


# ---- choosing ----------------------------------------------------------------------------------------------------------

MP = linear.MPLinearLayerConfig((4096, 4096), (4096, 4096), types.uint4b8, BF16, 128, False, False)


def test_the_constructor_refuses():
    with pytest.raises(ValueError, match="RowWiseTorchFP8ScaledMMLinearKernel cannot run this layer"):
        linear.RowWiseTorchFP8ScaledMMLinearKernel(MP)
    config = linear.FP8ScaledMMLinearLayerConfig(linear.kFp8StaticTensorSym, linear.kFp8StaticTensorSym, (64, 64), torch.int8)
    with pytest.raises(ValueError, match="output is a float"):
        linear.PerTensorTorchFP8ScaledMMLinearKernel(config)


def test_choosing_answers_for_machines_that_are_not_here():
    assert linear.choose_mp_linear_kernel(MP, 90).__name__ == bitline.choose(MP.to_spec(), "cuda:sm90").best.name
    assert issubclass(linear.choose_mp_linear_kernel(MP, "rocm:gfx942"), linear.MPLinearKernel)
    with pytest.raises(ValueError, match="Failed to find a kernel that can implement the WNA16 linear layer") as caught:
        linear.choose_mp_linear_kernel(MP, 90, Policy(disabled=frozenset(e.name for e in bitline.kernels.registry.entries())))
    for entry in bitline.kernels.registry.entries():
        if not entry.kernel.families or "mp" in entry.kernel.families:
            assert entry.name in str(caught.value)


def test_a_forced_kernel_that_cannot_is_a_warning(caplog):
    config = linear.Int8ScaledMMLinearLayerConfig(False, True, True, (64, 64))
    with caplog.at_level(logging.WARNING, "bitline"):
        kernel = linear.choose_scaled_mm_linear_kernel(config, None, "cpu", force_kernel="PerTensorTorchFP8ScaledMMLinearKernel")
    assert kernel.__name__ != "PerTensorTorchFP8ScaledMMLinearKernel" and "was asked for and cannot" in caplog.text
    forced = linear.choose_scaled_mm_linear_kernel(config, None, "cpu", force_kernel="ReferenceLinearKernel")
    assert forced.__name__ == "ReferenceLinearKernel"
    only = linear.choose_scaled_mm_linear_kernel(config, {"cpu": ["ReferenceLinearKernel"]}, "cpu")
    assert only.__name__ == "ReferenceLinearKernel"


def test_disabled_kernels_by_environment(monkeypatch):
    name = linear.choose_mp_linear_kernel(MP).__name__
    monkeypatch.setenv("BITLINE_DISABLED_KERNELS", f" {name} , ")
    assert linear.choose_mp_linear_kernel(MP).__name__ != name
    ok, reason = linear.is_supported_and_can_implement_kernel(getattr(linear, name), MP)
    assert not ok and "disabled" in reason
    monkeypatch.setenv("BITLINE_DISABLED_KERNELS", "NoSuchKernel")
    with pytest.raises((ValueError, NoKernelError), match="NoSuchKernel"):
        linear.choose_mp_linear_kernel(MP)


class ThirdPartyKernel(linear.MPLinearKernel):
    """Written for vLLM's protocol alone."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def get_min_capability(cls):
        return -1

    @classmethod
    def can_implement(cls, c):
        return (c.group_size in (32, 64), "group size")

    def process_weights_after_loading(self, layer):
        k = self.config.partition_weight_shape[0]
        codes = bitline.bitstream.unpack(layer.weight_packed.data.view(torch.uint8), 4, k).float() - 8
        dense = codes * layer.weight_scale.data.float().repeat_interleave(self.config.group_size, 1)
        layer.dense = nn.Parameter(dense, requires_grad=False)
        del layer.weight_packed, layer.weight_scale
        layer.factor = 1.0

    def apply_weights(self, layer, x, bias=None):
        y = (x.float() @ layer.dense.t() * layer.factor).to(x.dtype)
        return y if bias is None else y + bias


@pytest.mark.parametrize("rank", ["first", "last"])
def test_a_foreign_kernel_ranks_first_or_last_and_runs(rank):
    linear.register_linear_kernel(ThirdPartyKernel, "cpu", "mp", priority=rank)
    try:
        weight = quantized("W4A16", {"group_size": 32})
        choice = bitline.choose(weight.spec)
        runnable = [c.name for c in choice.candidates if c.verdict]
        assert runnable[0 if rank == "first" else -1] == "ThirdPartyKernel"
        layer = bitline.QuantLinear(weight, kernel="ThirdPartyKernel")
        x = matrix(3, 192, 1).to(BF16)
        assert torch.equal(layer(x), (x.float() @ weight.dequantize().t()).to(BF16))
        refused = bitline.choose(quantized("W4A16", {"group_size": 96}).spec)
        assert next(c for c in refused.candidates if c.name == "ThirdPartyKernel").verdict.reason == "group size"
        assert linear.ThirdPartyKernel is ThirdPartyKernel
        config = config_of(weight.spec, "mp")
        assert (linear.choose_mp_linear_kernel(config) is ThirdPartyKernel) == (rank == "first")
    finally:
        unregister_kernel("ThirdPartyKernel")


def test_registering_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="kernel type"):
        linear.register_linear_kernel(ThirdPartyKernel, "cpu", "w5a5")
    with pytest.raises(ValueError, match="neither"):
        linear.register_linear_kernel(object, "cpu", "mp")
    with pytest.raises(AttributeError, match="NoSuchKernel"):
        _ = linear.NoSuchKernel


def test_fp8_kernels_that_are_batch_invariant():
    def kernel(act, name):
        return linear.init_fp8_linear_kernel(act, linear.kFp8StaticChannelSym, (64, 192), BF16, policy=Policy(kernel=name))

    token, tensor = linear.kFp8DynamicTokenSym, linear.kFp8DynamicTensorSym
    assert linear.fp8_scaled_mm_is_batch_invariant(kernel(token, "BatchInvariantLinearKernel"))
    assert not linear.fp8_scaled_mm_is_batch_invariant(kernel(token, "ReferenceLinearKernel"))
    assert not linear.fp8_scaled_mm_is_batch_invariant(kernel(tensor, "BatchInvariantLinearKernel"))


def test_fp8_weights_with_16_bit_activations():
    weight = quantized("FP8_DYNAMIC", {})
    layer = write_layer(weight, "fp8")
    kernel = linear.init_wfp8_a16_linear_kernel(linear.kFp8StaticChannelSym, linear.kFp8DynamicTokenSym, (64, 192), BF16)
    kernel.process_weights_after_loading(layer)
    x = matrix(3, 192, 1).to(BF16)
    expected = x.float() @ weight.dequantize(torch.float32).T
    assert (kernel.apply_weights(layer, x).float() - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("key", [linear.kMxfp6E2M3Static, linear.kMxfp6E3M2Static])
@pytest.mark.parametrize("act", [None, linear.kMxfp6E2M3Dynamic, linear.kMxfp4Dynamic])
def test_mxfp6_layers(key, act):
    weight = random_weight(linear.MxFp6LinearLayerConfig(key, act, (64, 192), BF16).to_spec(), 5)
    layer = write_layer(weight, "mxfp6")
    kernel = linear.init_mxfp6_linear_kernel(key, act, (64, 192), BF16)
    assert isinstance(kernel, linear.MxFp6LinearKernel)
    kernel.process_weights_after_loading(layer)
    x = matrix(3, 192, 1).to(BF16)
    assert torch.equal(kernel.apply_weights(layer, x), bitline.QuantLinear(weight, kernel=type(kernel).__name__)(x))


def test_an_mxfp6_key_of_another_type():
    with pytest.raises(InputError, match="weights of 6 bits"):
        linear.init_mxfp6_linear_kernel(linear.kMxfp4Dynamic)
    with pytest.raises(InputError, match="no MX element type"):
        linear.init_mxfp6_linear_kernel(linear.kFp8StaticTensorSym)


# Of vllm.model_executor.kernels.linear, vLLM 0.33: what is not in docs/api/kernels-linear.md's list of absent names.
VLLM_NAMES = [
    "AiterInt8ScaledMMLinearKernel", "CPUInt8ScaledMMLinearKernel", "CPUWNA16LinearKernel",
    "ChannelWiseTorchFP8ScaledMMLinearKernel", "ConchLinearKernel", "CutlassFP8ScaledMMLinearKernel",
    "CutlassInt8ScaledMMLinearKernel", "CutlassNvFp4LinearKernel", "CutlassW4A8LinearKernel",
    "DeepGemmFp8BlockScaledMMKernel", "EmulationMxfp4LinearKernel", "EmulationMxfp6LinearKernel",
    "EmulationMxfp8LinearKernel", "EmulationNvFp4LinearKernel", "ExllamaLinearKernel", "FP8ScaledMMLinearKernel",
    "FP8ScaledMMLinearLayerConfig", "FbgemmNvFp4LinearKernel", "FlashInferB12xNvFp4LinearKernel",
    "FlashInferCudnnNvFp4LinearKernel", "FlashInferCutlassMxfp8LinearKernel", "FlashInferCutlassNvFp4LinearKernel",
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "FlashInferMxFp4LinearKernel", "FlashInferTrtllmNvFp4LinearKernel",
    "Int8ScaledMMLinearKernel", "Int8ScaledMMLinearLayerConfig", "MPLinearKernel", "MPLinearLayerConfig",
    "MacheteLinearKernel", "MarlinLinearKernel", "MarlinMxFp4LinearKernel", "MarlinMxfp8LinearKernel",
    "MarlinNvFp4LinearKernel", "MxFp4LinearKernel", "MxFp4LinearLayerConfig", "MxFp6LinearKernel", "MxFp6LinearLayerConfig",
    "Mxfp8LinearKernel", "Mxfp8LinearLayerConfig", "NvFp4LinearKernel", "NvFp4LinearLayerConfig",
    "PerTensorTorchFP8ScaledMMLinearKernel", "RDNAHybridW4A16LinearKernel", "ROCmFP8ScaledMMLinearKernel",
    "RowWiseTorchFP8ScaledMMLinearKernel", "ScaledMMLinearKernel", "ScaledMMLinearLayerConfig", "TorchMxFp8LinearKernel",
    "TorchNvFp4LinearKernel", "TritonInt8ScaledMMLinearKernel", "TritonW4A16LinearKernel", "XPUMxFp8LinearKernel",
    "XPUW4A8IntLinearKernel", "XPUwNa16LinearKernel", "ZentorchInt8ScaledMMLinearKernel", "ZentorchWNA16LinearKernel",
    "choose_mp_linear_kernel", "fp8_scaled_mm_is_batch_invariant", "init_fp8_linear_kernel", "init_int8_linear_kernel",
    "init_mxfp4_linear_kernel", "init_mxfp6_linear_kernel", "init_mxfp8_linear_kernel", "init_nvfp4_linear_kernel",
    "init_wfp8_a16_linear_kernel", "register_linear_kernel",
]  # fmt: skip


def test_vllms_names_are_here():
    assert not [name for name in VLLM_NAMES if name not in dir(linear) or getattr(linear, name) is None]
