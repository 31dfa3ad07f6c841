"""One module of a compressed-tensors checkpoint: its tensors, checked against its scheme."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitline.errors import CheckpointError
from bitline.formats.base import TensorInfo, TensorSource
from bitline.formats.common.module_tensors import ModuleTensors
from bitline.formats.common.scales import FLOATS, SCALAR_SHAPES, grid_of, stored_shapes
from bitline.formats.compressed_tensors.config import QuantizationScheme, SchemeByModule
from bitline.types import LinearSpec, ScalarType

WeightFields = dict[str, Tensor | None]  # of a QuantizedWeight, all but the bias
Reading = tuple[str, LinearSpec, Callable[[], WeightFields]]  # the format's name, the spec, and what reads the fields


class QuantizedModule(ModuleTensors):
    """A module with its scheme from the config."""

    def __init__(self, source: TensorSource, name: str, codes: str, scheme: QuantizationScheme, schemes: SchemeByModule) -> None:
        super().__init__(source, name, codes)
        self.scheme, self.schemes = scheme, schemes

    def leave_unused_scales(self) -> None:
        """What is left over from another scheme or an earlier step: scales of activations that are not quantized or scaled
        dynamically, zero points of what is symmetric, a shape that the codes have anyway.

        Zero points that the config does not mention must be 0, and an order of columns must be none.
        """
        self.leave_unused("input_scale", "input_global_scale")
        act, weights = self.scheme.act, self.scheme.weights
        static = act is not None and not act.dynamic
        if not static or (
            act is not None and act.symmetric and (self.scheme.act_symmetry_stated or self._is_zero("input_zero_point"))
        ):
            self.leave_unused("input_zero_point")
        if weights.is_float and (weights.symmetric is True or self._is_zero("weight_zero_point")):
            self.leave_unused("weight_zero_point")

    def _is_zero(self, suffix: str) -> bool:
        """Whether zero points are 0; an error where some are not."""
        info = self.find(suffix)
        if info is not None and bool(self.read(suffix).float().any()):
            raise self.unstated_zeros(info)
        return True

    def unstated_zeros(self, info: TensorInfo) -> CheckpointError:
        """The error for zero points under a config without `symmetric`."""
        return self.error(
            info, "zero points that the config does not account for",
            f"some that are not 0, and no symmetric in {self.scheme.name}", "zeros, as without it the scheme is symmetric",
            'add "symmetric": false to the config group if it is asymmetric, "symmetric": true if it is not',
        )  # fmt: skip

    def scale_block(self, n: int, k: int) -> tuple[int, int]:
        """The scale block, from the config, checked against the shape of weight_scale."""
        info, args = self.source.tensors[f"{self.name}.weight_scale"], self.scheme.weights
        strategy, block = args.effective_strategy, args.scale_block(n, k)
        if self.scheme.infer_sizes:
            strategy, block = self._inferred_block(n, k, strategy, block)
        if block is None:
            raise self.error(
                info, "weights are not quantized this way", f"strategy {strategy}", "tensor, channel, group or block"
            )
        grid = grid_of(n, k, block)
        if info.shape not in stored_shapes(grid, n):
            raise self.scale_shape_error(info, n, k, f"{list(grid)} (one per {strategy} {block})")
        return block

    def _inferred_block(self, n: int, k: int, strategy: str, block: tuple[int, int] | None) -> tuple[str, tuple[int, int] | None]:
        """(strategy, scale block) by the shape of weight_scale, for a config whose sizes are not reliable."""
        info = self.source.tensors[f"{self.name}.weight_scale"]
        shape = info.shape
        if shape in SCALAR_SHAPES:
            return "tensor", (n, k)
        if strategy != "block" and (len(shape) == 1 or shape[-1] == 1):
            return "channel", (1, k)
        if strategy not in ("group", "channel") or len(shape) != 2 or shape[1] <= 1:
            return strategy, block
        named = self.scheme.weights.row_block
        if named is not None and -(-k // named[1]) == shape[1]:
            return "group", named
        if k % shape[1]:  # several group sizes give as many groups
            raise self.scale_shape_error(info, n, k, f"groups that divide {k} columns")
        return "group", (1, k // shape[1])

    def spec(self, n: int, k: int, weight: ScalarType, block: tuple[int, int], **fields: object) -> LinearSpec:
        """The spec, with the scheme's activation quantization, whose static scales must exist."""
        act = self.scheme.act
        if act is not None and not act.dynamic:
            self.scalar("input_scale", FLOATS)
            if not act.symmetric:
                self.scalar("input_zero_point", (torch.int8, torch.int32))
        elif act is not None and act.scale == "e4m3":
            self.scalar("input_global_scale", (torch.float32,))
        scale_dtype = self.source.tensors[f"{self.name}.weight_scale"].dtype
        spec = LinearSpec(n, k, weight, block, scale_dtype=scale_dtype, act=act, bias=self.has_bias(n))
        return spec.replace(**fields)

    def fields(self, spec: LinearSpec, codes: Tensor, scale: Tensor | None = None, **others: Tensor | None) -> WeightFields:
        """The fields of the weight: these, and the module's own scales of the weight and its activations."""
        act = self.scheme.act
        scale = self.read("weight_scale") if scale is None else scale
        if scale.dim() != 2:
            scale = scale.reshape(spec.grid)
        if act is not None and (not act.dynamic or act.scale == "e4m3"):
            others["input_scale"] = self.read("input_scale" if not act.dynamic else "input_global_scale").reshape(())
            if not act.dynamic and not act.symmetric:
                others["input_zero"] = self.read("input_zero_point").reshape(())
        return {"codes": codes, "scale": scale, **others}
