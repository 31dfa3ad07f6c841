"""One module of a compressed-tensors checkpoint: its tensors, checked against its scheme."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitline.formats.base import TensorSource
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

    def scale_block(self, n: int, k: int) -> tuple[int, int]:
        """The scale block, from the config, checked against the shape of weight_scale."""
        info, args = self.source.tensors[f"{self.name}.weight_scale"], self.scheme.weights
        strategy, size = args.effective_strategy, args.group_size or 0
        if self.scheme.infer_sizes:
            strategy, size = self._inferred_strategy(n, k)
        blocks = {"tensor": (n, k), "channel": (1, k), "group": (1, size), "tensor_group": (1, size)}
        block = args.block if strategy == "block" else blocks.get(strategy)
        if block is None:
            raise self.error(
                info, "weights are not quantized this way", f"strategy {strategy}", "tensor, channel, group or block"
            )
        grid = grid_of(n, k, block)
        if info.shape not in stored_shapes(grid, n):
            raise self.scale_shape_error(info, n, k, f"{list(grid)} (one per {strategy} {block})")
        return block

    def _inferred_strategy(self, n: int, k: int) -> tuple[str, int]:
        """(strategy, group size) by the shape of weight_scale, for a config whose sizes are not reliable."""
        info, args = self.source.tensors[f"{self.name}.weight_scale"], self.scheme.weights
        shape, strategy, size = info.shape, args.effective_strategy, args.group_size or 0
        if shape in SCALAR_SHAPES:
            strategy = "tensor"
        elif strategy != "block" and (len(shape) == 1 or shape[-1] == 1):
            strategy = "channel"
        if strategy in ("group", "channel") and len(shape) == 2 and shape[1] > 1:
            if size <= 0 or -(-k // size) != shape[1]:
                size = -(-k // shape[1])
                if k % shape[1]:  # several group sizes give as many groups
                    raise self.scale_shape_error(info, n, k, f"groups that divide {k} columns")
            strategy = "group"
        return strategy, size

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
