"""Expert parallelism: each rank has whole experts, and ranks sum what theirs give."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from bitline.errors import InputError
from bitline.experts import QuantExperts
from bitline.parallel import TensorParallel
from bitline.parallel.cuts import ExpertRange


def check_divisible(module: Any, name: str) -> None:
    """Refuse an experts module that is not called with hidden states and each token's experts and weights, as Llama 4's.

    Raises:
        InputError: For such a module. name: of it.
    """
    arguments = len(inspect.signature(module.forward).parameters)
    if arguments != 3:
        raise InputError(
            "experts of this architecture cannot be divided over ranks", tensor=name,
            found=f"{type(module).__name__} with {arguments} arguments", expected="hidden states, experts' numbers, weights",
            fix="leave out expert parallelism: each expert's channels are cut then",
        )  # fmt: skip


def divide_experts(module: Any, own: ExpertRange, tp: TensorParallel) -> None:
    """Make an experts module run this rank's experts alone, on every rank's tokens, and sum the results of all ranks.

    Args:
        module: QuantExperts of `own`, or transformers' module of all experts, of which the others are dropped.
        own: This rank's experts.
        tp: The ranks.
    """
    if isinstance(module, QuantExperts):
        module.register_forward_pre_hook(lambda _module, args: (args[0], local_numbers(args[1], own), *args[2:]))
    else:
        _drop_other_experts(module, own)
        module.register_forward_pre_hook(lambda _module, args: (args[0], *_with_zero_weights(args[1], args[2], own)))
    module.register_forward_hook(lambda _module, _args, y: tp.sum(y))


def local_numbers(index: Tensor, own: ExpertRange) -> Tensor:
    """Experts' numbers as those of this rank's experts; len(own), which stands for no expert, where another rank has it."""
    local = index - own.start
    return torch.where((local >= 0) & (local < len(own)), local, len(own))


def _with_zero_weights(index: Tensor, weights: Tensor, own: ExpertRange) -> tuple[Tensor, Tensor]:
    """Numbers and weights for transformers' modules, not all of which have a number for no expert: some expert with weight 0."""
    local = index - own.start
    return local.remainder(len(own)), torch.where((local >= 0) & (local < len(own)), weights, 0.0)


def _drop_other_experts(module: Any, own: ExpertRange) -> None:
    """Keep this rank's part of the stacked parameters of unquantized experts, as transformers holds them."""
    for leaf, parameter in list(module._parameters.items()):
        if parameter is not None and parameter.shape[:1] == (own.total,):
            module._parameters[leaf] = nn.Parameter(parameter.detach()[own.start : own.stop].clone(), requires_grad=False)
    for attribute in ("num_experts", "num_local_experts"):
        if getattr(module, attribute, None) == own.total:
            setattr(module, attribute, len(own))
