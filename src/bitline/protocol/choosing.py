"""The field's choosing functions, each a few lines over the one `choose`."""

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
from bitline.protocol.foreign_kernel import wrap
from bitline.protocol.layer_kernel import FAMILIES, LinearKernel, layer_kernel, platform_of
from bitline.select import Choice, Policy, choose

log = logging.getLogger("bitline")
_TITLES = {"mp": "WNA16", "int8": "ScaledMM", "fp8": "ScaledMM", "fp8_block": "block-scaled FP8"}


def choose_linear_kernel(config: configs.Config, compute_capability: Any = None, policy: Policy | str | None = None) -> Choice:
    """The whole ranking for a config. compute_capability: 90 for sm90, a Platform or its text; by default this machine.

    Raises ValueError with a line for each kernel tried.
    """
    return _choose(config, compute_capability, Policy.of(policy), None)


def choose_mp_linear_kernel(
    config: configs.MPLinearLayerConfig, compute_capability: Any = None, policy: Policy | str | None = None
) -> Any:
    """Class of the best kernel for integer weights; else the ValueError of `choose_linear_kernel`."""
    return layer_kernel(_choose(config, compute_capability, Policy.of(policy), None).kernel, "mp")


def choose_scaled_mm_linear_kernel(
    config: configs.Int8ScaledMMLinearLayerConfig | configs.FP8ScaledMMLinearLayerConfig,
    possible_kernels: Mapping[Any, Iterable[Any]] | Iterable[Any] | None = None,
    compute_capability: Any = None,
    force_kernel: Any = None,
    policy: Policy | str | None = None,
) -> Any:
    """Class of the best kernel among `possible_kernels`: classes or names, also by platform; None is every one.

    force_kernel: a class or name to take if it can; if it cannot, a warning says why and the others are ranked.
    """
    place = platform_of(compute_capability)
    if isinstance(possible_kernels, Mapping):
        listed = {_vendor(platform): kernels for platform, kernels in possible_kernels.items()}
        possible_kernels = listed.get(place.vendor, ())
    names = None if possible_kernels is None else {registry.kernel_by_name(_name(k)).__name__ for k in possible_kernels}
    policy = Policy.of(policy)
    if force_kernel is not None:
        policy = replace(policy, kernel=registry.kernel_by_name(_name(force_kernel)).__name__, strict=False)
    return layer_kernel(_choose(config, place, policy, names).kernel, configs.family_of(config))


def is_supported_and_can_implement_kernel(
    kernel: Any, config: configs.Config, compute_capability: Any = None, policy: Policy | str | None = None
) -> tuple[bool, str]:
    """(ok, why not), asked in this order: is it disabled, does it run on the machine, can it do the layer.

    kernel: a class, or a registered kernel's name.
    """
    name = _name(kernel)
    if name in Policy.of(policy).disabled:
        return False, f"{name} is disabled by the policy or BITLINE_DISABLED_KERNELS"
    kernel = registry.kernel_by_name(kernel) if isinstance(kernel, str) else kernel
    bound = kernel if issubclass(kernel, LinearKernel) else layer_kernel(kernel, configs.family_of(config))
    for ask, about in ((bound.is_supported, compute_capability), (bound.can_implement, config)):
        ok, reason = ask(about)
        if not ok:
            return False, f"{name}: {reason}"
    return True, ""


def init_linear_kernel(
    config: configs.Config, policy: Policy | str | None = None, module_name: str = "", **names: str | None
) -> Any:
    """An instance of the best kernel for a config. One log line for each distinct choice; emulation is a warning.

    names: see LinearKernel. Where a layer turns out to be another than its config said (fused layers with scales of their own,
    a shape that the config lacks) and the kernel cannot do it, processing its weights takes the next best.
    """
    policy = Policy.of(policy)
    return _make(_choose(config, None, policy, None), config, policy, module_name, names)


def _make(choice: Choice, config: configs.Config, policy: Policy, module_name: str, names: Mapping[str, Any]) -> Any:
    family = configs.family_of(config)
    _announce(choice, family)
    if module_name:
        log.debug("%s runs on %s", module_name, choice.best.name)
    made = layer_kernel(choice.kernel, family)(config, **names)
    made.policy = policy
    return made


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
    """An instance for an FP8 layer of shape (N, K), scales per tensor, row or block."""
    config = configs.FP8ScaledMMLinearLayerConfig(weight_quant_key, activation_quant_key, weight_shape, input_dtype, out_dtype)
    policy = Policy.of(policy)
    if force_kernel is not None:
        policy = replace(policy, kernel=registry.kernel_by_name(_name(force_kernel)).__name__, strict=False)
    return init_linear_kernel(config, policy, module_name)


def init_int8_linear_kernel(
    is_channelwise: bool,
    is_static_input_scheme: bool,
    input_symmetric: bool,
    module_name: str = "",
    weight_shape: tuple[int, int] | None = None,
    input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:
    """An instance for an int8 layer with an int8 input."""
    config = configs.Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme, is_channelwise, input_symmetric, weight_shape, input_dtype
    )
    return init_linear_kernel(config, policy, module_name)


def init_nvfp4_linear_kernel(
    use_a16: bool = False, weight_shape: tuple[int, int] | None = None, input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """An instance for an NVFP4 layer. use_a16: weight-only."""
    return init_linear_kernel(configs.NvFp4LinearLayerConfig(weight_shape, input_dtype, use_a16), policy)


def init_mxfp4_linear_kernel(
    use_a16: bool = False, weight_shape: tuple[int, int] | None = None, input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """An instance for an MXFP4 layer. use_a16: weight-only."""
    return init_linear_kernel(configs.MxFp4LinearLayerConfig(weight_shape, input_dtype, use_a16), policy)


def init_mxfp8_linear_kernel(
    use_a16: bool = False, weight_shape: tuple[int, int] | None = None, input_dtype: torch.dtype = torch.bfloat16,
    policy: Policy | str | None = None,
) -> Any:  # fmt: skip
    """An instance for an MXFP8 layer. use_a16: weight-only."""
    return init_linear_kernel(configs.Mxfp8LinearLayerConfig(weight_shape, input_dtype, use_a16), policy)


def register_linear_kernel(
    kernel_class: Any, platform: str, kernel_type: str = "mp", priority: int | str = "last", *, replace: bool = False
) -> None:
    """Offer a kernel on a platform: a bitline Kernel, or a class of the field's protocol (a subclass of its family's base).

    kernel_type: mp, int8, fp8, fp8_block, mxfp8, nvfp4 or mxfp4, else a ValueError. priority: for a class of the protocol,
    which has no cost, "first" or "last" of all that can run a layer; a number ties with the best and breaks the tie.
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
    registry.register_kernel(wrap(kernel_class, kernel_type, priority), _vendor(platform),
                             priority if isinstance(priority, int) else None, replace=replace)  # fmt: skip


def _choose(config: configs.Config, compute_capability: Any, policy: Policy, names: Collection[str] | None) -> Choice:
    family = configs.family_of(config)
    ours = lambda e: (names is None or e.name in names) and (not e.kernel.families or family in e.kernel.families)
    entries = tuple(e for e in registry.entries() if ours(e) or e.name == policy.kernel)
    try:
        choice = choose(config.to_spec(), platform_of(compute_capability), policy, kernels=entries)
    except NoKernelError as error:
        title, reasons = _TITLES.get(family, family), "\n".join(error.reasons) or str(error)
        raise ValueError(f"Failed to find a kernel that can implement the {title} linear layer. Reasons:\n{reasons}") from error
    if choice.note:
        _announce_once(choice.note, choice.best.name)
    return choice


def _name(kernel: Any) -> str:
    return kernel if isinstance(kernel, str) else str(kernel.__name__)


def _vendor(platform: Any) -> str:
    """`cuda` for "cuda" and for a member CUDA of an enumeration of platforms."""
    return str(getattr(platform, "name", platform)).lower()


def _announce(choice: Choice, family: str) -> None:
    asked = choice.best.name == choice.policy.kernel or choice.best.backend == choice.policy.backend
    emulated = choice.kernel.emulates and not asked
    reasons = tuple(f"{c.name}: {c.verdict.reason}" for c in choice.candidates if not c.verdict) if emulated else ()
    _announce_once(family, choice.best.name, emulated, reasons)


@functools.cache
def _announce_once(what: str, name: str, emulation: bool | None = None, reasons: tuple[str, ...] = ()) -> None:
    if emulation is None:
        log.warning("%s: %s is used instead", what, name)
    elif emulation:
        log.warning("%s layers are emulated by %s, because:\n  %s", what, name, "\n  ".join(reasons))
    else:
        log.info("%s layers run on %s", what, name)
