"""Packed tensors of a loaded module compared, bit for bit, with what its kernel packs of the checkpoint's weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from bitline.experts import ExpertStack
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.linear import QuantLinear
from bitline.model.embedding import QuantEmbedding
from bitline.weight import QuantizedWeight

Difference = tuple[str, str, str]  # layer, kernel, and what differs


def packed_differences(
    module: QuantLinear | ExpertStack | QuantEmbedding, read: Callable[..., QuantizedWeight], name: str
) -> Iterator[Difference]:  # fmt: skip
    """Tensors of a module that are not what its kernel packs; `Kernel.pack` gives the same bits each time.

    module: its buffers are compared. read: the canonical weight on this rank; of experts, `read(expert=e)`. A bias that no file
    stores with the layer, or that another rank adds, is not compared.
    """
    if isinstance(module, QuantEmbedding):
        fresh = ReferenceLinearKernel.pack(read().with_bias(None).to(module.get_buffer(module._names[0]).device))
        yield from _compare(name, "QuantEmbedding", fresh, {key: module.get_buffer(key) for key in fresh})
    elif isinstance(module, ExpertStack):
        for e in range(module.num_experts):
            weight = read(expert=e).with_act_dtype(module.spec.act_dtype)
            fresh = module.choice.kernel.pack(weight.to(module.device))
            held = {key: stack[e] for key, stack in zip(fresh, module.packed, strict=True)}
            bias = None if module.bias is None else module.bias[e]
            yield from _compare(f"{name}.{e}", module.choice.best.name, *_with_bias(fresh, held, weight, bias))
    else:
        weight = read().with_act_dtype(module.spec.act_dtype)
        fresh = module.choice.kernel.pack(weight.without_input_multiplier().to(module._packed[0].device))
        held = dict(zip(fresh, module._packed, strict=True))
        fresh, held = _with_bias(fresh, held, weight, module._buffers["bias"])
        multiplier = module._buffers["input_multiplier"]
        if multiplier is not None and weight.input_multiplier is not None:
            fresh, held = fresh | {"input_multiplier": weight.input_multiplier}, held | {"input_multiplier": multiplier}
        yield from _compare(name, module.choice.best.name, fresh, held)


def _with_bias(
    fresh: Mapping[str, Tensor], held: Mapping[str, Tensor], weight: QuantizedWeight, bias: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both with the bias, where both have one."""
    if bias is None or weight.bias is None:
        return dict(fresh), dict(held)
    return {**fresh, "bias": weight.bias.detach().to(bias.dtype)}, {**held, "bias": bias}


def _compare(name: str, kernel: str, fresh: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Iterator[Difference]:
    for key, expected in fresh.items():
        found = held[key]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            shapes = f"{found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
            yield name, kernel, f"the packed tensor {key} is {shapes}"
        elif (count := _different_bytes(found, expected)) > 0:
            yield name, kernel, f"the packed tensor {key} differs from the checkpoint in {count} of {found.nbytes} bytes"


def _different_bytes(a: Tensor, b: Tensor) -> int:
    """Bytes in which two tensors of one shape and dtype differ."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b.to(a.device))]
    return int((flat[0] != flat[1]).sum())
