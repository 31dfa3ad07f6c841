"""LoRA adapters of PEFT on quantized layers."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from bitline.errors import BitlineError, InputError
from bitline.experts import QuantExperts
from bitline.linear import QuantLinear
from bitline.model.merge import MergedRows
from bitline.model.weight_info import add_weight_info

ALL_LINEAR = "all-linear"
_LAYERS = (QuantLinear, MergedRows)
_INITS = (True, False, "gaussian", "orthogonal", "eva")  # the others are computed from the base layer's weight


def lora_config(model: Any, target_modules: str | list[str] = ALL_LINEAR, **options: Any) -> LoraConfig:
    """A LoraConfig whose adapters fit a model's quantized layers, for `get_peft_model`, `PeftModel` or `add_adapter`.

    Args:
        model: A model that runs on Bitline, whose layers "all-linear" means: every linear layer but the output layer and experts.
        target_modules: As of LoraConfig: names, a regular expression, or "all-linear".
        options: LoraConfig's own: r, lora_alpha, lora_dropout, task_type, …

    Raises:
        InputError: Where the model has no layer to adapt, or for an initialization that needs the unquantized weight.
    """
    if options.get("init_lora_weights", True) not in _INITS:
        raise InputError("this initialization of LoRA needs the unquantized weight", found=options["init_lora_weights"],
                         expected=" or ".join(map(repr, _INITS)))  # fmt: skip
    names = _all_linear(model) if target_modules == ALL_LINEAR else target_modules
    return _registered(LoraConfig(target_modules=names, **options))


def load_adapter(model: Any, path: str | os.PathLike[str], **options: Any) -> PeftModel:
    """A saved adapter on a model that runs on Bitline: `PeftModel.from_pretrained` with the config that its layers need.

    Args:
        model: The base model.
        path: The folder of the adapter.
        options: `PeftModel.from_pretrained`'s own, such as is_trainable.
    """
    return PeftModel.from_pretrained(model, path, config=_registered(LoraConfig.from_pretrained(path)), **options)


def _registered(config: LoraConfig) -> LoraConfig:
    """The config, with the adapter of Bitline's layers: PEFT does not save that."""
    config._register_custom_module(dict.fromkeys(_LAYERS, LoraQuantLinear))
    return config


def _all_linear(model: Any) -> list[str]:
    """Last names of the linear layers to adapt, full names where a last name stands for other modules too."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    experts = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, QuantExperts))
    merged = {id(m.shared.layer) for m in model.modules() if isinstance(m, MergedRows)}
    names: dict[str, list[str]] = defaultdict(list)
    others: set[str] = set()
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        linear = isinstance(module, (*_LAYERS, nn.Linear)) and module is not head and id(module) not in merged
        if linear and not (experts and name.startswith(experts)):
            names[leaf].append(name)
        else:
            others.add(leaf)
    if not names:
        raise InputError("the model has no linear layer to adapt", found=type(model).__name__, expected="a loaded model")
    return sorted(target for leaf, full in names.items() for target in ([leaf] if leaf not in others else full))


class LoraQuantLinear(nn.Module, LoraLayer):
    """y = base(x) + scaling * B(A(dropout(x))), with a quantized base layer.

    The adapter's arithmetic is PEFT's: x in A's dtype, the result in the base layer's. Nothing is merged into packed weights.
    """

    def __init__(
        self, base_layer: Any, adapter_name: str, config: LoraConfig, r: int = 0, lora_alpha: int = 1, **_options: Any
    ) -> None:  # fmt: skip
        super().__init__()
        base = base_layer.get_base_layer() if isinstance(base_layer, LoraLayer) else base_layer
        add_weight_info(base.shared.layer if isinstance(base, MergedRows) else base)
        if isinstance(base, MergedRows):
            base.__dict__["weight"] = base.shared.layer.weight
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # this class is what supports it
            LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        LoraLayer.update_layer(self, adapter_name, r, lora_alpha=lora_alpha, config=config)

    def forward(self: Any, x: Tensor, adapter_names: Any = None) -> Tensor:
        """x [..., K] -> y [..., N], as the base layer."""
        if adapter_names is not None:
            raise InputError("adapters of quantized layers apply to the whole batch", found="adapter_names", expected="none")
        y: Tensor = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            if name in self.lora_A:
                y = y + self._delta(name, x).to(y.dtype) * self.scaling[name]
        return y

    def _delta(self: Any, name: str, x: Tensor) -> Tensor:
        a, b = self.lora_A[name], self.lora_B[name]
        if not torch.is_autocast_enabled(x.device.type):
            x = self._cast_input_dtype(x, a.weight.dtype)
        delta: Tensor = b(a(self.lora_dropout[name](x)))
        return delta

    def merge(self, *_args: Any, **_options: Any) -> None:
        """Refused: packed codes cannot take the product."""
        raise BitlineError("an adapter cannot be merged into packed weights", fix="keep it an adapter, or merge it into the "
                           "unquantized model and quantize that")  # fmt: skip

    def unmerge(self) -> None:
        """Nothing is ever merged."""

    def __repr__(self) -> str:
        return "lora." + super().__repr__()
