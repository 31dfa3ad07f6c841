"""QuantLinear: a torch module of a packed weight and the chosen kernel, called through one opaque operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import _C, Tensor

from bitline.errors import InputError, OutOfMemoryError
from bitline.kernels.base import Packed
from bitline.kernels.registry import kernel_by_name, on_change
from bitline.packed_module import PackedModule
from bitline.platform import Platform, as_device, cpu_features
from bitline.quantized_input import QuantizedInput, fitted
from bitline.select import Choice, Policy, choose, warn_about
from bitline.types import LinearSpec
from bitline.version import __version__
from bitline.weight import QuantizedWeight

# Kernel and spec are text arguments, so that a compiled or exported graph is valid in another process.
_LIBRARY = torch.library.Library("bitline", "DEF")
_LIBRARY.define("linear(Tensor x, Tensor[] packed, Tensor? bias, str kernel, str spec) -> Tensor")
_LIBRARY.define("linear_input_grad(Tensor grad, Tensor[] packed, str kernel, str spec) -> Tensor")
_LIBRARY.define(
    "linear_quantized(Tensor codes, Tensor scales, Tensor? zero, Tensor[] packed, Tensor? bias, str kernel, str spec) -> Tensor"
)


spec_of_key = functools.cache(LinearSpec.parse)  # one object per spec, so that kernels can cache by identity


@functools.cache
def _resolve(kernel: str, spec: str) -> tuple[Callable[..., Tensor], LinearSpec]:
    """The kernel's `apply` and the parsed spec of an operator call."""
    return kernel_by_name(kernel).apply, spec_of_key(spec)


on_change.append(_resolve.cache_clear)


@functools.cache
def _has_several_gpus() -> bool:
    """Kernels launch on the current device. Looking it up takes 2 us, so one GPU skips that."""
    return torch.cuda.device_count() > 1


def _is_on_another_gpu(x: Tensor) -> bool:
    """Whether x is on a GPU that is not the current one."""
    return x.is_cuda and _has_several_gpus() and x.device.index != torch.cuda.current_device()


def _linear_impl(x: Tensor, packed: list[Tensor], bias: Tensor | None, kernel: str, spec: str) -> Tensor:
    """The operator: x [M, K] -> [M, N] by the named kernel's `apply`, with x's device current."""
    apply, parsed = _resolve(kernel, spec)
    if x.shape[0] == 0:
        return x.new_empty(0, parsed.n)
    if _is_on_another_gpu(x):
        with torch.cuda.device(x.device):
            return apply(x.contiguous(), packed, bias, parsed)
    return apply(x.contiguous(), packed, bias, parsed)


def _quantized_impl(
    codes: Tensor, scales: Tensor, zero: Tensor | None, packed: list[Tensor], bias: Tensor | None, kernel: str, spec: str
) -> Tensor:
    """The operator: quantized x [M, K] -> [M, N] by the named kernel's `apply_quantized`, or by its `apply` of x read back."""
    parsed, chosen = spec_of_key(spec), kernel_by_name(kernel)
    assert parsed.act is not None
    if codes.shape[0] == 0:
        return codes.new_empty(0, parsed.n, dtype=parsed.act_dtype)
    if _is_on_another_gpu(codes):
        with torch.cuda.device(codes.device):
            return _quantized_impl(codes, scales, zero, packed, bias, kernel, spec)
    if chosen.takes_quantized_input:
        zero = None if zero is None else zero.contiguous()
        return chosen.apply_quantized(codes.contiguous(), scales.contiguous(), zero, packed, bias, parsed)
    return chosen.apply(QuantizedInput(codes, scales, zero).dequantize(parsed.act, parsed.act_dtype), packed, bias, parsed)


def _input_grad_impl(grad: Tensor, packed: list[Tensor], kernel: str, spec: str) -> Tensor:
    """The operator: the gradient of y [M, N] to that of x [M, K], dx = dy @ W with the W that the named kernel unpacks."""
    if grad.shape[0] == 0:
        return grad.new_empty(0, spec_of_key(spec).k)
    with torch.cuda.device(grad.device) if _is_on_another_gpu(grad) else nullcontext():
        w = kernel_by_name(kernel).unpack(packed, _without_bias(spec))
    if grad.device.type == "cpu" and grad.dtype.itemsize == 2 and not _has_fast_matmul(grad.dtype):
        return (grad.float() @ w.float()).to(grad.dtype)
    return grad @ w


@functools.cache
def _has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of a 16-bit dtype on this CPU faster than their float32 copies."""
    return bool(cpu_features() & ({"amx", "avx512_bf16", "bf16"} if dtype == torch.bfloat16 else {"amx"}))


@functools.cache
def _without_bias(spec: str) -> LinearSpec:
    return spec_of_key(spec_of_key(spec).replace(bias=False).key)


def _linear_fake(x: Tensor, packed: list[Tensor], bias: Tensor | None, kernel: str, spec: str) -> Tensor:
    return x.new_empty(x.shape[0], LinearSpec.parse(spec).n)


def _quantized_fake(
    codes: Tensor, scales: Tensor, zero: Tensor | None, packed: list[Tensor], bias: Tensor | None, kernel: str, spec: str
) -> Tensor:
    parsed = LinearSpec.parse(spec)
    return codes.new_empty(codes.shape[0], parsed.n, dtype=parsed.act_dtype)


def _input_grad_fake(grad: Tensor, packed: list[Tensor], kernel: str, spec: str) -> Tensor:
    return grad.new_empty(grad.shape[0], LinearSpec.parse(spec).k)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, _, ctx.kernel, ctx.spec = inputs
    ctx.save_for_backward(*packed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradient of x. Quantization of x counts as the identity (straight-through). A bias is a buffer and has none."""
    packed = list(ctx.saved_tensors)
    dx = torch.ops.bitline.linear_input_grad.default(grad, packed, ctx.kernel, ctx.spec) if ctx.needs_input_grad[0] else None
    return dx, [None] * len(packed), None, None, None


_LIBRARY.impl("linear", _linear_impl, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::linear", _linear_fake, lib=_LIBRARY)
torch.library.register_autograd("bitline::linear", _backward, setup_context=_keep_for_backward, lib=_LIBRARY)
OP = torch.ops.bitline.linear.default
_LIBRARY.impl("linear_input_grad", _input_grad_impl, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::linear_input_grad", _input_grad_fake, lib=_LIBRARY)
_LIBRARY.impl("linear_quantized", _quantized_impl, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::linear_quantized", _quantized_fake, lib=_LIBRARY)
QUANTIZED_OP = torch.ops.bitline.linear_quantized.default


_dispatch_modes, _function_mode = _C._len_torch_dispatch_stack, _C._is_torch_function_mode_enabled
_tracing, _transform, _profiling = _C._get_tracing_state, _C._functorch.maybe_current_level, _C._autograd._profiler_enabled


def needs_dispatcher(x: Tensor) -> bool:
    """Whether a call has to go through torch's dispatcher: it is compiled, traced, transformed, profiled, under a mode, or x is a
    meta tensor or of a tensor subclass.

    Otherwise the operator's implementation is called directly, which saves the dispatcher's 3 us and more.
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


def packed_for(choice: Choice) -> str:
    """What a packed tensor's layout depends on: kernel, spec, kind of machine and version of Bitline."""
    platform = choice.platform
    machine = f"{platform.vendor}:{platform.arch}"
    if platform.vendor == "cpu" and choice.best.backend not in ("native", "reference", "emulation"):
        machine += "," + ",".join(sorted(platform.features))  # torch's own layouts differ between ISA levels
    return f"{choice.best.name} {choice.spec.key} on {machine}, bitline {__version__}"


class QuantLinear(PackedModule):
    """y = x @ W.T + bias with a quantized W, on the kernel that `choose` selects.

    x may require grad: its gradient is dy @ W, with W unpacked for each backward call. The weight itself is not trained.

    The weight is packed for the kernel into buffers; the module has no parameters. Its state dict can be loaded into a layer of
    the same spec, kernel and version on the same kind of machine, and is refused elsewhere. `.to(device)` moves the packed
    tensors between devices of one type. Dtype conversions (`.half()`, `.to(dtype)`) leave them as they are, since they would
    round scales.

    Args:
        weight: The canonical weight [N, K]. It is neither changed nor kept.
        bias: [N], replaces the weight's own.
        act_dtype: dtype of x and y; the weight's by default.
        device: Where to run; the weight's device by default.
        kernel: "auto", or the class name of the kernel to use.
        policy: Any form that `Policy.of` accepts; the environment's by default.

    Attributes:
        choice: The ranking of all kernels for this layer.
        in_features: K.
        out_features: N.
        source: The layer's name and format in the checkpoint it came from.

    Raises:
        InputError: For a weight or act_dtype of another type, and on a move to another type of device.
        NoKernelError: Where the policy leaves no kernel.
        PlatformError: Where the device is not available.
        OutOfMemoryError: Where there is no memory to pack the weight.
    """

    choice: Choice
    source: tuple[str, str] = ("", "")

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
            raise InputError("QuantLinear takes a QuantizedWeight", found=type(weight).__name__,
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
        warn_about(self.choice, weight.spec)
        self._pack(weight, target)

    @property
    def spec(self) -> LinearSpec:
        """The layer's shape and scheme, as its kernel sees it: without `input_multiplier`."""
        return self.choice.spec

    def reload(self, weight: QuantizedWeight) -> None:
        """Replace the weight by another one of the same spec, as after a training step. The layer is unchanged on an error.

        Args:
            weight: The new canonical weight; its act_dtype does not matter.

        Raises:
            InputError: Where its spec differs.
            OutOfMemoryError: Where there is no memory to pack it.
        """
        weight = weight.with_act_dtype(self.spec.act_dtype)
        expected = self.spec.replace(input_multiplier=self._multiplier is not None)
        if weight.spec != expected:
            raise InputError("cannot reload a layer with a weight of another spec", found=weight.spec.key, expected=expected.key)
        self._pack(weight, self._packed[0].device)

    def _pack(self, weight: QuantizedWeight, device: torch.device) -> None:
        try:
            packed = self.choice.kernel.pack(weight.without_input_multiplier().to(device))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemoryError(
                f"no memory on {device} to pack {weight.origin or 'a weight'}", found=f"{weight.nbytes()} bytes to pack"
            ) from error
        bias = None if weight.bias is None else weight.bias.detach().to(device, weight.spec.act_dtype, copy=True)
        multiplier = None if weight.input_multiplier is None else weight.input_multiplier.to(device)
        self._register(packed, bias, multiplier)

    def _register(self, packed: Packed, bias: Tensor | None, multiplier: Tensor | None = None) -> None:
        self._buffer_names = tuple(f"packed_{name}" for name in packed)  # prefixed, so as not to collide with the layer's own
        for name, tensor in zip(self._buffer_names, packed.values(), strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)
        self.register_buffer("input_multiplier", multiplier)
        self._cache_call()

    def _cache_call(self) -> None:
        """Look up what a call needs, once: nn.Module's attribute look-up costs more than the operator."""
        self._packed: list[Tensor] = [self.get_buffer(name) for name in self._buffer_names]
        self._op_arguments = (self._buffers["bias"], self.choice.best.name, self.spec.key)
        self._multiplier = self._buffers["input_multiplier"]
        bias, spec = self._buffers["bias"], spec_of_key(self.spec.key)
        self._direct = self.choice.kernel.direct(self._packed, bias, self.spec)
        self._eager = None if self._multiplier is not None else self.choice.kernel.eager(self._packed, bias, spec)

    def forward(self, x: Tensor | QuantizedInput) -> Tensor:
        """Run the layer.

        Args:
            x: [..., K] in act_dtype, any strides. Or a QuantizedInput that fits the layer's ActSpec; a kernel that does not take
                one (`takes_quantized_input`) gets it read back to act_dtype and quantizes that again.

        Returns:
            y [..., N] in act_dtype.

        Raises:
            InputError: Where x has another shape or dtype; where a QuantizedInput does not fit.
        """
        if isinstance(x, QuantizedInput):
            return self._forward_quantized(x)
        eager = self._eager
        if eager is not None and not needs_dispatcher(x) and not x.requires_grad:
            y = eager(x)
            if y is not None:
                return y
        spec = self.choice.spec
        if x.dtype != spec.act_dtype or x.dim() == 0 or x.shape[-1] != spec.k:
            raise InputError("the input does not fit the layer", found=f"{list(x.shape)} {x.dtype}",
                             expected=f"[..., {spec.k}] {spec.act_dtype}",
                             fix="load the model with the dtype that it runs in")  # fmt: skip
        differentiable = x.requires_grad and torch.is_grad_enabled()
        if self._multiplier is not None:
            # Outside the operator, so that every kernel supports it and a compiler can fuse it with x's producer. torch computes
            # in float32, or the promotion of both dtypes, and rounds once.
            x = (x * self._multiplier).to(spec.act_dtype)
        if self._direct is not None and not differentiable:
            op, arguments = self._direct
            return op(x, *arguments)
        op = OP if differentiable or needs_dispatcher(x) else _linear_impl
        if x.dim() == 2:
            return op(x, self._packed, *self._op_arguments)
        return op(x.reshape(-1, spec.k), self._packed, *self._op_arguments).view(*x.shape[:-1], spec.n)

    def _forward_quantized(self, x: QuantizedInput) -> Tensor:
        """`forward` of quantized activations."""
        spec = self.choice.spec
        if self._multiplier is not None:
            raise InputError("a layer with an input multiplier quantizes the product", found="a quantized input",
                             fix="call it with a tensor")  # fmt: skip
        codes, scales, zero = fitted(x, spec)
        op = QUANTIZED_OP if needs_dispatcher(codes) else _quantized_impl
        return op(codes, scales, zero, self._packed, *self._op_arguments).view(*x.codes.shape[:-1], spec.n)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        source = self._packed[0].device.type
        target = fn(self._packed[0].new_empty(0)).device.type
        if target not in (source, "meta"):
            raise InputError("a packed layer cannot move to another type of device", found=f"{source} to {target}",
                             fix=f"load it with device={target!r}: each kernel has its own layout")  # fmt: skip
        super()._apply(lambda t: _without_cast(t, fn(t)), recurse)
        self._cache_call()
        return self

    def packed_identity(self) -> str:
        """See PackedModule."""
        return packed_for(self.choice)

    def loaded(self) -> None:
        """See PackedModule."""
        self._cache_call()

    def __getstate__(self) -> dict[str, Any]:
        """Without what `_cache_call` makes anew: operators and closures cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name not in _CACHED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache_call()

    def packed_bytes(self) -> int:
        """Bytes of the packed weight, bias and input multiplier."""
        return sum(b.nbytes for b in self._buffers.values() if b is not None)

    def extra_repr(self) -> str:
        """For repr: K -> N, scheme, kernel."""
        return f"{self.in_features} -> {self.out_features}, {self.spec.scheme}, {self.choice.best.name}"


_CACHED = frozenset(("_packed", "_op_arguments", "_multiplier", "_direct", "_eager"))


def _without_cast(tensor: Tensor, converted: Tensor) -> Tensor:
    """`converted` where only the device changed, else `tensor` moved to its device."""
    return converted if converted.dtype == tensor.dtype else tensor.to(converted.device)
