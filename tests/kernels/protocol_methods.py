"""Layers as a serving engine writes them for vLLM's kernel protocol: parameters, sharded loading, a method per checkpoint family.

Each method creates parameters (`create`), may repack what was loaded, hands the layer to a kernel (`process`) and calls it
(`apply`). They import nothing of Bitline but `bitline.kernels.linear`.
"""

from fractions import Fraction
from typing import ClassVar

import torch
from torch import nn

from bitline.kernels import linear

BF16 = torch.bfloat16
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds column j of eight


class Linear(nn.Module):
    """One rank's shard of a layer. parts: fused layer -> its rows in this shard; kind: row, column, or qkv parallel."""

    def __init__(self, method, k, parts, kind, rank=0, world=1, replicas=1):
        super().__init__()
        self.method, self.kind, self.replicas = method, kind, replicas
        self.parts, self.logical_widths = parts, list(parts.values())
        self.input_size = k
        self.input_size_per_partition = k // world if kind == "row" else k
        self.output_size_per_partition = sum(self.logical_widths)
        self.tp = {"tp_rank": rank, "tp_size": world}
        method.create(self, self.input_size_per_partition, self.output_size_per_partition, self.tp)

    def load(self, name, tensor, part):
        param = getattr(self, name)
        if self.kind == "row":
            return param.load_row_parallel_weight(tensor)
        if len(self.parts) == 1:
            return param.load_column_parallel_weight(tensor)
        offset = sum(self.logical_widths[: list(self.parts).index(part)])
        rows = {"shard_offset": offset, "shard_size": self.parts[part]}
        if self.kind == "qkv":
            return param.load_qkv_weight(tensor, shard_id=part, num_heads=self.replicas, **rows)
        return param.load_merged_column_weight(tensor, shard_id=list(self.parts).index(part), **rows)

    def forward(self, x, bias=None):
        return self.method.apply(self, x, bias)


class Method:
    """Base class. kernel: the class to use instead of the chosen one."""

    renamed: ClassVar = {}  # the checkpoint's name -> the parameter's
    unused = ("weight_shape",)

    def __init__(self, kernel=None):
        self.wanted = kernel

    def init(self, config, chosen, **names):
        self.kernel = chosen() if self.wanted is None else self.wanted(config, **names)

    def process(self, layer, **options):
        self.kernel.process_weights_after_loading(layer, **options)

    def apply(self, layer, x, bias=None):
        return self.kernel.apply_weights(layer, x, bias)


def mp(layer, kind, group, zero_points, has_g_idx, act=BF16, out=None):
    k, n = layer.input_size_per_partition, layer.output_size_per_partition
    return linear.MPLinearLayerConfig((layer.input_size, n), (k, n), kind, act, group, zero_points, has_g_idx, out)


class GPTQ(Method):
    """qweight [K/f, N], scales [G, N] in the model's dtype, qzeros [G, N/f], unused where symmetric, and g_idx [K]."""

    types: ClassVar = {2: linear.uint2b2, 3: linear.uint3b4, 4: linear.uint4b8, 8: linear.uint8b128}

    def __init__(self, kernel=None, bits=4, group=128, desc_act=False):
        super().__init__(kernel)
        self.bits, self.group, self.desc_act = bits, group, desc_act

    def create(self, layer, k, n, tp):
        f, both = Fraction(32, self.bits), {"input_dim": 0, "output_dim": 1, **tp}
        everywhere = self.desc_act and layer.kind == "row"  # act-order: any column may be in any group
        groups = (layer.input_size if everywhere else k) // self.group
        replicated = both | {"input_dim": None} if everywhere else both
        layer.qweight = linear.PackedParameter(
            torch.empty(int(k / f), n, dtype=torch.int32), packed_dim=0, packed_factor=f, **both
        )
        layer.g_idx = linear.RowParameter(torch.empty(k, dtype=torch.int32), input_dim=0, **tp)
        layer.scales = linear.GroupScaleParameter(torch.empty(groups, n, dtype=BF16), self.group, **replicated)
        layer.qzeros = linear.PackedParameter(torch.empty(groups, int(n / f), dtype=torch.int32), packed_dim=1, packed_factor=f,
                                             **replicated)  # fmt: skip
        config = mp(layer, self.types[self.bits], self.group, False, self.desc_act)
        names = {
            "w_q_param_name": "qweight",
            "w_s_param_name": "scales",
            "w_zp_param_name": "qzeros",
            "w_gidx_param_name": "g_idx",
        }
        self.init(config, lambda: linear.choose_mp_linear_kernel(config)(config, **names), **names)


class AWQ(Method):
    """qweight [K, N/8] and qzeros [G, N/8] with interleaved nibbles, de-interleaved before the kernel sees them."""

    group = 128

    def create(self, layer, k, n, tp):
        both = {"input_dim": 0, "output_dim": 1, **tp}
        layer.qweight = linear.PackedParameter(torch.empty(k, n // 8, dtype=torch.int32), packed_dim=1, packed_factor=8, **both)
        layer.qzeros = linear.PackedParameter(torch.empty(k // self.group, n // 8, dtype=torch.int32), packed_dim=1,
                                             packed_factor=8, **both)  # fmt: skip
        layer.scales = linear.GroupScaleParameter(torch.empty(k // self.group, n, dtype=BF16), self.group, **both)
        config = mp(layer, linear.uint4, self.group, True, False)
        self.init(config, lambda: linear.choose_mp_linear_kernel(config)(config, "qweight", "scales", "qzeros"))

    def process(self, layer, **options):
        if not getattr(layer, "in_order", False):
            for name in ("qweight", "qzeros"):
                packed = getattr(layer, name).data
                nibbles = torch.stack([(packed >> (4 * nibble)) & 15 for nibble in AWQ_ORDER], 2).long()
                ordered = (nibbles << torch.arange(0, 32, 4)).sum(2)
                ordered = torch.where(ordered >= 1 << 31, ordered - (1 << 32), ordered).int()
                param = nn.Parameter(ordered, requires_grad=False)
                param.input_dim, param.output_dim, param.packed_dim = 0, 1, 1
                setattr(layer, name, param)
            layer.in_order = True
        super().process(layer, **options)


class PackQuantized(Method):
    """compressed-tensors' WNA16: weight_packed [N, K/f], weight_scale [N, G], weight_zero_point [N/f, G]."""

    def __init__(self, kernel=None, group=128, zero_points=False, has_g_idx=False):
        super().__init__(kernel)
        self.group, self.zero_points, self.has_g_idx = group, zero_points, has_g_idx

    def create(self, layer, k, n, tp):
        whole = self.has_g_idx and layer.kind == "row"
        groups = 1 if self.group == -1 else (layer.input_size if whole else k) // self.group
        once = tp | ({"input_dim": None} if whole else {})
        layer.weight_packed = linear.PackedParameter(
            torch.empty(n, k // 8, dtype=torch.int32), packed_dim=1, packed_factor=8, **tp
        )
        layer.weight_scale = linear.GroupScaleParameter(torch.empty(n, groups, dtype=BF16), self.group, **once)
        names = ["weight_packed", "weight_scale"]
        if self.zero_points:
            data = torch.empty(n // 8, groups, dtype=torch.int32)
            layer.weight_zero_point = linear.PackedParameter(data, packed_dim=0, packed_factor=8, group_size=self.group, **tp)
            names.append("weight_zero_point")
        more = {}
        if self.has_g_idx:
            layer.weight_g_idx = linear.RowParameter(torch.empty(k, dtype=torch.int32), **tp)
            more = {"w_gidx_param_name": "weight_g_idx"}
        config = mp(layer, linear.uint4 if self.zero_points else linear.uint4b8, self.group, self.zero_points, self.has_g_idx)
        self.init(config, lambda: linear.init_linear_kernel(config, w_q=names[0]), w_q=names[0], **more)


class W4A8(Method):
    """compressed-tensors' W4A8: 4-bit weights, one per byte, and 8-bit activations."""

    def __init__(self, kernel=None, act=torch.int8):
        super().__init__(kernel)
        self.act = act

    def create(self, layer, k, n, tp):
        layer.weight = linear.ModelWeightParameter(torch.empty(n, k, dtype=torch.int8), **tp)
        layer.weight_scale = linear.GroupScaleParameter(torch.empty(n, k // 128, dtype=BF16), 128, **tp)
        config = mp(layer, linear.int4, 128, False, False, self.act, BF16)
        self.init(config, lambda: linear.init_linear_kernel(config))


class Int8(Method):
    """W8A8 int8, scales per channel; dynamic per-token activation scales, or static ones with a zero point."""

    def __init__(self, kernel=None, static=False, symmetric=True):
        super().__init__(kernel)
        self.static, self.symmetric = static, symmetric

    def create(self, layer, k, n, tp):
        layer.weight = linear.ModelWeightParameter(torch.empty(n, k, dtype=torch.int8), **tp)
        layer.weight_scale = linear.ChannelScaleParameter(torch.empty(n, 1), **tp)
        parts = len(layer.parts)
        layer.input_scale = linear.PerTensorScaleParameter(torch.empty(parts)) if self.static else None
        layer.input_zero_point = (
            linear.PerTensorScaleParameter(torch.empty(parts, dtype=torch.int8)) if not self.symmetric else None
        )
        layer.azp_adj = None
        config = linear.Int8ScaledMMLinearLayerConfig(self.static, True, self.symmetric)
        names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
        self.init(config, lambda: linear.init_int8_linear_kernel(True, self.static, self.symmetric, module_name="layer"),
                  layer_param_names=names)  # fmt: skip


class FP8(Method):
    """FP8 weights per tensor or channel; the kernel gets a transposed view without declared dimensions."""

    def __init__(self, kernel=None, per_channel=True):
        super().__init__(kernel)
        self.per_channel = per_channel

    def create(self, layer, k, n, tp):
        layer.weight = linear.ModelWeightParameter(torch.empty(n, k, dtype=torch.float8_e4m3fn), **tp)
        one = lambda: linear.PerTensorScaleParameter(torch.empty(len(layer.parts)))
        layer.weight_scale = linear.ChannelScaleParameter(torch.empty(n, 1), **tp) if self.per_channel else one()
        layer.input_scale = None if self.per_channel else one()
        layer.input_scale_ub = None
        act = linear.kFp8DynamicTokenSym if self.per_channel else linear.kFp8StaticTensorSym
        weight = linear.kFp8StaticChannelSym if self.per_channel else linear.kFp8StaticTensorSym
        config = linear.FP8ScaledMMLinearLayerConfig(weight, act, (n, k), BF16, BF16)
        self.init(config, lambda: linear.init_fp8_linear_kernel(act, weight, (n, k), BF16, BF16, module_name="layer"))

    def process(self, layer, **options):
        if not getattr(layer, "transposed", False):
            layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)
            layer.transposed = True
        super().process(layer, **options)


class FP8Block(Method):
    """Scales of 128×128 blocks."""

    def create(self, layer, k, n, tp):
        layer.weight = linear.ModelWeightParameter(torch.empty(n, k, dtype=torch.float8_e4m3fn), **tp)
        scales = torch.empty(-(-n // 128), -(-k // 128))
        layer.weight_scale_inv = linear.BlockScaleParameter(scales, (128, 128), **tp)
        act, weight = linear.kFp8Dynamic128Sym, linear.kFp8Static128BlockSym
        config = linear.FP8ScaledMMLinearLayerConfig(weight, act, (n, k), BF16, BF16)
        self.init(config, lambda: linear.init_fp8_linear_kernel(act, weight, (n, k), BF16, BF16))

    renamed: ClassVar = {"weight_scale": "weight_scale_inv"}


class NVFP4(Method):
    """NVFP4 as compressed-tensors stores it: reciprocals of the global scales of weights and inputs."""

    def __init__(self, kernel=None, use_a16=False):
        super().__init__(kernel)
        self.use_a16 = use_a16

    def create(self, layer, k, n, tp):
        layer.weight = linear.PackedParameter(torch.empty(n, k // 2, dtype=torch.uint8), packed_dim=1, packed_factor=2, **tp)
        layer.weight_scale = linear.GroupScaleParameter(torch.empty(n, k // 16, dtype=torch.float8_e4m3fn), 16, **tp)
        layer.weight_global_scale = linear.PerTensorScaleParameter(torch.empty(len(layer.parts)))
        if not self.use_a16:
            layer.input_global_scale = linear.PerTensorScaleParameter(torch.empty(len(layer.parts)))
        config = linear.NvFp4LinearLayerConfig(use_a16=self.use_a16)
        self.init(config, lambda: linear.init_nvfp4_linear_kernel(self.use_a16))

    renamed: ClassVar = {"weight_packed": "weight"}

    def process(self, layer, **options):
        if not getattr(layer, "inverted", False):
            layer.weight_global_scale = nn.Parameter(1 / layer.weight_global_scale.data, requires_grad=False)
            if not self.use_a16:
                layer.input_global_scale_inv = nn.Parameter(layer.input_global_scale.data.min(), requires_grad=False)
            layer.inverted = True
        super().process(layer, **options)


class MX(Method):
    """MXFP4 weight-only, and MXFP8 with 8-bit activations."""

    def __init__(self, kernel=None, bits=4):
        super().__init__(kernel)
        self.bits = bits

    def create(self, layer, k, n, tp):
        if self.bits == 4:
            layer.weight_packed = linear.PackedParameter(torch.empty(n, k // 2, dtype=torch.uint8), 1, 2, **tp)
            config, init = linear.MxFp4LinearLayerConfig(use_a16=True), lambda: linear.init_mxfp4_linear_kernel(use_a16=True)
        else:
            layer.weight = linear.ModelWeightParameter(torch.empty(n, k, dtype=torch.float8_e4m3fn), **tp)
            config, init = linear.Mxfp8LinearLayerConfig(), linear.init_mxfp8_linear_kernel
        layer.weight_scale = linear.GroupScaleParameter(torch.empty(n, k // 32, dtype=torch.uint8), 32, **tp)
        self.init(config, init)
