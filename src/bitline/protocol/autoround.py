"""vLLM's linear methods for AutoRound checkpoints (quant method "inc", Intel Neural Compressor): on Intel GPUs, and with ARK."""

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
    """The config of a layer; any object with these attributes works.

    Attributes:
        bits: Bits per code.
        group_size: Columns per scale, -1 for one scale per row.
        sym: Whether the weight has an implicit zero point.
        is_awq: Whether the codes are packed as AWQ packs them.
    """

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    is_awq: bool = False


class INCXPULinearBase:
    """Base class of the methods: creates GPTQ- or AWQ-packed parameters, and packs them for the kernel `impl`.

    Args:
        layer_config: An INCLayerConfig or an object with its attributes.

    Raises:
        InputError: For a config that the method does not support.
    """

    impl: ClassVar[type[Kernel]]

    def __init__(self, layer_config: Any) -> None:
        self.weight_bits, self.group_size, self.sym = layer_config.bits, layer_config.group_size, layer_config.sym
        self.is_awq_packed = bool(getattr(layer_config, "is_awq", False))
        self.pack_factor = 32 // self.weight_bits
        if not isinstance(self.group_size, int) or self.group_size == 0:
            raise InputError("group_size must be -1 or positive", found=repr(self.group_size), expected="one integer")
        if self.is_awq_packed and self.weight_bits != 4:
            raise InputError("AWQ packing is supported for 4 bits", found=f"{self.weight_bits} bits", expected="4")

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
        """Create the parameters of this rank's shard, to be loaded from the checkpoint.

        With f codes per int32: qweight int32 [K / f, N], or [K, N / f] for AWQ; scales [G, N]; qzeros int32 [G, N / f]; g_idx
        int32 [K].

        Args:
            layer: The layer that gets the parameters.
            input_size_per_partition: K of this rank's shard.
            output_partition_sizes: N of each fused layer in this rank's shard.
            input_size: K of the whole layer.
            output_size: N of the whole layer.
            params_dtype: dtype of the scales.
            **extra_weight_attrs: weight_loader, kept on the parameters; others are ignored.

        Raises:
            InputError: Where the shard does not consist of whole int32s and groups.
        """
        k, n, f = input_size_per_partition, sum(output_partition_sizes), self.pack_factor
        group = k if self.group_size == -1 else self.group_size
        if k % f or n % f or k % group:
            raise InputError("the layer does not consist of whole int32s and groups", found=f"K {k}, N {n}, group size {group}",
                             expected=f"K and N multiples of {f}, K of the group size")  # fmt: skip
        loader = extra_weight_attrs.get("weight_loader")
        implicit_zeros = int.from_bytes(bytes([0x88]) * 4, "little", signed=True) if self.weight_bits == 4 else 0
        packed_dim = 1 if self.is_awq_packed else 0
        shape = (k, n // f) if self.is_awq_packed else (k // f, n)
        common: dict[str, Any] = {"input_dim": 0, "output_dim": 1, "weight_loader": loader}
        layer.qweight = PackedParameter(torch.zeros(shape, dtype=torch.int32), packed_dim, f, **common)
        layer.scales = GroupScaleParameter(torch.zeros(k // group, n, dtype=params_dtype), self.group_size, **common)
        layer.qzeros = PackedParameter(torch.full((k // group, n // f), implicit_zeros, dtype=torch.int32), 1, f, **common)
        layer.g_idx = RowParameter((torch.arange(k) // group).int(), input_dim=0, weight_loader=loader)

    def weight(self, layer: nn.Module) -> QuantizedWeight:
        """The canonical weight of a layer's loaded parameters.

        Args:
            layer: The layer, with its parameters loaded.

        Raises:
            InputError: For act-order (a non-trivial g_idx), and for stored zero points where the config is symmetric.
        """
        scales: Any = layer.scales
        qweight: Any = layer.qweight.data
        qweight = self._convert_awq_qweight_to_gptq(qweight) if self.is_awq_packed else qweight
        (groups, n), k = scales.shape, qweight.shape[0] * self.pack_factor
        g_idx: Any = layer.g_idx
        if not torch.equal(g_idx.data.cpu().long(), torch.arange(k) // (k // groups)):
            raise InputError("the layer has act-order (g_idx)", fix="read the checkpoint with bitline.load_model")
        zero = self._zero_points(layer, n)
        spec = LinearSpec(
            n, k, types.unsigned(self.weight_bits, symmetric=zero is None), (1, k // groups), scale_dtype=scales.dtype,
            zero="none" if zero is None else "int", act_dtype=scales.dtype,
        )  # fmt: skip
        return QuantizedWeight(spec, packed_int32.repack_gptq(qweight), scales.data.t().contiguous(), zero=zero)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the parameters into buffers of the layer, and release them. Idempotent.

        Args:
            layer: The layer, with its parameters loaded.

        Raises:
            InputError: As `weight`, and where the kernel cannot run the layer.
        """
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
        """Run the layer.

        Args:
            layer: The processed layer.
            x: [..., K] in the scales' dtype.
            bias: [N], or None.

        Returns:
            [..., N].

        Raises:
            InputError: Where the layer has not been processed, or x has another shape or dtype.
        """
        key: Any = getattr(layer, "_bitline_spec", None)
        if key is None:
            raise InputError("the layer's weights have not been processed", fix="call process_weights_after_loading first")
        spec = LinearSpec.parse(key)
        if x.dtype != spec.act_dtype or x.dim() == 0 or x.shape[-1] != spec.k:
            raise InputError("the input does not fit the layer", found=f"{list(x.shape)} {x.dtype}",
                             expected=f"[..., {spec.k}] {spec.act_dtype}")  # fmt: skip
        names: Any = layer._bitline_names
        m = math.prod(x.shape[:-1])
        y: Tensor = OP(x.reshape(m, spec.k), [getattr(layer, n) for n in names], bias, self.impl.__name__, key)
        return y.view(*x.shape[:-1], spec.n)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`apply_weights`, by the name that vLLM's layers call."""
        return self.apply_weights(layer, x, bias)

    def _convert_awq_qweight_to_gptq(self, qw: Tensor) -> Tensor:
        """AWQ's int32 [K, N / 8], with nibbles in column order 0 2 4 6 1 3 5 7, to GPTQ's [K / 8, N]; lossless."""
        rows = packed_int32.repack_awq(qw, qw.shape[1] * 8)
        return rows.view(torch.int32).t().contiguous()

    def _zero_points(self, layer: nn.Module, n: int) -> Tensor | None:
        """Zero points, uint8 [N, G]; None for a symmetric layer."""
        qzeros: Any = layer.qzeros
        implicit_zero = 1 << (self.weight_bits - 1)
        stored = packed_int32.unpack_zero_points(qzeros.data, self.weight_bits, n, interleaved=self.is_awq_packed)
        if not self.sym:
            return stored if self.is_awq_packed else (stored + 1) & ((1 << self.weight_bits) - 1)  # GPTQ v1 stores zero - 1
        allowed = (implicit_zero,) if self.is_awq_packed else (implicit_zero - 1, implicit_zero)
        if not any(bool((stored == value).all()) for value in (*allowed, 0)):
            raise InputError("the config is symmetric, but qzeros hold zero points", tensor="qzeros",
                             found=f"{int(stored.min())}..{int(stored.max())}", expected=f"only {implicit_zero}")  # fmt: skip
        return None


class INCXPULinearMethod(INCXPULinearBase):
    """Symmetric W4A16 on Intel GPUs, on `XPUwNa16LinearKernel`.

    Args:
        layer_config: An INCLayerConfig or an object with its attributes.

    Raises:
        InputError: For another width, or zero points.
    """

    impl = XPUwNa16LinearKernel

    def __init__(self, layer_config: Any) -> None:
        super().__init__(layer_config)
        if self.weight_bits != 4 or not self.sym:
            raise InputError("INCXPULinearMethod takes symmetric 4-bit weights", found=f"{self.weight_bits} bits, sym={self.sym}",
                             expected="4 bits, sym=True", fix="let bitline choose a kernel: bitline.load_model")  # fmt: skip


class INCARKLinearMethod(INCXPULinearBase):
    """2-, 4- and 8-bit weights, symmetric or with zero points, on `ArkWNA16LinearKernel` (AutoRound's kernels).

    Args:
        layer_config: An INCLayerConfig or an object with its attributes.

    Raises:
        ImportError: Where ARK is not installed or has no backend library.
    """

    impl = ArkWNA16LinearKernel

    def __init__(self, layer_config: Any) -> None:
        super().__init__(layer_config)
        state = get_ark_state()
        if not state.available:
            raise ImportError(f"ARK cannot be used: {state.reason}")
