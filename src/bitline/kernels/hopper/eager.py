"""Eager-mode calls of one layer: the arguments of a launch are kept per shape of x, so that a call only fills in addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitline.kernels.hopper import launch, runtime
from bitline.kernels.hopper.plans import SmallMPlan, WgmmaPlan
from bitline.kernels.hopper.workspace import workspace
from bitline.types import LinearSpec


class _Launch(NamedTuple):
    """A launch for one shape of x.

    launch, packs_args, head: see `runtime.Binary`. plan: where tensor maps or a workspace are needed, else None. args_after_x,
    args_after_y: the kernel's arguments between x and y, and those after y and the workspace.
    """

    launch: Any
    packs_args: bool
    num_ctas: int
    head: tuple[Any, ...]
    y_shape: tuple[int, ...]
    y_strides: tuple[int, ...]
    plan: SmallMPlan | WgmmaPlan | None
    args_after_x: tuple[Any, ...]
    args_after_y: tuple[Any, ...]


class EagerLinear:
    """x [..., K] to y [..., N], or None where `launch.run` must be called.

    That is: a shape not run before, an x that must be copied first, another dtype or device, a layer that needs several launches,
    and a weight whose storage has moved, since entries hold its addresses. The weight's tensors are kept alive here.
    """

    def __init__(self, packed: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec) -> None:
        self.layer = packed, bias, spec
        self.weight, self.dtype, self.device = packed[0], spec.act_dtype, packed[0].get_device()
        self.weight_address = packed[0].data_ptr()
        self.empty = runtime.fast_empty()
        self.launches: dict[torch.Size, _Launch | None] = {}  # None: `launch.run`

    def __reduce__(self) -> Any:
        return EagerLinear, self.layer  # a copy has its own tensors

    def __call__(self, x: Tensor) -> Tensor | None:
        """See the class."""
        entry = self.launches.get(x.shape)
        if entry is None:
            if x.shape not in self.launches:
                self._record(x)
            return None
        x_address = x.data_ptr()
        if (
            x_address & 15 or x.dtype is not self.dtype or x.get_device() != self.device or not x.is_contiguous()
            or self.weight.data_ptr() != self.weight_address
        ):  # fmt: skip
            return None
        run, packs_args, num_ctas, head, y_shape, y_strides, plan, after_x, after_y = entry
        y: Tensor = self.empty(y_shape, y_strides, self.dtype)
        stream = runtime.raw_stream(self.device)
        if plan is None:
            args = (x_address, *after_x, y.data_ptr(), *after_y)
        else:
            partials, flags = workspace(x, plan.workspace_size, stream) if plan.workspace_size else (0, 0)
            args = (*plan.x_args(x_address), *after_x, *plan.y_args(y.data_ptr()), partials, flags, *after_y)
        if packs_args:
            run(num_ctas, 1, 1, stream, *head, args)
        else:
            run(num_ctas, 1, 1, stream, *head, *args)
        return y

    def _record(self, x: Tensor) -> None:
        """Make the entry of a shape, once its kernel is compiled."""
        _packed, bias, spec = self.layer
        if x.dim() == 0 or x.shape[-1] != spec.k or x.dtype is not self.dtype or x.numel() == 0 or x.get_device() != self.device:
            return
        plan = launch.plan_of(spec, x.numel() // spec.k, bias is not None, self.device)
        if plan.find_binary(self.device) is None:
            return
        if len(self.launches) >= 256:
            self.launches.clear()
        self.launches[x.shape] = self._launch(x, plan)

    def _launch(self, x: Tensor, plan: SmallMPlan | WgmmaPlan) -> _Launch | None:
        """The entry, or None where a call takes more than one launch."""
        (weight, scale, zero, alpha, perm), bias, spec = self.layer
        m, n, k = x.numel() // spec.k, spec.n, spec.k
        bias_address = 0 if bias is None else bias.data_ptr()
        if perm.numel() or k % 8 or (k % 64 and plan.pads_k) or bias_address % 16:
            return None
        after_x: tuple[Any, ...]
        after_y: tuple[Any, ...]
        keep: SmallMPlan | WgmmaPlan | None
        if isinstance(plan, SmallMPlan):
            after_x = (weight.data_ptr(), scale.data_ptr(), zero.data_ptr(), bias_address, alpha.data_ptr())
            after_y = (*(() if plan.workspace_size else plan.no_workspace), m, n, k, *plan.tail)
            keep = plan if plan.workspace_size else None
        elif n % 8:
            return None
        else:
            after_x, after_y = plan.weight_args(weight, scale, zero), (bias_address, alpha.data_ptr(), *plan.tail)
            keep = plan
        y_shape = (*x.shape[:-1], n)
        y_strides = torch.empty(y_shape, device="meta").stride()
        binary = plan.binary
        assert binary is not None
        return _Launch(
            binary.launch, binary.packs_args, plan.num_ctas, binary.head, y_shape, y_strides, keep, after_x, after_y
        )  # fmt: skip
