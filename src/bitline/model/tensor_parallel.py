"""Which modules of a transformers model are cut over ranks, and where: transformers' plan names them, the cuts are of heads and
channels. `WeightLoader` cuts each weight as it reads it; `ParallelPlan.finish` puts the exchanges between ranks in place.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bitline.errors import CheckpointError, InputError
from bitline.formats.base import LayerRecord
from bitline.model.cut_dense_experts import cut_dense_experts
from bitline.model.cut_weights import cut_weight, in_order, read_cut
from bitline.model.expert_parallel import check_divisible, divide_experts
from bitline.parallel import GatherOutput, RowParallel, SplitInput, TensorParallel, VocabParallelEmbedding
from bitline.parallel.cuts import Cut, ExpertRange, HeadCut, boundaries, head_cut
from bitline.parallel.layers import QuantizedGate, SharedScales
from bitline.types import ActSpec, LinearSpec
from bitline.weight import QuantizedWeight

CHANNEL_ALIGNMENT = 64  # cuts of intermediate channels are at multiples of this and of the scale groups, where those suffice
_UP, _DOWN, _FUSED_UP = ("gate_proj", "up_proj"), "down_proj", "gate_up_proj"
# Children of attention that makes queries, keys and values of latents (MLA). The latents are the same on all ranks, and so are
# the positions that an indexer chooses.
_OF_LATENTS = {"q_proj", "q_b_proj", "kv_b_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "kv_a_layernorm",
               "indexer"}  # fmt: skip


class ParallelPlan:
    """The cuts of a model on the meta device for one rank.

    Args:
        model: Of transformers.
        tp: The ranks.
        specs: The quantized layers' specs by the names of their modules; scale groups along K align cuts.
        experts_only: Whether to cut experts alone, for engines that cut the other modules themselves.

    Attributes:
        cuts: The cut of each module that is not replicated.
        heads: The attention modules' heads.
        whole_experts: This rank's experts of each experts module under expert parallelism. `experts` has the others, which are
            cut by channels.
    """

    def __init__(self, model: Any, tp: TensorParallel, specs: dict[str, LinearSpec], *, experts_only: bool = False) -> None:
        self.model, self.tp, self.specs = model, tp, specs
        self.cuts: dict[str, Cut] = {}
        self.heads: dict[str, HeadCut] = {}
        self.gathered: dict[str, list[int]] = {}  # column-parallel modules whose whole output is needed: rows of each rank
        self.split: dict[str, tuple[int, int]] = {}  # row-parallel modules that get the whole input: this rank's columns
        self.experts: dict[str, list[int]] = {}  # boundaries of the experts' intermediate channels
        self.whole_experts: dict[str, ExpertRange] = {}
        self.shared_scales: dict[str, SharedScales] = {}
        for name, module in model.named_modules():
            self._plan_experts(name, module)
        if experts_only:
            return
        styles = model._expand_parallel_plan(dict(model.tp_plan or {}))
        for name, module in model.named_modules():
            self._plan_attention(name, module, styles)
            self._plan_latent_attention(name, module)
            self._plan_mlp(name, module)
        self._plan_by_style(styles)

    # ---- which modules are cut, and where --------------------------------------------------------------------------------

    def _plan_attention(self, name: str, module: Any, styles: dict[str, str]) -> None:
        """Query, key and value by rows and the output by columns, at the borders of heads."""
        children = module._modules
        fused = "qkv_proj" in children
        if "o_proj" not in children or not (fused or {"q_proj", "k_proj", "v_proj"} <= set(children)):
            return
        if any("gather" in styles.get(f"{name}.{leaf}", "") for leaf in ("q_proj", "k_proj")):  # a norm spans all heads
            return
        config, dim = module.config, getattr(module, "head_dim", None)
        if dim is None or not hasattr(module, "num_key_value_groups"):
            return
        num_heads = config.num_attention_heads
        num_kv = num_heads // module.num_key_value_groups
        by_rank = [head_cut(num_heads, num_kv, rank, self.tp.world) for rank in range(self.tp.world)]
        cut = self.heads[name] = by_rank[self.tp.rank]
        if fused:
            sizes = [num_heads * dim, num_kv * dim, num_kv * dim]
            of_rank = [_scaled(cut.query, dim), _scaled(cut.kv, dim), _scaled(cut.kv, dim)]
            starts = (0, sizes[0], sizes[0] + sizes[1])
            ranges = tuple((start + a, start + b) for start, (a, b) in zip(starts, of_rank, strict=True))
            self._cut(f"{name}.qkv_proj", 0, ranges, sum(sizes))
        else:
            for leaf, part, count in (("q_proj", cut.query, num_heads), ("k_proj", cut.kv, num_kv), ("v_proj", cut.kv, num_kv)):
                rows = children[leaf].weight.shape[0]
                self._cut(f"{name}.{leaf}", 0, (_scaled(part, self._per(f"{name}.{leaf}", rows, count)),), rows)
        self._cut_output(name, by_rank, num_heads)

    def _plan_latent_attention(self, name: str, module: Any) -> None:
        """What makes queries, keys and values of latents by rows and the output by columns, at the borders of heads."""
        children = {leaf: child for leaf, child in module._modules.items() if child is not None}
        query = "q_b_proj" if "q_b_proj" in children else "q_proj"
        if not {query, "kv_b_proj", "o_proj"} <= set(children) <= _OF_LATENTS or module._parameters:
            return
        num_heads = getattr(module, "num_heads", None)
        if num_heads is None or getattr(module, "num_key_value_groups", None) != 1:
            return
        by_rank = [head_cut(num_heads, num_heads, rank, self.tp.world) for rank in range(self.tp.world)]
        own = self.heads[name] = by_rank[self.tp.rank]
        for leaf in (query, "kv_b_proj"):
            rows = children[leaf].weight.shape[0]
            self._cut(f"{name}.{leaf}", 0, (_scaled(own.query, self._per(f"{name}.{leaf}", rows, num_heads)),), rows)
        self._cut_output(name, by_rank, num_heads)

    def _cut_output(self, name: str, by_rank: Sequence[HeadCut], num_heads: int) -> None:
        """An attention module's output projection, at the columns of each rank's heads."""
        columns = self.model.get_submodule(name).o_proj.weight.shape[1]
        per = self._per(f"{name}.o_proj", columns, num_heads)
        parts = [per * (c.query[1] - c.query[0]) for c in by_rank]
        self._cut(f"{name}.o_proj", 1, (_scaled(by_rank[self.tp.rank].query, per),), columns, parts)

    def _per(self, name: str, size: int, heads: int) -> int:
        """Rows or columns of a head."""
        if size % heads:
            raise CheckpointError("a layer is no multiple of its heads", tensor=name, found=size, expected=f"{heads} heads")
        return size // heads

    def _plan_mlp(self, name: str, module: Any) -> None:
        """Gate and up by rows, down by columns, at the same channels."""
        children = module._modules
        fused = _FUSED_UP in children
        if _DOWN not in children or not (fused or set(_UP) <= set(children) or _UP[1] in children):
            return
        if not all(hasattr(children[leaf], "weight") for leaf in (_DOWN, *(_UP + (_FUSED_UP,))) if leaf in children):
            return
        size = children[_DOWN].weight.shape[1]
        at = self._channels(size, (f"{name}.{_DOWN}",))
        part = self._own(at)
        if fused:
            self._cut(f"{name}.{_FUSED_UP}", 0, (part, (size + part[0], size + part[1])), 2 * size)
        for leaf in _UP:
            if leaf in children:
                self._cut(f"{name}.{leaf}", 0, (part,), size)
        self._cut(f"{name}.{_DOWN}", 1, (part,), size, _differences(at))

    def _plan_experts(self, name: str, module: Any) -> None:
        """All experts' intermediate channels; or whole experts."""
        down = module._parameters.get(_DOWN)
        if down is None or down.dim() != 3:
            return
        if self.tp.expert_parallel:
            check_divisible(module, name)
            self.whole_experts[name] = self.tp.expert_range(down.shape[0])
            return
        if getattr(module, "has_post_expert_norm", False):  # it is not linear: a norm of a part is no part of the norm
            raise InputError("experts with a norm after each cannot be cut by channels", tensor=name, found=type(module).__name__,
                             fix="expert_parallel=True gives each rank whole experts")  # fmt: skip
        size = down.shape[1] if getattr(module, "is_transposed", False) else down.shape[2]
        self.experts[name] = self._channels(size, [n for n in self.specs if n.startswith(f"{name}.")])

    def _own(self, at: list[int]) -> tuple[int, int]:
        return at[self.tp.rank], at[self.tp.rank + 1]

    def _channels(self, size: int, down: Iterable[str]) -> list[int]:
        """Boundaries between ranks of `size` intermediate channels, which are columns of the layers `down`."""
        specs = [self.specs[name] for name in down if name in self.specs]
        groups = [spec.block[1] for spec in specs if spec.block[1] < size == spec.k]
        groups += [spec.act.group_size for spec in specs if spec.act is not None and spec.act.granularity == "group"]
        return boundaries(size, self.tp.world, math.lcm(CHANNEL_ALIGNMENT, *groups))

    def _plan_by_style(self, styles: dict[str, str]) -> None:
        """What transformers' plan cuts beyond these: the head, the table, and layers whose whole input or output is needed."""
        for name, style in styles.items():
            module = self._module(name)
            if module is None or name in self.cuts or not isinstance(getattr(module, "weight", None), Tensor):
                continue
            n, k = module.weight.shape if module.weight.dim() == 2 else (0, 0)
            if style in ("colwise_gather_output", "embedding_rowwise"):
                at = boundaries(n, self.tp.world, CHANNEL_ALIGNMENT)
                self._cut(name, 0, (self._own(at),), n, _differences(at))
                if style == "colwise_gather_output":
                    self.gathered[name] = _differences(at)
            elif style == "rowwise_split_input":
                at = boundaries(k, self.tp.world, CHANNEL_ALIGNMENT)
                self._cut(name, 1, (self._own(at),), k, _differences(at))
                self.split[name] = self._own(at)

    def _module(self, name: str) -> Any:
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return None

    def _cut(
        self, name: str, dim: Any, ranges: tuple[tuple[int, int], ...], size: int, parts: Sequence[int] = ()
    ) -> None:  # fmt: skip
        module = self.model.get_submodule(name)
        if module.weight.shape[dim] != size:
            raise CheckpointError("a layer has another size than its heads or channels", tensor=name,
                                  found=list(module.weight.shape), expected=size)  # fmt: skip
        self.cuts[name] = Cut(dim, ranges, size, tuple(parts))

    # ---- cutting ---------------------------------------------------------------------------------------------------------

    def read(self, name: str, record: LayerRecord, order: Tensor | None) -> QuantizedWeight:
        """A module's canonical weight on this rank, read from the file without the other ranks' where that is possible.

        order: the row in the file of each of the model's rows; None where they are the same.
        """
        cut = self.cuts.get(name)
        if cut is None:
            return in_order(record.weight(), order)
        part = read_cut(record, cut, order)
        if cut.dim == 1 and name not in self.shared_scales and self._shares_scales(part.spec.act, cut):
            assert part.spec.act is not None
            self.shared_scales[name] = SharedScales(self.tp, part.spec.act, cut.parts, part.input_scale)
        return part if self.keeps_bias(name) else part.with_bias(None)

    def keeps_bias(self, name: str) -> bool:
        """Whether this rank adds a module's bias: where columns are cut rank 0 alone, or all after the sum."""
        return name not in self.cuts or self.cuts[name].dim == 0 or self.tp.rank == 0 or name in self.shared_scales

    def _shares_scales(self, act: ActSpec | None, cut: Cut) -> bool:
        """Whether columns of other ranks share this rank's activation scales, which are computed when the layer runs."""
        if not self.tp.exact_activation_scales or act is None or not act.dynamic:
            return False
        return act.granularity != "group" or cut.splits_groups(act.group_size)

    def linear(self, name: str, weight: QuantizedWeight, make: Any) -> nn.Module:
        """The module of a cut weight. make: from a weight to a QuantLinear."""
        scales = self.shared_scales.get(name)
        if scales is None:
            return make(weight)
        layer = make(weight.with_bias(None))
        if scales.act.granularity == "group" or not layer.choice.kernel.takes_quantized_input:
            layer = make(without_activation_quantization(weight.with_bias(None)))
        bias = None if weight.bias is None else weight.bias.detach().to(layer._packed[0].device, layer.spec.act_dtype, copy=True)
        layer.row_parallel_bias = bias
        return layer

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """An unquantized parameter on this rank, in memory of its own."""
        owner, _, leaf = name.rpartition(".")
        if owner in self.heads and leaf == "sinks":
            start, stop = self.heads[owner].query
            return tensor[start:stop].clone()
        cut = self.cuts.get(owner)
        if cut is None or (leaf == "bias" and cut.dim == 1) or leaf not in ("weight", "bias"):
            return tensor
        return torch.cat([tensor.narrow(cut.dim, a, b - a) for a, b in cut.ranges], cut.dim)

    def expert_weight(self, name: str, weight: QuantizedWeight, *, down: bool) -> QuantizedWeight:
        """A projection of an expert of the module `name`; up projections have gate rows above up rows, or one of them."""
        cut = self.expert_cut(name, weight.shape[0], down=down)
        return self._expert_part(cut_weight(weight, cut), cut)

    def read_expert(self, name: str, record: LayerRecord, *, down: bool, interleaved: bool) -> QuantizedWeight:
        """A projection of an expert of the module `name`, or a part of one, read from the file without the other ranks'.

        interleaved: gate and up rows alternate in the file, and in the result.
        """
        cut = self.expert_cut(name, record.spec.n, down=down, interleaved=interleaved)
        return self._expert_part(read_cut(record, cut), cut)

    def _expert_part(self, part: QuantizedWeight, cut: Cut) -> QuantizedWeight:
        """A part of a projection, without what ranks exchange or other ranks add."""
        if cut.dim == 1 and self._shares_scales(part.spec.act, cut):
            part = without_activation_quantization(part)
        return part if cut.dim == 0 or self.tp.rank == 0 else part.with_bias(None)

    def expert_gate(self, name: str, gate: Any, down: Sequence[LayerRecord]) -> Any:
        """What lies between the projections of the experts of the module `name`, whose second ones are `down`, in order."""
        cut = self.expert_cut(name, 0, down=True)
        if not any(self._shares_scales(record.spec.act, cut) for record in down):
            return gate
        act, *others = {record.spec.act for record in down}
        if act is None or others:
            raise CheckpointError(
                "experts of one layer quantize activations differently", tensor=name, found=f"{act}, {others}",
                expected="one scheme", fix="TensorParallel(exact_activation_scales=False)",
            )  # fmt: skip
        has_global = act.granularity == "group" and act.scale == "e4m3"  # one for each expert
        global_scales = [record.weight(rows=(0, 1)).input_scale if has_global else None for record in down]
        return QuantizedGate(gate, [SharedScales(self.tp, act, cut.parts, scale) for scale in global_scales])

    def cut_expert_layer(self, name: str, layer: nn.Linear, *, down: bool) -> None:
        """Cut an unquantized projection of an expert of the module `name`."""
        cut = self.expert_cut(name, layer.weight.shape[0], down=down)
        pieces = lambda t: torch.cat([t.detach().narrow(cut.dim, a, b - a) for a, b in cut.ranges], cut.dim)
        layer.weight = nn.Parameter(pieces(layer.weight), requires_grad=False)
        layer.out_features, layer.in_features = layer.weight.shape
        if layer.bias is not None and cut.dim == 0:
            layer.bias = nn.Parameter(pieces(layer.bias), requires_grad=False)
        elif self.tp.rank:
            layer.register_parameter("bias", None)

    def expert_cut(self, name: str, rows: int, *, down: bool, interleaved: bool = False) -> Cut:
        """The cut of an expert's projection of so many rows. interleaved: gate and up rows alternate."""
        at = self.experts[name]
        (start, stop), size = self._own(at), at[-1]
        if down:
            return Cut(1, ((start, stop),), size, tuple(_differences(at)))
        if interleaved:
            return Cut(0, ((2 * start, 2 * stop),), rows, ())
        return Cut(0, tuple((first + start, first + stop) for first in range(0, rows, size)), rows, ())

    # ---- exchanges between ranks -----------------------------------------------------------------------------------------

    def finish(self, read_weight: dict[str, Any]) -> None:
        """Put the exchanges in place and give attention modules this rank's heads. read_weight: is renamed with its layers."""
        for name in self.experts:
            self._finish_experts(name)
        for name, own in self.whole_experts.items():
            divide_experts(self.model.get_submodule(name), own, self.tp)
        for name, cut in self.cuts.items():
            module = self.model.get_submodule(name)
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
                module.register_parameter("bias", module.bias if self.keeps_bias(name) else None)
            wrapped, child = self._wrapped(name, module, cut)
            if wrapped is module:
                continue
            _replace(self.model, name, wrapped)
            if name in read_weight:
                read_weight[f"{name}.{child}"] = read_weight.pop(name)
        for name, heads in self.heads.items():
            _set_heads(self.model.get_submodule(name), heads)

    def _wrapped(self, name: str, module: Any, cut: Cut) -> tuple[nn.Module, str]:
        """A module with its exchange, and the path to the module inside of it."""
        if cut.dim == 1:
            row = RowParallel(module, self.tp, self.shared_scales.get(name), getattr(module, "row_parallel_bias", None))
            if name in self.split:
                return SplitInput(row, *self.split[name]), "layer.linear"
            return row, "linear"
        if name in self.gathered:
            return GatherOutput(module, self.tp, self.gathered[name]), "linear"
        if module is self.model.get_input_embeddings():
            module.padding_idx = None
            return VocabParallelEmbedding(module, self.tp, *cut.ranges[0]), "embedding"
        return module, ""

    def _finish_experts(self, name: str) -> None:
        """Cut unquantized experts, and sum what all ranks' parts of the experts give."""
        module = self.model.get_submodule(name)
        if _DOWN in module._parameters:
            cut_dense_experts(module, self.experts[name], self.tp.rank)
        module.register_forward_hook(lambda _module, _args, y: self.tp.sum(y))


def without_activation_quantization(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight, weight-only."""
    return replace(weight, spec=weight.spec.replace(act=None), input_scale=None, input_zero=None)


def _scaled(part: tuple[int, int], by: int) -> tuple[int, int]:
    return part[0] * by, part[1] * by


def _differences(at: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(at)]


def _set_heads(module: Any, cut: HeadCut) -> None:
    """Give an attention module the numbers of this rank's heads."""
    query, kv = cut.query[1] - cut.query[0], cut.kv[1] - cut.kv[0]
    module.num_key_value_groups = cut.group
    for names, value in ((("num_heads", "num_attention_heads"), query), (("num_key_value_heads", "num_kv_heads"), kv)):
        for name in names:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, value)
    module.config = copy.copy(module.config)
    module.config.num_attention_heads, module.config.num_key_value_heads = query, kv


def _replace(model: Any, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._modules[leaf] = module
