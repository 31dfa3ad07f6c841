"""vLLM's kernel selection functions over `bitline.choose`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from bitline.errors import NoKernelError
from bitline.kernels import registry
from bitline.kernels.base import Kernel
from bitline.protocol import config as configs
from bitline.protocol.adapter import protocol_class
from bitline.protocol.foreign_kernel import wrap_foreign_kernel
from bitline.protocol.layer_kernel import FAMILIES, LinearKernel, platform_of
from bitline.select import Choice, Policy, choose, resolve_names

log = logging.getLogger("bitline")
_FAMILY_TITLES = {"mp": "WNA16", "int8": "ScaledMM", "fp8": "ScaledMM", "fp8_block": "block-scaled FP8"}


def choose_linear_kernel(config: configs.Config, compute_capability: Any = None, policy: Policy | str | None = None) -> Choice:
    """Rank all kernels of a layer's family.

    Args:
        config: The layer's config.
        compute_capability: NVIDIA compute capability (90 for sm90), a Platform or its text; this machine by default.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The ranking, chosen kernel first.

    Raises:
        ValueError: Where no kernel can run the layer, with one line per kernel that was tried.
    """
    return _choose(config, compute_capability, Policy.of(policy), None)


def choose_mp_linear_kernel(
    config: configs.MPLinearLayerConfig, compute_capability: Any = None, policy: Policy | str | None = None
) -> Any:
    """Choose the kernel of a mixed-precision layer.

    Args:
        config: The layer's config.
        compute_capability: As for `choose_linear_kernel`.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel's class.

    Raises:
        ValueError: As `choose_linear_kernel`.
    """
    return protocol_class(_choose(config, compute_capability, Policy.of(policy), None).kernel, "mp")


def choose_scaled_mm_linear_kernel(
    config: configs.Int8ScaledMMLinearLayerConfig | configs.FP8ScaledMMLinearLayerConfig,
    possible_kernels: Mapping[Any, Iterable[Any]] | Iterable[Any] | None = None,
    compute_capability: Any = None,
    force_kernel: Any = None,
    policy: Policy | str | None = None,
) -> Any:
    """Choose the kernel of an int8 or FP8 layer.

    Args:
        config: The layer's config.
        possible_kernels: The kernels to choose among, classes or names, or such a list per platform; all by default.
        compute_capability: As for `choose_linear_kernel`.
        force_kernel: A class or name to use if it can run the layer; if not, a warning has the reason and the others are ranked.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel's class.

    Raises:
        ValueError: As `choose_linear_kernel`.
    """
    platform = platform_of(compute_capability)
    if isinstance(possible_kernels, Mapping):
        by_vendor = {_vendor(key): kernels for key, kernels in possible_kernels.items()}
        possible_kernels = by_vendor.get(platform.vendor, ())
    names = None if possible_kernels is None else {_registered_name(k) for k in possible_kernels}
    policy = _forcing(Policy.of(policy), force_kernel)
    return protocol_class(_choose(config, platform, policy, names).kernel, configs.family_of(config))


def is_supported_and_can_implement_kernel(
    kernel: Any, config: configs.Config, compute_capability: Any = None, policy: Policy | str | None = None
) -> tuple[bool, str]:
    """Whether a kernel is enabled, runs on the machine and implements the layer, checked in this order.

    Args:
        kernel: A class, or the name of a registered kernel.
        config: The layer's config.
        compute_capability: As for `choose_linear_kernel`.
        policy: Any form that `Policy.of` accepts.

    Returns:
        (ok, reason).
    """
    name = _class_name(kernel)
    if name in resolve_names(Policy.of(policy)).disabled:
        return False, f"{name} is disabled by the policy or BITLINE_DISABLED_KERNELS"
    kernel = registry.kernel_by_name(kernel) if isinstance(kernel, str) else kernel
    cls = kernel if issubclass(kernel, LinearKernel) else protocol_class(kernel, configs.family_of(config))
    for question, argument in ((cls.is_supported, compute_capability), (cls.can_implement, config)):
        ok, reason = question(argument)
        if not ok:
            return False, f"{name}: {reason}"
    return True, ""


def init_linear_kernel(
    config: configs.Config, policy: Policy | str | None = None, module_name: str = "", **names: str | None
) -> Any:
    """Choose a kernel and instantiate it. Logs each distinct choice once, landing on emulation as a warning.

    A layer can differ from its config (fused layers with their own scales, a shape that the config lacks). Where the kernel then
    cannot run it, `process_weights_after_loading` takes the next best one.

    Args:
        config: The layer's config.
        policy: Any form that `Policy.of` accepts.
        module_name: The layer's name, for the debug log.
        **names: Names of the layer's parameters, see LinearKernel.

    Returns:
        The kernel instance.

    Raises:
        ValueError: As `choose_linear_kernel`.
    """
    policy = Policy.of(policy)
    choice, family = _choose(config, None, policy, None), configs.family_of(config)
    _log_choice(choice, family)
    if module_name:
        log.debug("%s runs on %s", module_name, choice.best.name)
    kernel = protocol_class(choice.kernel, family)(config, **names)
    kernel.policy = policy
    return kernel


def init_fp8_linear_kernel(
    activation_quant_key: configs.QuantKey | None,
    weight_quant_key: configs.QuantKey,
    weight_shape: tuple[int, int],
    input_dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    force_kernel: Any = None,
    module_name: str = "",
    policy: Policy | str | None = None,
) -> Any:
    """Choose and instantiate the kernel of an FP8 layer.

    Args:
        activation_quant_key: Quantization of the activations; None for a weight-only layer.
        weight_quant_key: Quantization of the weight: per tensor, channel, group or block.
        weight_shape: (N, K).
        input_dtype: dtype of the input before quantization.
        out_dtype: Output dtype; `input_dtype` by default.
        force_kernel: As for `choose_scaled_mm_linear_kernel`.
        module_name: The layer's name, for the debug log.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel instance.
    """
    config = configs.FP8ScaledMMLinearLayerConfig(weight_quant_key, activation_quant_key, weight_shape, input_dtype, out_dtype)
    return init_linear_kernel(config, _forcing(Policy.of(policy), force_kernel), module_name)


def init_int8_linear_kernel(
    is_channelwise: bool,
    is_static_input_scheme: bool,
    input_symmetric: bool,
    module_name: str = "",
    weight_shape: tuple[int, int] | None = None,
    input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:
    """Choose and instantiate the kernel of an int8 W8A8 layer.

    Args:
        is_channelwise: One weight scale per channel; if not, per tensor.
        is_static_input_scheme: Static per-tensor activation scales; if not, dynamic per-token ones.
        input_symmetric: False where activations have a zero point.
        module_name: The layer's name, for the debug log.
        weight_shape: (N, K), if known.
        input_dtype: dtype of the input before quantization.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel instance.
    """
    config = configs.Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme, is_channelwise, input_symmetric, weight_shape, input_dtype
    )
    return init_linear_kernel(config, policy, module_name)


def init_nvfp4_linear_kernel(
    use_a16: bool = False, weight_shape: tuple[int, int] | None = None, input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """Choose and instantiate the kernel of an NVFP4 layer.

    Args:
        use_a16: Weight-only: activations stay in 16 bits.
        weight_shape: (N, K), if known.
        input_dtype: dtype of the input before quantization.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel instance.
    """
    return init_linear_kernel(configs.NvFp4LinearLayerConfig(weight_shape, input_dtype, use_a16), policy)


def init_mxfp4_linear_kernel(
    use_a16: bool = False, weight_shape: tuple[int, int] | None = None, input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """Choose and instantiate the kernel of an MXFP4 layer.

    Args:
        use_a16: Weight-only: activations stay in 16 bits.
        weight_shape: (N, K), if known.
        input_dtype: dtype of the input before quantization.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel instance.
    """
    return init_linear_kernel(configs.MxFp4LinearLayerConfig(weight_shape, input_dtype, use_a16), policy)


def init_mxfp8_linear_kernel(
    use_a16: bool = False, weight_shape: tuple[int, int] | None = None, input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """Choose and instantiate the kernel of an MXFP8 layer.

    Args:
        use_a16: Weight-only: activations stay in 16 bits.
        weight_shape: (N, K), if known.
        input_dtype: dtype of the input before quantization.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel instance.
    """
    return init_linear_kernel(configs.Mxfp8LinearLayerConfig(weight_shape, input_dtype, use_a16), policy)


def init_mxfp6_linear_kernel(
    weight_quant_key: configs.QuantKey, activation_quant_key: configs.QuantKey | None = None,
    weight_shape: tuple[int, int] | None = None, input_dtype: torch.dtype = torch.bfloat16, policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """Choose and instantiate the kernel of an MXFP6 layer.

    Args:
        weight_quant_key: `kMxfp6E2M3Static` or `kMxfp6E3M2Static`.
        activation_quant_key: Quantization of the activations; None for a weight-only layer.
        weight_shape: (N, K), if known.
        input_dtype: dtype of the input before quantization.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel instance.
    """
    config = configs.MxFp6LinearLayerConfig(weight_quant_key, activation_quant_key, weight_shape, input_dtype)
    return init_linear_kernel(config, policy)


def init_wfp8_a16_linear_kernel(
    weight_quant_key: configs.QuantKey, activation_quant_key: configs.QuantKey | None, weight_shape: tuple[int, int],
    input_dtype: torch.dtype, out_dtype: torch.dtype | None = None, force_kernel: Any = None, module_name: str = "",
    policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """Choose and instantiate the kernel of a layer with FP8 weights and 16-bit activations.

    Args:
        weight_quant_key: Quantization of the weight: per tensor, channel, group or block.
        activation_quant_key: Not used: activations stay in 16 bits.
        weight_shape: (N, K).
        input_dtype: dtype of the input.
        out_dtype: Output dtype; `input_dtype` by default.
        force_kernel: As for `choose_scaled_mm_linear_kernel`.
        module_name: The layer's name, for the debug log.
        policy: Any form that `Policy.of` accepts.

    Returns:
        The kernel instance.
    """
    return init_fp8_linear_kernel(
        None, weight_quant_key, weight_shape, input_dtype, out_dtype, force_kernel, module_name, policy
    )  # fmt: skip


def fp8_scaled_mm_is_batch_invariant(kernel: Any) -> bool:
    """Whether a row's output of an FP8 layer's kernel is independent of the other rows.

    Args:
        kernel: An instance, as `init_fp8_linear_kernel` gives.

    Returns:
        Whether the kernel is batch invariant, and no activation scale spans rows.
    """
    act = kernel.config.activation_quant_key
    spans_rows = act is not None and not act.scale.static and act.scale.group_shape == configs.PER_TENSOR
    return bool(getattr(kernel, "batch_invariant", False)) and not spans_rows


def register_linear_kernel(
    kernel_class: Any, platform: str, kernel_type: str = "mp", priority: int | str = "last", *, replace: bool = False
) -> None:
    """Register a kernel for selection.

    Args:
        kernel_class: A bitline Kernel, or a class of vLLM's protocol (a subclass of its family's base class).
        platform: "cpu", "cuda", "rocm" or "xpu", or a platform enumeration's member of that name.
        kernel_type: The family: mp, int8, fp8, fp8_block, mxfp8, nvfp4, mxfp4 or mxfp6.
        priority: "first" or "last" of all kernels that can run a layer, or a number that breaks ties of cost. A class of the
            protocol has no cost of its own: with a number it ties with the cheapest kernel.
        replace: Whether to replace a registered kernel of the same name.

    Raises:
        ValueError: For an unknown kernel_type or priority, another type of class, or a name that is taken.
    """
    if kernel_type not in FAMILIES:
        raise ValueError(f"unknown kernel type {kernel_type!r}, expected one of {', '.join(FAMILIES)}")
    if not isinstance(priority, int) and priority not in ("first", "last"):
        raise ValueError(f"unknown priority {priority!r}, expected 'first', 'last' or a number")
    if isinstance(kernel_class, type) and issubclass(kernel_class, Kernel):
        number = priority if isinstance(priority, int) else {"first": 1 << 20, "last": -(1 << 20)}[priority]
        registry.register_kernel(kernel_class, _vendor(platform), number, replace=replace)
        return
    if not (isinstance(kernel_class, type) and issubclass(kernel_class, LinearKernel)):
        raise ValueError(f"{kernel_class!r} is neither a Kernel nor a subclass of {FAMILIES[kernel_type].__name__}")
    registry.register_kernel(wrap_foreign_kernel(kernel_class, kernel_type, priority), _vendor(platform),
                             priority if isinstance(priority, int) else None, replace=replace)  # fmt: skip


def _choose(config: configs.Config, compute_capability: Any, policy: Policy, names: Collection[str] | None) -> Choice:
    family = configs.family_of(config)
    of_family = lambda e: (names is None or e.name in names) and (not e.kernel.families or family in e.kernel.families)
    entries = tuple(e for e in registry.entries() if of_family(e) or e.name == policy.kernel)
    try:
        choice = choose(config.to_spec(), platform_of(compute_capability), policy, kernels=entries)
    except NoKernelError as error:
        title, reasons = _FAMILY_TITLES.get(family, family), "\n".join(error.reasons) or str(error)
        raise ValueError(f"Failed to find a kernel that can implement the {title} linear layer. Reasons:\n{reasons}") from error
    if choice.note:
        _log_once(choice.note, choice.best.name)
    return choice


def _forcing(policy: Policy, kernel: Any) -> Policy:
    """The policy with a kernel requested that may fall back; unchanged where the kernel is None."""
    return policy if kernel is None else replace(policy, kernel=_registered_name(kernel), strict=False)


def _registered_name(kernel: Any) -> str:
    """The name of a registered kernel, given by class or name. A NoKernelError for any other."""
    return registry.kernel_by_name(_class_name(kernel)).__name__


def _class_name(kernel: Any) -> str:
    return kernel if isinstance(kernel, str) else str(kernel.__name__)


def _vendor(platform: Any) -> str:
    """ "cuda" for that text and for the member CUDA of a platform enumeration."""
    return str(getattr(platform, "name", platform)).lower()


def _log_choice(choice: Choice, family: str) -> None:
    requested = choice.best.name == choice.policy.kernel or choice.best.backend == choice.policy.backend
    emulated = choice.kernel.emulates and not requested
    reasons = tuple(f"{c.name}: {c.verdict.reason}" for c in choice.candidates if not c.verdict) if emulated else ()
    _log_once(family, choice.best.name, emulated, reasons)


@functools.cache
def _log_once(what: str, name: str, emulation: bool | None = None, reasons: tuple[str, ...] = ()) -> None:
    if emulation is None:
        log.warning("%s: %s is used instead", what, name)
    elif emulation:
        log.warning("%s layers are emulated by %s, because:\n  %s", what, name, "\n  ".join(reasons))
    else:
        log.info("%s layers run on %s", what, name)
