"""What a model's own code may ask of a quantized layer's weight: its dtype, device and shape, but no values."""

from __future__ import annotations

from typing import Any

import torch

from bitline.errors import InputError
from bitline.linear import QuantLinear


class WeightInfo:
    """Stands for `layer.weight` of a QuantLinear, which has no such tensor: no torch function takes it.

    transformers' modules ask, say, `self.wo.weight.dtype` before they cast their input.

    Attributes:
        dtype: Of the layer's input and output.
        device: Where the layer runs.
        shape: (N, K).
    """

    def __init__(self, layer: QuantLinear) -> None:
        self._layer = layer

    @property
    def dtype(self) -> torch.dtype:
        """See the class."""
        return self._layer.spec.act_dtype

    @property
    def device(self) -> torch.device:
        """See the class."""
        return next(self._layer.buffers()).device

    @property
    def shape(self) -> torch.Size:
        """See the class."""
        return torch.Size((self._layer.out_features, self._layer.in_features))

    requires_grad = False

    @classmethod
    def __torch_function__(cls, function: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Refuses every function of torch. That there is one keeps torch.nn's encoder layers from their fused path."""
        raise InputError(
            "a module reads the weight of a packed layer", found=f"{getattr(function, '__name__', function)} of layer.weight",
            expected="a call of the layer itself", fix="call the layer, or leave it unpacked",
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"WeightInfo({list(self.shape)}, {self.dtype}, {self.device})"


def add_weight_info(layer: Any) -> None:
    """Give a QuantLinear its `weight`; other modules stay as they are."""
    if isinstance(layer, QuantLinear):
        layer.__dict__["weight"] = WeightInfo(layer)
