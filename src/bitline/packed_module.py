"""The state dict of modules with packed tensors: the tensors, and what they were packed for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitline.errors import InputError

EXTRA_STATE = "_extra_state"  # torch's key of what get_extra_state returns


class PackedModule(nn.Module):
    """A module without children whose state dict holds its packed tensors, to be loaded into one that is packed alike.

    The state says what the tensors were packed for, as uint8 text, so that a file of tensors alone can hold it.
    """

    def packed_identity(self) -> str:
        """What the packed tensors fit: kernel, spec, kind of machine and version of Bitline."""
        raise NotImplementedError

    def loaded(self) -> None:
        """Called after a state was loaded."""

    def get_extra_state(self) -> Tensor:
        """uint8: the text of `packed_identity`."""
        return torch.frombuffer(bytearray(self.packed_identity().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing: `_load_from_state_dict` checks it before it changes a tensor."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._buffers:  # stacks of experts have gaps, which a file of tensors cannot have
            if (tensor := destination.get(prefix + name)) is not None:
                destination[prefix + name] = tensor.contiguous()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, _local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], _error_msgs: list[str],
    ) -> None:  # fmt: skip
        """All of the layer's tensors or none of them.

        Raises:
            InputError: Where the state is of tensors that were packed for something else, or does not say for what.
        """
        names = [name for name, tensor in self._buffers.items() if tensor is not None]
        given = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        if strict:
            unexpected_keys += [prefix + name for name in sorted(given - {*names, EXTRA_STATE})]
        if not given & {*names, EXTRA_STATE}:
            missing_keys += [prefix + name for name in (*names, EXTRA_STATE)]
            return
        self._check_identity(state_dict.get(prefix + EXTRA_STATE), prefix)
        if not given.issuperset(names):
            missing_keys += [prefix + name for name in names]
            return
        for name in names:
            self._buffers[name] = _filled(self.get_buffer(name), state_dict[prefix + name])
        self.loaded()

    def _check_identity(self, state: Any, prefix: str) -> None:
        found = bytes(state.tolist()).decode(errors="replace") if isinstance(state, Tensor) else "tensors without a description"
        if found != self.packed_identity():
            raise InputError(
                "packed tensors fit only the kernel, layer and kind of machine that they were packed for",
                tensor=prefix.rstrip("."), found=found, expected=self.packed_identity(),
                fix="load the checkpoint itself, which packs it for this machine",
            )  # fmt: skip


def _filled(buffer: Tensor, tensor: Tensor) -> Tensor:
    """The buffer with the tensor's values; a new one where groups of other sizes make it larger or smaller."""
    if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=buffer.device)
    with torch.no_grad():
        return buffer.copy_(tensor)
