"""vLLM's kernel protocol: base classes of kernels that repack a layer's parameters once and then run the layer.

An instance belongs to a layer's config; the layer holds the weights. `bitline.protocol.adapter` implements the protocol for every
registered kernel. A third-party class that implements it itself joins the selection through `register_linear_kernel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitline.errors import InputError
from bitline.platform import Platform
from bitline.protocol.config import Config, family_of
from bitline.protocol.layer_parameters import PARAMETER_NAMES, check_roles
from bitline.select import Policy
from bitline.types import Verdict


def platform_of(compute_capability: int | Platform | str | None = None) -> Platform:
    """The platform of an NVIDIA compute capability (90 for sm90) or a platform's text; None: this machine's GPU, or its CPU."""
    if isinstance(compute_capability, Platform):
        return compute_capability
    if isinstance(compute_capability, str):
        return Platform.parse(compute_capability)
    if compute_capability is not None and not torch.version.hip:
        return Platform.parse(f"cuda:sm{compute_capability}") if compute_capability > 0 else Platform.detect("cpu")
    return Platform.detect("cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu")


class LinearKernel(ABC):
    """Base class of the protocol. An instance serves the layers of one config; the weights are in the layer.

    Args:
        config: The layer's config.
        *positional: Names of the layer's parameters in the family's role order, where they are not the usual ones.
        layer_param_names: The same as a list.
        **names: The same by role: w_q_param_name, w_s_param_name, …, or w_q, w_s, ….

    Attributes:
        config: The layer's config.
        policy: The policy under which the kernel was chosen; None for a kernel that was named. A layer that a chosen kernel turns
            out not to implement goes to the next best kernel.

    Raises:
        ValueError: With the reason, where the kernel does not implement the config or does not run on this machine.
    """

    config: Config
    policy: Policy | None = None

    def __init__(
        self, config: Config, *positional: str | None, layer_param_names: Sequence[str] = (), **names: str | None
    ) -> None:
        self.config = config
        roles = PARAMETER_NAMES[family_of(config)]
        listed = (*positional, *layer_param_names)
        if len(listed) > len(roles):
            raise InputError("more names than the layer has parameters", found=", ".join(map(str, listed)),
                             expected=", ".join(roles))  # fmt: skip
        given = dict(zip(roles, listed, strict=False)) | {k.removesuffix("_param_name"): v for k, v in names.items()}
        check_roles(given, family_of(config))
        self.names = {role: name for role, name in given.items() if name is not None}
        for verdict in (type(self).is_supported(), type(self).can_implement(config)):
            ok, reason = verdict
            if not ok:
                raise ValueError(f"{type(self).__name__} cannot run this layer: {reason}")

    @classmethod
    def is_supported(cls, compute_capability: Any = None) -> Any:
        """Whether the kernel runs on a machine; by default what `get_min_capability` implies.

        Args:
            compute_capability: NVIDIA compute capability (90 for sm90); this machine by default.

        Returns:
            (ok, reason).
        """
        platform, minimum = platform_of(compute_capability), cls.get_min_capability()
        if platform.vendor == "cuda" and platform.capability < minimum:
            return Verdict(False, f"needs compute capability {minimum}; this is {platform.capability}", f"cuda:sm{minimum}")
        return Verdict(True)

    @classmethod
    def get_min_capability(cls) -> int:
        """The minimum NVIDIA compute capability; -1 where the kernel does not need a GPU."""
        return -1

    @classmethod
    @abstractmethod
    def can_implement(cls, config: Any) -> Any:
        """Whether the kernel implements a layer.

        Args:
            config: The layer's config.

        Returns:
            (ok, reason).
        """

    @abstractmethod
    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the layer's loaded parameters for `apply_weights`. Idempotent.

        Args:
            layer: The layer, with its parameters loaded.
        """

    @abstractmethod
    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            layer: The processed layer.
            x: [..., K].
            bias: [N], or None.

        Returns:
            [..., N].
        """


class MPLinearKernel(LinearKernel):
    """Base class of mixed-precision kernels: integer weights, 16-bit activations, or W4A8."""


class ScaledMMLinearKernel(LinearKernel):
    """Base class of kernels that multiply 8-bit weights by 8-bit activations."""


class Int8ScaledMMLinearKernel(ScaledMMLinearKernel):
    """Base class of int8 W8A8 kernels."""


class FP8ScaledMMLinearKernel(ScaledMMLinearKernel):
    """Base class of FP8 kernels with scales per tensor, channel or group."""


class Fp8BlockScaledDynamicMMLinearKernel(LinearKernel):
    """Base class of block-scaled FP8 kernels: block scales of weights, group scales of activations."""


class NvFp4LinearKernel(LinearKernel):
    """Base class of NVFP4 kernels."""


class MxFp4LinearKernel(LinearKernel):
    """Base class of MXFP4 kernels."""


class MxFp6LinearKernel(LinearKernel):
    """Base class of MXFP6 kernels."""


class Mxfp8LinearKernel(LinearKernel):
    """Base class of MXFP8 kernels."""


FAMILIES: dict[str, Any] = {  # family -> base class
    "mp": MPLinearKernel, "int8": Int8ScaledMMLinearKernel, "fp8": FP8ScaledMMLinearKernel,
    "fp8_block": Fp8BlockScaledDynamicMMLinearKernel, "nvfp4": NvFp4LinearKernel, "mxfp4": MxFp4LinearKernel,
    "mxfp6": MxFp6LinearKernel, "mxfp8": Mxfp8LinearKernel,
}  # fmt: skip
