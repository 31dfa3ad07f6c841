"""The kernel protocol: what every kernel class implements, and the facts that it declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitline.act_quant import fake_quantize
from bitline.errors import InputError
from bitline.expert_gate import ACTIVATIONS, ExpertGate
from bitline.host import without_default_device
from bitline.platform import Platform
from bitline.types import YES, LinearSpec, Verdict
from bitline.weight import QuantizedWeight

Packed = dict[str, Tensor]


class Kernel:
    """One way to run a quantized linear layer, y = x @ W.T + bias with x [M, K], W [N, K] and y [M, N].

    A kernel holds no state: the class itself is registered, chosen and called, and all methods are class methods. It implements
    `can_implement`, `pack`, `apply` and `cost`, and usually `is_supported`; `direct` and `eager` are optional shortcuts around
    torch's dispatcher. The attributes are promises; the conformance tests prove those that can be measured.

    Attributes:
        platforms: Vendors that it is offered on: "cpu", "cuda", "rocm", "xpu".
        backend: Name of the provider, as in `Policy(backend=...)`.
        families: Kernel families that it serves, named as in vLLM: "mp", "int8", "fp8", "fp8_block", "nvfp4", "mxfp4", "mxfp6",
            "mxfp8". Empty for all.
        priority: Breaks ties of `cost`, larger first.
        deterministic: Whether the same call gives the same bits; None where that is unknown. Kernels with False rank last, unless
            all others emulate.
        batch_invariant: Whether row i of a batch gives the same bits as the same row alone.
        cuda_graph: Whether a call can be captured into a CUDA graph.
        quantizes_input: Whether it multiplies activation codes by weight codes, and so serves only specs with `act`.
        takes_quantized_input: Whether it has `apply_quantized`. Other kernels get a quantized input read back to act_dtype.
        emulates: Whether it stands in for hardware or a fast kernel that is missing. On a GPU it ranks after all kernels that do
            not emulate, unless its cost was measured there.
        exact: Whether it computes what the spec says up to rounding. One that does not runs only where it, or its backend, is
            asked for by name.
        unproven: Whether this version of it has not run on its hardware yet. It runs only where it is asked for by name.
        experts_unproven: Whether this version of `apply_experts` has not run on a GPU yet: there the loop over experts runs.
        is_fallback: Whether it dequantizes the weight in memory at each call. Running on it unasked counts as degraded if a
            faster kernel of the platform refused the layer.
        requires_bf16_hardware: Whether bfloat16 inputs need a GPU with bfloat16 arithmetic (NVIDIA sm80 and later).
        measured: Architectures and CPU features of the machines on which `cost` was fitted to measured times.
        act_dtypes: dtypes of the input that it takes; the output has the input's.
    """

    platforms: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm", "xpu")
    backend: ClassVar[str] = "torch"
    families: ClassVar[tuple[str, ...]] = ()
    priority: ClassVar[int] = 0
    deterministic: ClassVar[bool | None] = True
    batch_invariant: ClassVar[bool] = False
    cuda_graph: ClassVar[bool] = True
    quantizes_input: ClassVar[bool] = False
    takes_quantized_input: ClassVar[bool] = False
    emulates: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    unproven: ClassVar[bool] = False
    experts_unproven: ClassVar[bool] = False
    is_fallback: ClassVar[bool] = False
    requires_bf16_hardware: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = ()
    act_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)

    def __init_subclass__(cls, **options: Any) -> None:
        """Have `pack` ignore torch's default device, under which an engine may build its layers."""
        super().__init_subclass__(**options)
        if isinstance(own := cls.__dict__.get("pack"), classmethod):
            setattr(cls, "pack", classmethod(without_default_device(own.__func__)))  # noqa: B010  # mypy: assigns to a method

    @classmethod
    def is_supported(cls, platform: Platform) -> Verdict:
        """Whether it runs on a machine. Asked about machines that are not here, so it imports no provider's package.

        Args:
            platform: Vendor, architecture, CPU features and installed packages.

        Returns:
            Yes, or a refusal with its reason and what the machine would need, for example "cuda:sm90" or a pip command.
        """
        return YES

    @classmethod
    def can_implement(cls, spec: LinearSpec) -> Verdict:
        """Whether it computes a layer as its spec says, at every M.

        Args:
            spec: Shape and scheme of the layer; `act_dtype` is one of `act_dtypes`, `input_multiplier` is False.

        Returns:
            Yes, or a refusal with its reason and the nearest fix: a shape, dtype or scheme that it would take.
        """
        raise NotImplementedError

    @classmethod
    def pack(cls, weight: QuantizedWeight) -> Packed:
        """Repack a canonical weight into the kernel's layout. Pure: the weight is neither changed nor kept.

        Args:
            weight: [N, K], of a spec that `can_implement` accepts, on the device that the layer runs on.

        Returns:
            New tensors by name, on the weight's device, in the order in which `apply` gets them. What a layer lacks is an empty
            tensor. The bias is not among them.

        Raises:
            InputError: Where values of the weight, or the installed version of a package, rule the kernel out.
            MemoryError: Where there is no memory for the packed tensors; torch.OutOfMemoryError on a GPU.
        """
        raise NotImplementedError

    @classmethod
    def apply(cls, x: Tensor, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """Run the layer.

        Args:
            x: [M, K], contiguous, in spec.act_dtype; M may be 0.
            packed: The tensors of `pack`, in its order.
            bias: [N] in spec.act_dtype, or None.
            spec: The spec of the packed weight.

        Returns:
            y [M, N] in spec.act_dtype, contiguous.
        """
        raise NotImplementedError

    @classmethod
    def apply_quantized(
        cls, codes: Tensor, scales: Tensor, zero: Tensor | None, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor:
        """Run the layer on x = scales * (codes - zero), quantized before the call, with the bits of `apply` of the same codes.

        Args:
            codes: [M, K], contiguous, float8_e4m3fn or int8 as spec.act says; M is at least 1.
            scales: float32, contiguous: [M] per token, [1] per tensor, [M, ceil(K / group_size)] per group.
            zero: Zero points int32 in the scales' shape; None for a symmetric scheme, or where they are 0.
            packed: The tensors of `pack`, in its order. A static scheme's own scale among them is not used.
            bias: [N] in spec.act_dtype, or None.
            spec: The spec of the packed weight.

        Returns:
            y [M, N] in spec.act_dtype, contiguous.
        """
        raise NotImplementedError

    @classmethod
    def unpack(cls, packed: Sequence[Tensor], spec: LinearSpec) -> Tensor:
        """W as the kernel multiplies it, for gradients with respect to x. By default it is read with products of unit rows, which
        takes the time of a call of M = K.

        Args:
            packed: The tensors of `pack`, in its order.
            spec: The spec of the packed weight, without bias.

        Returns:
            [N, K] in spec.act_dtype, columns in the order of x.

        Raises:
            InputError: Where unit rows do not survive the scheme's activation quantization.
        """
        return unit_row_products(cls, packed, spec)

    @classmethod
    def fuses_experts(cls, spec: LinearSpec, platform: Platform) -> bool:
        """Whether it runs all experts of a mixture-of-experts layer in one call, where such a layer is one of theirs.

        Kernels that do rank before those whose experts run one after the other, on a GPU with a synchronization of the host.

        Args:
            spec: Of one expert's projection, one that `can_implement` accepts.
            platform: A machine that `is_supported` accepts.

        Returns:
            By default whether the kernel has an `apply_experts` of its own.
        """
        return cls._has_apply_experts()

    @classmethod
    def can_experts(cls, up: LinearSpec, down: LinearSpec, gate: ExpertGate) -> bool:
        """Whether it has an `apply_experts` of its own, the projections fit together, and the activation between is known.

        up, down: specs that `can_implement` accepts.
        """
        fits = up.n == (2 if gate.gated else 1) * down.k and up.act_dtype == down.act_dtype
        return fits and gate.activation in ACTIVATIONS and cls._has_apply_experts()

    @classmethod
    def _has_apply_experts(cls) -> bool:
        return cls.apply_experts.__func__ is not Kernel.apply_experts.__func__  # type: ignore[attr-defined]

    @classmethod
    def apply_experts(
        cls, x: Tensor, index: Tensor, weights: Tensor, up: Sequence[Tensor], up_bias: Tensor | None, down: Sequence[Tensor],
        down_bias: Tensor | None, up_spec: LinearSpec, down_spec: LinearSpec, gate: ExpertGate,
    ) -> Tensor:  # fmt: skip
        """Run all experts of a mixture-of-experts layer: y[t] = sum over j of weights[t, j] * down(gate(up(x[t]))) of expert
        index[t, j].

        Args:
            x: [T, K], contiguous, in up_spec.act_dtype; T is at least 1.
            index: [T, k], int64 or int32, any strides. E stands for no expert. Other numbers outside 0..E - 1 are an InputError
                where they are known without synchronizing with a GPU, else they stand for no expert.
            weights: [T, k], any floating dtype and strides.
            up, down: The tensors of `pack` in its order, each stacked: [E, ...] with contiguous experts that start at multiples
                of 256 bytes.
            up_bias, down_bias: [E, N] in act_dtype, or None.
            up_spec, down_spec: The spec of one expert's layer.
            gate: What is computed between them, float32 or rounded to act_dtype; its result is rounded to act_dtype.

        Returns:
            y [T, N] in act_dtype: each expert's result rounded to act_dtype or not, weighted and added in float32 in the order of
            j. The same bits for a token whatever the other tokens are, where the kernel is `batch_invariant`.
        """
        raise NotImplementedError

    @classmethod
    def direct(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> tuple[Any, tuple[Any, ...]] | None:
        """A torch operator of the kernel's own that a layer calls instead of Bitline's, also when it is traced or compiled.

        Args:
            packed: The tensors of `pack`, in its order.
            bias: [N] in spec.act_dtype, or None.
            spec: The spec of the packed weight.

        Returns:
            (op, arguments), called as op(x, *arguments) with x [..., K] of any strides for y [..., N]; None for `apply`.
        """
        return None

    @classmethod
    def eager(cls, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> Callable[[Tensor], Tensor | None] | None:
        """A function for calls that are not traced, compiled or hooked, made once per layer; it may keep launch arguments.

        Args:
            packed: The tensors of `pack`, in its order.
            bias: [N] in spec.act_dtype, or None.
            spec: The spec of the packed weight.

        Returns:
            A function from any x, unchecked, to y [..., N] in spec.act_dtype, or to None where `apply` is to be called. None
            where the kernel has no such function.
        """
        return None

    @classmethod
    def cost(cls, spec: LinearSpec, platform: Platform, m: int) -> float:
        """Estimated time of one call, usually from a roofline.

        Args:
            spec: A layer that `can_implement` accepts.
            platform: A machine that `is_supported` accepts.
            m: M, at least 1.

        Returns:
            Seconds.
        """
        raise NotImplementedError

    @classmethod
    def cost_basis(cls, platform: Platform) -> str:
        """ "measured" where `cost` was fitted to times measured on such a machine (see `measured`), else "modelled"."""
        return "measured" if {platform.arch, *platform.features} & set(cls.measured) else "modelled"

    @classmethod
    def packed_bytes(cls, spec: LinearSpec) -> int:
        """Bytes of the packed tensors; an estimate, as `cost` assumes them."""
        return spec.weight_bytes()


def experts_proven(kernel: type[Kernel], platform: Platform) -> bool:
    """Whether a kernel's `apply_experts` has run on such a platform; elsewhere its experts run one after the other."""
    return platform.vendor == "cpu" or not kernel.experts_unproven


def unit_row_products(kernel: type[Kernel], packed: Sequence[Tensor], spec: LinearSpec) -> Tensor:
    """W [N, K] in spec.act_dtype: row k of the unit matrix gives column k. See `Kernel.unpack`."""
    device, act = packed[0].device, spec.act
    w = torch.empty(spec.n, spec.k, dtype=spec.act_dtype, device=device)
    one = torch.ones((), device=device)  # what is left of a 1 in x
    if act is not None and not kernel.takes_quantized_input and (not act.dynamic or act.scale == "e4m3"):
        raise InputError(f"{kernel.__name__} has no gradient of a layer with such quantized activations", found=spec.scheme,
                         expected="dynamic float or E8M0 scales", fix='kernel="ReferenceLinearKernel"')  # fmt: skip
    if act is not None and not kernel.takes_quantized_input:
        one = fake_quantize(torch.eye(1, spec.k, device=device), act, None, None)[0, 0]
    for start in range(0, spec.k, _UNIT_ROWS):
        rows = min(_UNIT_ROWS, spec.k - start)
        x = torch.zeros(rows, spec.k, dtype=spec.act_dtype, device=device)
        x.diagonal(start).fill_(1.0)
        if act is not None and kernel.takes_quantized_input:
            shape = {"token": (rows,), "tensor": (1,), "group": (rows, -(-spec.k // max(act.group_size, 1)))}[act.granularity]
            codes = x.to(torch.int8 if act.dtype.kind == "int" else torch.float8_e4m3fn)
            y = kernel.apply_quantized(codes, torch.ones(shape, device=device), None, packed, None, spec)
        else:
            y = kernel.apply(x, packed, None, spec)
        w[:, start : start + rows] = (y.float() / one).t()
    return w


_UNIT_ROWS = 256  # of a call


def matmul_rate(spec: LinearSpec, platform: Platform) -> float:
    """FLOP/s of torch's matmul in the layer's input dtype; a multiply-add counts as two."""
    return platform.rates.of("fp32" if spec.act_dtype == torch.float32 else "bf16")


def roofline(spec: LinearSpec, platform: Platform, m: int, *, weight_bytes: float, rate: float) -> float:
    """Estimated time of one GEMM: the larger of bytes over bandwidth and FLOPs over `rate`, plus one launch.

    Args:
        spec: The layer; x [M, K] is read and y [M, N] written in its act_dtype.
        platform: The machine whose bandwidth and launch time count.
        m: M.
        weight_bytes: Bytes of the weight that a call reads.
        rate: FLOP/s of the compute type; a multiply-add counts as two.

    Returns:
        Seconds.
    """
    io = weight_bytes + m * (spec.n + spec.k) * spec.act_dtype.itemsize
    return max(io / platform.rates.bandwidth, 2.0 * m * spec.n * spec.k / rate) + platform.rates.launch
