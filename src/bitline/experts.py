"""QuantExperts: the experts of a mixture-of-experts layer on packed weights, called through one opaque operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitline.errors import InputError, OutOfMemoryError
from bitline.expert_counts import tokens_per_expert
from bitline.expert_gate import ExpertGate
from bitline.kernels.base import Kernel
from bitline.kernels.registry import kernel_by_name, on_change
from bitline.linear import OP as LINEAR_OP
from bitline.linear import QuantLinear, needs_dispatcher, packed_for, spec_of_key
from bitline.packed_module import PackedModule
from bitline.platform import Platform, as_device
from bitline.select import Choice, Policy, choose, fuses_experts, warn_about
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

EXPERT_ALIGNMENT = 256  # bytes between the starts of two experts' packed tensors are a multiple of this

_LIBRARY = torch.library.Library("bitline", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor x, Tensor index, Tensor weights, Tensor[] up, Tensor? up_bias, Tensor[] down, Tensor? down_bias, "
    "str up_kernel, str up_spec, str down_kernel, str down_spec, str gate) -> Tensor"
)


def expert_policy(policy: Policy, num_experts: int, top_k: int, layers: Sequence[LinearSpec] = ()) -> Policy:
    """A policy for one expert's layer: its M are the tokens that an active expert gets of a batch.

    layers: those of one expert; kernels that run the experts of all of them in one call rank first.
    """
    m = tuple(dict.fromkeys(tokens_per_expert(num_experts, top_k, m) for m in policy.m))
    return replace(policy, m=m, experts=tuple(dict.fromkeys(layers)))


class ExpertStack(PackedModule):
    """One projection of all experts: layers of one spec on one kernel, each packed tensor stacked along the first dimension.

    Attributes:
        choice: The ranking of all kernels for one expert's layer.
        packed: Tensors [E, ...] in the order of the kernel's `pack`; each expert's part is contiguous and aligned.
        bias: [E, N] in the layer's act_dtype, or None.
        source: Name and format in the checkpoint.
    """

    source: tuple[str, str] = ("", "")
    bias: Tensor | None

    def __init__(self, spec: LinearSpec, num_experts: int, device: torch.device, policy: Policy) -> None:
        super().__init__()
        self.num_experts, self.device = num_experts, device
        self.choice: Choice = choose(spec, Platform.detect(device), policy)
        self.input_spec = spec
        warn_about(self.choice, spec)
        self.packed: list[Tensor] = []
        self._names: tuple[str, ...] = ()
        self.register_buffer("bias", None)

    @property
    def spec(self) -> LinearSpec:
        """The spec of one expert's layer."""
        return self.choice.spec

    def put(self, expert: int, weight: QuantizedWeight) -> None:
        """Pack an expert's weight into its place.

        Raises:
            InputError: Where its spec differs from the stack's.
            OutOfMemoryError: Where there is no memory to pack it.
        """
        if weight.spec != self.input_spec:
            raise InputError("experts of one stack have one spec", found=weight.spec.key, expected=self.input_spec.key)
        try:
            packed = self.choice.kernel.pack(weight.to(self.device))
            if not self.packed:
                self._names = tuple(f"packed_{name}" for name in packed)
                self._set([_stack_like(t, self.num_experts) for t in packed.values()])
                if weight.bias is not None:
                    self.bias = torch.zeros(self.num_experts, self.spec.n, dtype=self.spec.act_dtype, device=self.device)
            for stack, tensor in zip(self.packed, packed.values(), strict=True):
                stack[expert].copy_(tensor)
            if weight.bias is not None:
                assert self.bias is not None
                self.bias[expert].copy_(weight.bias.detach())
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemoryError(
                f"no memory on {self.device} for {self.num_experts} experts",
                found=f"{weight.nbytes()} bytes each",
            ) from error

    def _set(self, stacks: Sequence[Tensor]) -> None:
        for name, stack in zip(self._names, stacks, strict=True):
            self.register_buffer(name, stack)
        self.packed = list(stacks)

    def layer(self, expert: int) -> Callable[[Tensor], Tensor]:
        """x [M, K] to y [M, N] of one expert."""
        packed, bias = [t[expert] for t in self.packed], None if self.bias is None else self.bias[expert]

        def run(x: Tensor) -> Tensor:
            if x.requires_grad and torch.is_grad_enabled():
                return LINEAR_OP(x, packed, bias, self.choice.best.name, self.spec.key)
            return self.choice.kernel.apply(x, packed, bias, spec_of_key(self.spec.key))

        return run

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertStack:
        """Moves between devices of one type keep dtypes and alignment."""
        source = self.device
        target = fn(torch.empty(0, device=source)).device
        if target.type != source.type:
            raise InputError("packed experts cannot move to another type of device", found=f"{source.type} to {target.type}",
                             fix=f"load them with device={target.type!r}: each kernel has its own layout")  # fmt: skip
        if target != source:
            moved = [_stack_like(t[0].to(target), self.num_experts) for t in self.packed]
            for stack, old in zip(moved, self.packed, strict=True):
                stack.copy_(old)
            self._set(moved)
            self.bias = None if self.bias is None else self.bias.to(target)
            self.device = target
        return self

    def packed_identity(self) -> str:
        """See PackedModule."""
        return f"{self.num_experts} experts, {packed_for(self.choice)}"

    def loaded(self) -> None:
        """See PackedModule."""
        self.packed = [self.get_buffer(name) for name in self._names]

    def packed_bytes(self) -> int:
        """Bytes of the packed weights and biases."""
        return sum(t.nbytes for t in (*self.packed, *(() if self.bias is None else (self.bias,))))

    def extra_repr(self) -> str:
        """For repr: number of experts, K -> N, scheme, kernel."""
        return f"{self.num_experts} x {self.spec.k} -> {self.spec.n}, {self.spec.scheme}, {self.choice.best.name}"


def _stack_like(tensor: Tensor, num_experts: int) -> Tensor:
    """An uninitialized [E, *shape] whose experts are contiguous and start at multiples of EXPERT_ALIGNMENT."""
    item = tensor.element_size()  # divides the alignment
    stride = -(-tensor.nbytes // EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT // item
    flat = torch.empty(num_experts * stride + EXPERT_ALIGNMENT // item, dtype=tensor.dtype, device=tensor.device)
    first = -flat.data_ptr() % EXPERT_ALIGNMENT // item
    shape = tensor.shape
    inner = torch.empty(shape, device="meta").stride()
    return flat.as_strided((num_experts, *shape), (stride, *inner), first)


# ---- operator -----------------------------------------------------------------------------------------------------------

Pair = tuple[type[Kernel], type[Kernel]]


@functools.cache
def _resolve(
    up_kernel: str, up_spec: str, down_kernel: str, down_spec: str, gate: str, device: torch.device
) -> tuple[Pair, tuple[LinearSpec, LinearSpec], ExpertGate, bool]:
    """Kernels, specs and gate of an operator call, and whether one kernel runs all of it on a device."""
    kernels = (kernel_by_name(up_kernel), kernel_by_name(down_kernel))
    specs, parsed = (spec_of_key(up_spec), spec_of_key(down_spec)), ExpertGate.parse(gate)
    fused = kernels[0] is kernels[1] and kernels[0].can_experts(*specs, parsed)
    platform = Platform.detect(device)
    return kernels, specs, parsed, fused and all(fuses_experts(kernels[0], spec, platform) for spec in specs)


on_change.append(_resolve.cache_clear)


def _experts_impl(
    x: Tensor, index: Tensor, weights: Tensor, up: list[Tensor], up_bias: Tensor | None, down: list[Tensor],
    down_bias: Tensor | None, up_kernel: str, up_spec: str, down_kernel: str, down_spec: str, gate: str,
) -> Tensor:  # fmt: skip
    """The operator: x [T, K], index [T, k], weights [T, k] -> [T, N]."""
    kernels, specs, parsed, fused = _resolve(up_kernel, up_spec, down_kernel, down_spec, gate, x.device)
    if index.numel() == 0:
        return x.new_zeros(x.shape[0], specs[1].n)
    if fused:
        return kernels[0].apply_experts(x.contiguous(), index, weights, up, up_bias, down, down_bias, *specs, parsed)

    def layer(part: int, expert: int) -> Callable[[Tensor], Tensor]:
        packed, bias = ((up, up_bias), (down, down_bias))[part]
        of_expert, b = [t[expert] for t in packed], None if bias is None else bias[expert]
        return lambda v: kernels[part].apply(v, of_expert, b, specs[part])

    return loop_over_experts(x, index, weights, up[0].shape[0], lambda e, rows: layer(1, e)(parsed(layer(0, e)(rows))))


def loop_over_experts(
    x: Tensor, index: Tensor, weights: Tensor, num_experts: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The weighted sum of the experts' results, one expert after the other: the reference, and the fallback of kernels.

    Args:
        x: [T, K].
        index: [T, k], integers. num_experts itself means no expert; other numbers out of range are an InputError.
        weights: [T, k].
        num_experts: E.
        expert: (expert, rows of x [M, K], contiguous) to [M, N].

    Returns:
        [T, N] in x's dtype: products with weights and their sum, in the order of k, in float32.
    """
    tokens, top_k = index.shape
    flat = index.reshape(-1).long()
    low, high = flat.aminmax()
    if int(low) < 0 or int(high) > num_experts:
        raise InputError("an expert's number is out of range", found=f"{int(low)}..{int(high)}", expected=f"0..{num_experts - 1}")
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1).tolist()
    rows = x.index_select(0, order // top_k)
    sorted_out: Tensor | None = None
    at = 0
    for e, count in enumerate(counts[:num_experts]):
        if count:
            y = expert(e, rows[at : at + count])
            if sorted_out is None:
                sorted_out = y.new_zeros(tokens * top_k, y.shape[1])
            sorted_out[at : at + count] = y
            at += count
    if sorted_out is None:  # no token has an expert
        return torch.zeros_like(expert(0, x))
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    return (out.view(tokens, top_k, -1).float() * weights.float().unsqueeze(-1)).sum(1).to(x.dtype)


def _experts_fake(
    x: Tensor, index: Tensor, weights: Tensor, up: list[Tensor], up_bias: Tensor | None, down: list[Tensor],
    down_bias: Tensor | None, up_kernel: str, up_spec: str, down_kernel: str, down_spec: str, gate: str,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], LinearSpec.parse(down_spec).n)


_LIBRARY.impl("experts", _experts_impl, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::experts", _experts_fake, lib=_LIBRARY)
OP = torch.ops.bitline.experts.default


# ---- module -------------------------------------------------------------------------------------------------------------

Part = ExpertStack | nn.ModuleList  # layers of one spec, or a QuantLinear for each expert


class OneCall(NamedTuple):
    """A kernel that runs all experts of a module in one call, and what it runs."""

    kernel: type[Kernel]
    up: ExpertStack
    down: ExpertStack
    gate: ExpertGate


class QuantExperts(nn.Module):
    """The experts of a mixture-of-experts layer, called as transformers calls its own.

    hidden and weights may require grad; then the experts run one after the other.

    Args:
        up: The first projection, [E] layers K -> 2 I of gate above up rows, or K -> I; or two parts, gate and up, where they
            cannot be one layer.
        down: The second projection, [E] layers I -> N.
        gate: What is computed between them: an ExpertGate, or any function [M, 2 I] -> [M, I]; or an object whose `of_expert` is
            one of an expert's number and [M, 2 I].
        post_norm: Applied to each expert's result before it is weighted.

    Attributes:
        num_experts: E.
    """

    def __init__(
        self, up: Sequence[Part], down: Part, gate: ExpertGate | Callable[[Tensor], Tensor],
        post_norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.up = nn.ModuleList(up)
        self.down: nn.Module = down
        self.gate, self.post_norm = gate, post_norm
        self.num_experts = _length(down)
        self._stacks = self._find_stacks()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run the layer.

        Args:
            hidden: [T, K] in the model's dtype.
            index: [T, k], each token's experts; num_experts itself stands for none.
            weights: [T, k], what each expert's result is multiplied by.

        Returns:
            [T, N] in hidden's dtype.

        Raises:
            InputError: Where hidden has another shape or dtype, or an index is out of range.
        """
        if (hidden.requires_grad or weights.requires_grad) and torch.is_grad_enabled():
            return self._differentiable(hidden, index, weights)
        if self._stacks is None:
            return loop_over_experts(hidden, index, weights, self.num_experts, self._expert)
        up, down, names = self._stacks
        if hidden.dtype != up.spec.act_dtype or hidden.dim() != 2 or hidden.shape[1] != up.spec.k:
            raise InputError("the input does not fit the experts", found=f"{list(hidden.shape)} {hidden.dtype}",
                             expected=f"[T, {up.spec.k}] {up.spec.act_dtype}")  # fmt: skip
        op = OP if needs_dispatcher(hidden) else _experts_impl
        return op(hidden, index, weights, up.packed, up.bias, down.packed, down.bias, *names)

    @torch.compiler.disable
    def _differentiable(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """`forward` by the loop, whose steps torch differentiates with respect to hidden and weights."""
        return loop_over_experts(hidden, index, weights, self.num_experts, self._expert)

    @property
    def is_one_call(self) -> bool:
        """Whether all experts are one operator. Else they run one by one, in Python, each as an operator."""
        return self._stacks is not None

    @property
    def one_call(self) -> OneCall | None:
        """What one kernel's `apply_experts` runs of this module on its device; None where experts run one by one."""
        if self._stacks is None:
            return None
        up, down, names = self._stacks
        kernels, _, gate, fused = _resolve(*names, up.device)
        return OneCall(kernels[0], up, down, gate) if fused and up.device == down.device else None

    def _find_stacks(self) -> tuple[ExpertStack, ExpertStack, tuple[str, str, str, str, str]] | None:
        """The operator's stacks, and its text arguments; None where the experts run one by one."""
        up, down, gate = self.up[0], self.down, self.gate
        if len(self.up) > 1 or self.post_norm is not None or not isinstance(gate, ExpertGate):
            return None
        if not (isinstance(up, ExpertStack) and isinstance(down, ExpertStack)):
            return None
        return up, down, (up.choice.best.name, up.spec.key, down.choice.best.name, down.spec.key, gate.key)

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        """One expert's result for rows [M, K] of x."""
        parts = [_layer(part, expert)(rows) for part in self.up]
        between = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        gate: Any = self.gate
        gated = gate.of_expert(expert, between) if hasattr(gate, "of_expert") else gate(between)
        y = _layer(self.down, expert)(gated)
        return y if self.post_norm is None else self.post_norm(y)


def _length(part: Part) -> int:
    """E."""
    return part.num_experts if isinstance(part, ExpertStack) else len(part)


def _layer(part: nn.Module, expert: int) -> Callable[[Tensor], Tensor]:
    """x [M, K] to y [M, N] of one expert."""
    if isinstance(part, ExpertStack):
        return part.layer(expert)
    assert isinstance(part, nn.ModuleList)
    return part[expert]


def stackable(spec: LinearSpec) -> bool:
    """Whether packed tensors of this spec have one shape, whatever the weight's values; ragged groups have not."""
    return not spec.input_multiplier and not spec.ragged


def stack_experts(
    weights: Callable[[int], QuantizedWeight], num_experts: int, one_spec: bool, act_dtype: torch.dtype,
    device: torch.device | str, policy: Policy | str | None, top_k: int, routed: int | None = None,
    layers: Sequence[LinearSpec] = (),
) -> Part:  # fmt: skip
    """One projection of all experts: an ExpertStack where they have one spec, else a QuantLinear each.

    Args:
        weights: Reads an expert's canonical weight; called once for each, in order.
        num_experts: E.
        one_spec: Whether all of them have one spec.
        act_dtype: dtype of x and y.
        device: Where to run.
        policy: Any form that `Policy.of` accepts.
        top_k: Experts of a token.
        routed: Experts of which a token gets top_k; more than E where other ranks have some. E by default.
        layers: The other layers of an expert, where one call may run all of them: kernels that do are preferred for a stack.
    """
    target, base = as_device(device), Policy.of(policy)
    first = weights(0).with_act_dtype(act_dtype)
    is_stack = one_spec and stackable(first.spec)
    policy = expert_policy(base, routed or num_experts, top_k, layers if is_stack else ())
    stack = ExpertStack(first.spec, num_experts, target, policy) if is_stack else None
    each = nn.ModuleList()
    for e in range(num_experts):
        weight = first if e == 0 else weights(e).with_act_dtype(act_dtype)
        if stack is None:
            each.append(QuantLinear(weight, device=target, policy=policy))
        else:
            stack.put(e, weight)
    return each if stack is None else stack
