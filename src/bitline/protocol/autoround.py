"""The field's layer methods for AutoRound's checkpoints (Intel Neural Compressor's quant method): on Intel GPUs and by ARK."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitline import types
from bitline.errors import InputError
from bitline.formats.common import packed_int32
from bitline.kernels.base import Kernel
from bitline.kernels.providers.ark import ArkWNA16LinearKernel, get_ark_state
from bitline.kernels.providers.xpu import XPUwNa16LinearKernel
from bitline.linear import OP
from bitline.protocol.parameters import GroupScaleParameter, PackedParameter, RowParameter
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight


@dataclass(frozen=True)
class INCLayerConfig:
    """What a method is made from: bits of a code, columns of a group (-1: a row), with or without zero points, and whether
    codes are packed as AWQ does. Any object with these attributes will do."""

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    is_awq: bool = False


class INCXPULinearBase:
    """Makes a layer's parameters, GPTQ- or AWQ-packed, and packs them for the kernel `impl`; a base of the methods."""

    impl: ClassVar[type[Kernel]]

    def __init__(self, layer_config: Any) -> None:
        self.weight_bits, self.group_size, self.sym = layer_config.bits, layer_config.group_size, layer_config.sym
        self.is_awq_packed = bool(getattr(layer_config, "is_awq", False))
        self.pack_factor = 32 // self.weight_bits
        if not isinstance(self.group_size, int) or self.group_size == 0:
            raise InputError("a method has one group size", found=repr(self.group_size), expected="a positive number, or -1")
        if self.is_awq_packed and self.weight_bits != 4:
            raise InputError("AWQ packing is of 4 bits here", found=f"{self.weight_bits} bits", expected="4")

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters qweight, scales, qzeros and g_idx of this rank's part, to be loaded from the checkpoint.

        qweight is int32 [K / f, N], or [K, N / f] as AWQ packs, f codes a word; scales [G, N]; qzeros int32 [G, N / f].
        """
        k, n, f = input_size_per_partition, sum(output_partition_sizes), self.pack_factor
        group = k if self.group_size == -1 else self.group_size
        if k % f or n % f or k % group:
            raise InputError("the layer is not made of whole words and groups", found=f"K {k}, N {n}, groups of {group}",
                             expected=f"K and N in multiples of {f}, K of the group size")  # fmt: skip
        loader = extra_weight_attrs.get("weight_loader")
        middle = int.from_bytes(bytes([0x88]) * 4, "little", signed=True) if self.weight_bits == 4 else 0
        packed_dim = 1 if self.is_awq_packed else 0
        shape = (k, n // f) if self.is_awq_packed else (k // f, n)
        common: dict[str, Any] = {"input_dim": 0, "output_dim": 1, "weight_loader": loader}
        layer.qweight = PackedParameter(torch.zeros(shape, dtype=torch.int32), packed_dim, f, **common)
        layer.scales = GroupScaleParameter(torch.zeros(k // group, n, dtype=params_dtype), self.group_size, **common)
        layer.qzeros = PackedParameter(torch.full((k // group, n // f), middle, dtype=torch.int32), 1, f, **common)
        layer.g_idx = RowParameter((torch.arange(k) // group).int(), input_dim=0, weight_loader=loader)

    def weight(self, layer: nn.Module) -> QuantizedWeight:
        """The canonical weight of a layer's loaded parameters. An InputError where columns are in another order, or where zero
        points are not the middle although the config is symmetric: neither is ever ignored."""
        scales: Any = layer.scales
        words: Any = layer.qweight.data
        words = self._convert_awq_qweight_to_gptq(words) if self.is_awq_packed else words
        (groups, n), k = scales.shape, words.shape[0] * self.pack_factor
        order: Any = layer.g_idx
        if not torch.equal(order.data.cpu().long(), torch.arange(k) // (k // groups)):
            raise InputError(
                "the layer's columns are in another order (g_idx)", fix="read the checkpoint with bitline.load_model"
            )
        zero = self._zeros(layer, n)
        width = self.weight_bits
        spec = LinearSpec(
            n, k, types.unsigned(width, symmetric=zero is None), (1, k // groups), scale_dtype=scales.dtype,
            zero="none" if zero is None else "int", act_dtype=scales.dtype,
        )  # fmt: skip
        return QuantizedWeight(spec, packed_int32.repack_gptq(words), scales.data.t().contiguous(), zero=zero)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the parameters for the kernel, into buffers of the layer, and release them. Safe to call again."""
        if hasattr(layer, "_bitline_spec"):
            return
        weight = self.weight(layer)
        verdict = self.impl.can_implement(weight.spec)
        if not verdict:
            raise InputError(f"{self.impl.__name__} cannot run this layer", found=verdict.reason, fix=verdict.fix)
        packed = self.impl.pack(weight)
        layer._bitline_spec, layer._bitline_names = weight.spec.key, [f"_bitline_{name}" for name in packed]  # type: ignore[assignment]
        for name, tensor in zip(layer._bitline_names, packed.values(), strict=True):  # type: ignore[arg-type]
            layer.register_buffer(name, tensor, persistent=False)
        for name in ("qweight", "scales", "qzeros", "g_idx"):
            parameter: Any = getattr(layer, name)
            parameter.data = parameter.data.new_empty(0)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] in the scales' dtype -> [..., N]."""
        key: Any = getattr(layer, "_bitline_spec", None)
        if key is None:
            raise InputError("the layer's weights have not been processed", fix="call process_weights_after_loading first")
        spec = LinearSpec.parse(key)
        if x.dtype != spec.act_dtype or x.dim() == 0 or x.shape[-1] != spec.k:
            raise InputError("the layer got an input that it was not made for", found=f"{list(x.shape)} {x.dtype}",
                             expected=f"[..., {spec.k}] {spec.act_dtype}")  # fmt: skip
        names: Any = layer._bitline_names
        rows = math.prod(x.shape[:-1])
        y: Tensor = OP(x.reshape(rows, spec.k), [getattr(layer, n) for n in names], bias, self.impl.__name__, key)
        return y.view(*x.shape[:-1], spec.n)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`apply_weights` by the name that layers call."""
        return self.apply_weights(layer, x, bias)

    def _convert_awq_qweight_to_gptq(self, qw: Tensor) -> Tensor:
        """AWQ's words [K, N / 8], their nibbles columns 0 2 4 6 1 3 5 7, to GPTQ's [K / 8, N]. No bit is lost."""
        rows = packed_int32.repack_awq(qw, qw.shape[1] * 8)
        return rows.view(torch.int32).t().contiguous()

    def _zeros(self, layer: nn.Module, n: int) -> Tensor | None:
        """uint8 [N, G], or None for a symmetric layer."""
        words: Any = layer.qzeros
        half = 1 << (self.weight_bits - 1)
        stored = packed_int32.unpack_zero_points(words.data, self.weight_bits, n, interleaved=self.is_awq_packed)
        if not self.sym:
            return stored if self.is_awq_packed else (stored + 1) & ((1 << self.weight_bits) - 1)  # GPTQ v1 stores one less
        allowed = (half,) if self.is_awq_packed else (half - 1, half)
        if not any(bool((stored == value).all()) for value in (*allowed, 0)):
            raise InputError("the config says that there are no zero points, but qzeros hold some", tensor="qzeros",
                             found=f"{int(stored.min())}..{int(stored.max())}", expected=f"{half} everywhere")  # fmt: skip
        return None


class INCXPULinearMethod(INCXPULinearBase):
    """W4A16 on Intel GPUs by `XPUwNa16LinearKernel`; symmetric."""

    impl = XPUwNa16LinearKernel

    def __init__(self, layer_config: Any) -> None:
        super().__init__(layer_config)
        if self.weight_bits != 4 or not self.sym:
            raise InputError("this method is for symmetric 4-bit weights", found=f"{self.weight_bits} bits, sym={self.sym}",
                             expected="4 bits, sym=True", fix="let bitline choose a kernel: bitline.load_model")  # fmt: skip


class INCARKLinearMethod(INCXPULinearBase):
    """2, 4 and 8 bits with and without zero points on a CPU by `ArkWNA16LinearKernel`. Raises ImportError without ARK."""

    impl = ArkWNA16LinearKernel

    def __init__(self, layer_config: Any) -> None:
        super().__init__(layer_config)
        state = get_ark_state()
        if not state.available:
            raise ImportError(f"ARK cannot be used: {state.reason}")
