"""QuantLinear: a packed weight, the kernel that was chosen for it, and one opaque operator per call."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import _C, Tensor, nn

from bitline.errors import InputError, OutOfMemoryError
from bitline.kernels.base import Packed
from bitline.kernels.registry import kernel_by_name, on_change
from bitline.platform import Platform, as_device
from bitline.select import Choice, Policy, choose, warn_degraded, warn_note
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

# The kernel and the spec travel as text, so that a compiled or exported graph means the same in another process.
_LIBRARY = torch.library.Library("bitline", "DEF")
_LIBRARY.define("linear(Tensor x, Tensor[] packed, Tensor? bias, str kernel, str spec) -> Tensor")


_parsed = functools.cache(LinearSpec.parse)  # one object for all layers of a spec, by which kernels know it again


@functools.cache
def _bound(kernel: str, spec: str) -> tuple[Callable[..., Tensor], LinearSpec]:
    return kernel_by_name(kernel).apply, _parsed(spec)


on_change.append(_bound.cache_clear)


@functools.cache
def _several_gpus() -> bool:
    """Kernels launch on the current device; asking which one that is takes 2 us, so it is asked only where it matters."""
    return torch.cuda.device_count() > 1


def _linear(x: Tensor, packed: list[Tensor], bias: Tensor | None, kernel: str, spec: str) -> Tensor:
    apply, parsed = _bound(kernel, spec)
    if x.shape[0] == 0:
        return x.new_empty(0, parsed.n)
    if x.is_cuda and _several_gpus() and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return apply(x.contiguous(), packed, bias, parsed)
    return apply(x.contiguous(), packed, bias, parsed)


def _linear_fake(x: Tensor, packed: list[Tensor], bias: Tensor | None, kernel: str, spec: str) -> Tensor:
    return x.new_empty(x.shape[0], LinearSpec.parse(spec).n)


_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::linear", _linear_fake, lib=_LIBRARY)
OP = torch.ops.bitline.linear.default


_dispatch_modes, _function_mode = _C._len_torch_dispatch_stack, _C._is_torch_function_mode_enabled
_tracing, _transform, _profiling = _C._get_tracing_state, _C._functorch.maybe_current_level, _C._autograd._profiler_enabled


def watched(x: Tensor) -> bool:
    """Whether somebody may want to see the operator: a compiler, tracer, transform, mode or profiler, another kind of tensor.

    Where nobody does, its function is called itself: torch's dispatcher and its conversion of the arguments cost 3 us and more.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.is_meta
        or _dispatch_modes() > 0
        or _function_mode()
        or _tracing() is not None
        or _transform() is not None
        or _profiling()
    )


class QuantLinear(nn.Module):
    """y = x @ W.T + bias with a quantized W, on the kernel that `choose` picked.

    weight: the canonical weight; it is packed, never changed, and not kept.
    bias: [N], overrides the weight's own. act_dtype: dtype of x and y. device: where to run.
    kernel: "auto" or a class name; `policy` says the rest. x is [..., K] in act_dtype, y is [..., N].

    Inference only: an x that requires grad is an InputError. `.to(device)` moves the packed tensors among devices of one
    kind, an InputError among others; a dtype conversion (`.half()`, `.to(dtype)`) leaves them as they are, since scales
    must not be rounded silently.
    """

    choice: Choice
    source: tuple[str, str] = ("", "")  # the layer's name and format in the checkpoint it came from

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        act_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        kernel: str = "auto",
        policy: Policy | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(weight, QuantizedWeight):
            raise InputError("a QuantLinear is made of a QuantizedWeight", found=type(weight).__name__,
                             fix="bitline.quantize(w, scheme), or record.weight() of a checkpoint")  # fmt: skip
        if bias is not None:
            weight = weight.with_bias(bias)
        if act_dtype is not None:
            weight = weight.with_act_dtype(act_dtype)
        target = as_device(device) if device is not None else weight.device
        policy = Policy.of(policy)
        if kernel != "auto":
            policy = Policy(**{**vars(policy), "kernel": kernel})
        self.choice = choose(weight.spec, Platform.detect(target), policy)
        self.in_features, self.out_features = weight.spec.k, weight.spec.n
        near = self.choice.nearest_fast
        if self.choice.degraded and near is not None:
            warn_degraded(weight.spec, self.choice.best.name, near.name, near.verdict.reason)
        if self.choice.note:
            warn_note(self.choice.note, self.choice.best.name)
        self._load(weight, target)

    @property
    def spec(self) -> LinearSpec:
        """The layer's spec."""
        return self.choice.spec

    def reload(self, weight: QuantizedWeight) -> None:
        """Take another weight of the same spec, as after a training step. Nothing changes if it does not fit."""
        weight = weight.with_act_dtype(self.spec.act_dtype)
        expected = self.spec.replace(input_multiplier=self._multiplier is not None)
        if weight.spec != expected:
            raise InputError("cannot reload a layer with a weight of another spec", found=weight.spec.key, expected=expected.key)
        self._load(weight, self._packed[0].device)

    def _load(self, weight: QuantizedWeight, device: torch.device) -> None:
        try:
            packed = self.choice.kernel.pack(weight.without_input_multiplier().to(device))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemoryError(
                f"no memory on {device} to pack {weight.origin or 'a weight'}", found=f"{weight.nbytes()} bytes to pack"
            ) from error
        bias = None if weight.bias is None else weight.bias.detach().to(device, weight.spec.act_dtype, copy=True)
        multiplier = None if weight.input_multiplier is None else weight.input_multiplier.to(device)
        self._adopt(packed, bias, multiplier)

    def _adopt(self, packed: Packed, bias: Tensor | None, multiplier: Tensor | None = None) -> None:
        self._names = tuple(f"packed_{name}" for name in packed)  # a kernel's names must not meet the layer's own
        for name, tensor in zip(self._names, packed.values(), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("input_multiplier", multiplier, persistent=False)
        self._bind()

    def _bind(self) -> None:
        """Everything a call needs, looked up once: nn.Module's attribute look-up costs more than the operator."""
        self._packed: list[Tensor] = [self.get_buffer(name) for name in self._names]
        self._call = (self._buffers["bias"], self.choice.best.name, self.spec.key)
        self._multiplier = self._buffers["input_multiplier"]
        bias, spec = self._buffers["bias"], _parsed(self.spec.key)
        self._direct = self.choice.kernel.direct(self._packed, bias, self.spec)
        self._eager = None if self._multiplier is not None else self.choice.kernel.eager(self._packed, bias, spec)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        eager = self._eager
        if eager is not None and not watched(x) and not x.requires_grad:
            y = eager(x)
            if y is not None:
                return y
        spec = self.choice.spec
        if x.dtype != spec.act_dtype or x.dim() == 0 or x.shape[-1] != spec.k:
            raise InputError("a QuantLinear got an input that it was not made for", found=f"{list(x.shape)} {x.dtype}",
                             expected=f"[..., {spec.k}] {spec.act_dtype}",
                             fix="load the model with the dtype it is run in")  # fmt: skip
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError("QuantLinear is for inference and has no gradient", fix="call it under torch.inference_mode()")
        if self._multiplier is not None:
            # Here and not in a kernel: every kernel can do it, and a compiler can fuse it with what made x. torch multiplies
            # in float32, or what is wider than both dtypes, and rounds once.
            x = (x * self._multiplier).to(spec.act_dtype)
        if self._direct is not None:
            op, arguments = self._direct
            return op(x, *arguments)
        op = OP if watched(x) else _linear
        if x.dim() == 2:
            return op(x, self._packed, *self._call)
        return op(x.reshape(-1, spec.k), self._packed, *self._call).view(*x.shape[:-1], spec.n)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        here = self._packed[0].device.type
        there = fn(self._packed[0].new_empty(0)).device.type
        if there not in (here, "meta"):
            raise InputError("a packed layer cannot move to another kind of device", found=f"{here} to {there}",
                             fix=f"load it with device={there!r}: each kernel has its own layout")  # fmt: skip
        super()._apply(lambda t: _moved(t, fn(t)), recurse)
        self._bind()
        return self

    def packed_bytes(self) -> int:
        """Bytes that the packed weight and bias really take."""
        return sum(b.nbytes for b in self._buffers.values() if b is not None)

    def extra_repr(self) -> str:
        """in -> out, scheme, kernel."""
        return f"{self.in_features} -> {self.out_features}, {self.spec.scheme}, {self.choice.best.name}"


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Follow a device move, ignore a dtype conversion."""
    return after if after.dtype == before.dtype else before.to(after.device)
