"""A meta model whose tensors are put aside while transformers places its modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PLACE = "bitline_place"
_NONE: dict[str, Any] = {}


class VacatedModel:
    """Takes all tensors out of a model on the meta device, so that transformers has nothing to load, to initialize or to tie.

    Each module that had tensors gets a placeholder of one byte instead, which transformers moves to the module's device.
    `restore` puts the meta tensors back; from then on `device_of` says where a module was placed.
    """

    def __init__(self, model: Any, packed_bytes: dict[str, int]) -> None:
        self.model = model
        self._devices: dict[str, torch.device] = {}
        self._modules: dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any], set[str]]] = {}
        for name, module in model.named_modules():
            kept = dict(module._parameters), dict(module._buffers), set(module._non_persistent_buffers_set)
            self._modules[name] = (module, *kept)
        for name, (module, parameters, buffers, _) in self._modules.items():
            tensors = [t for t in (*parameters.values(), *buffers.values()) if t is not None]
            self._vacate(module, packed_bytes.get(name, sum(t.nbytes for t in tensors)))
        self._attributes = {name: model.__dict__.get(name, _NONE) for name in _LOADED_STATE}
        model.all_tied_weights_keys = {}
        model._keys_to_ignore_on_load_unexpected = {""}  # matches any name: Bitline reads the files

    def _vacate(self, module: Any, nbytes: int) -> None:
        module._parameters.clear()
        module._buffers.clear()
        module._non_persistent_buffers_set.clear()
        if nbytes:
            place = torch.empty(1, dtype=torch.uint8, device="meta")
            place.bitline_bytes = nbytes  # type: ignore[attr-defined]  # transformers asks by names that are not always full
            module.register_buffer(_PLACE, place, persistent=False)
        module.__dict__["_is_hf_initialized"] = True

    def tensor_names(self) -> list[str]:
        """Names of the model's parameters and persistent buffers."""
        return [
            f"{name}.{leaf}" if name else leaf
            for name, (_, parameters, buffers, computed) in self._modules.items()
            for leaf, tensor in (*parameters.items(), *buffers.items())
            if tensor is not None and leaf not in computed
        ]

    def restore(self) -> None:
        """Put the meta tensors back and note where transformers placed each module."""
        for name, (module, parameters, buffers, computed) in self._modules.items():
            place = module._buffers.pop(_PLACE, None)
            if isinstance(place, Tensor):
                self._devices[name] = place.device
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(computed)
            module.__dict__.pop("_is_hf_initialized", None)
        self._settle()
        for name, value in self._attributes.items():
            if value is _NONE:
                self.model.__dict__.pop(name, None)
            else:
                setattr(self.model, name, value)

    def _settle(self) -> None:
        """Modules with tensors of their own that transformers split over devices stay on the CPU: move them to their parts'."""
        if all(device.type == "cpu" for device in self._devices.values()):
            return
        on_device = {name: device for name, device in self._devices.items() if device.type != "cpu"}
        for name in self._devices.keys() - on_device.keys():
            parts = [device for other, device in on_device.items() if other.startswith(f"{name}.") or not name]
            self._devices[name] = parts[0] if parts else next(iter(on_device.values()))

    def device_of(self, name: str) -> torch.device:
        """Where a module runs, by its name or that of one of its tensors."""
        owner = name
        while owner not in self._devices and owner:
            owner = owner.rpartition(".")[0]
        return self._devices.get(owner) or next(iter(self._devices.values()))

    def devices(self) -> set[torch.device]:
        """All devices of the model."""
        return set(self._devices.values())


_LOADED_STATE = ("all_tied_weights_keys", "_keys_to_ignore_on_load_unexpected")
