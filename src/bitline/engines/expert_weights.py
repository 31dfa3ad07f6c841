"""A checkpoint's quantized experts under an engine's names: placed, read, cut and packed as `load_model` does."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from bitline import env
from bitline.checkpoint import Checkpoint
from bitline.engines import packed_layer
from bitline.engines.engine import Engine
from bitline.errors import BitlineError, CheckpointError
from bitline.experts import ExpertStack, QuantExperts
from bitline.formats.base import LayerRecord
from bitline.host import without_default_device
from bitline.linear import QuantLinear
from bitline.model.meta_model import check_config_sizes, make_config, make_meta_model
from bitline.model.rank_slices import OneRank
from bitline.model.weight_loader import WeightLoader


class ExpertWeights:
    """The experts modules of a checkpoint, found by the names of an engine's modules.

    Args:
        engine: For its log and its name in messages.
        checkpoint: Open.
        records: Its quantized layers by the engine's names.
        renamed: From a name of the checkpoint or of transformers' model to the engine's.
        dtype: Of activations.
        device: Where the experts run.
        ranks: This rank of those that cut each expert's intermediate channels, or have whole experts. The engine sums what they
            return.
    """

    def __init__(
        self, engine: Engine, checkpoint: Checkpoint, records: Mapping[str, LayerRecord], renamed: Callable[[str], str],
        dtype: torch.dtype, device: torch.device, ranks: OneRank,
    ) -> None:  # fmt: skip
        self.engine, self.checkpoint, self.records, self.renamed = engine, checkpoint, records, renamed
        self.dtype, self.device, self.ranks = dtype, device, ranks

    @functools.cached_property
    def _loader(self) -> WeightLoader:
        """Fills the experts modules of transformers' model, whose other modules stay on the meta device."""
        check_config_sizes(self.checkpoint)
        model = make_meta_model(make_config(self.checkpoint), self.dtype, self.checkpoint)
        tp = cast(Any, self.ranks) if self.ranks.world > 1 else None
        return WeightLoader(model, self.checkpoint, lambda _name: self.device, self.dtype, None, None, tp=tp)

    @functools.cached_property
    def _layers(self) -> dict[str, list[str]]:
        """The engine's names of each experts module's quantized matrices, by transformers' name of the module."""
        names = {record.name: name for name, record in self.records.items()}
        found: dict[str, list[str]] = defaultdict(list)
        for module, experts in self._loader.experts.items():
            found[module] = [names[record.name] for record in experts.records()]
        return found

    @without_default_device
    def layers_of(self, name: str) -> list[str]:
        """The engine's names of the quantized matrices of its experts module `name`; none where all are unquantized.

        Raises:
            BitlineError: Where transformers' model has no experts module for them.
        """
        below = [layer for layer in self.records if layer.startswith(f"{name}.")]
        module = self._module(name) if below or self.checkpoint.is_gguf else None
        if module is not None:
            return self._layers[module]
        if below:
            raise BitlineError(
                "the experts of this architecture do not run on Bitline", file=self.checkpoint.path,
                tensor=self.records[below[0]].name, found=f"no place in transformers' {type(self._loader.model).__name__}",
                expected="an experts module with gate_up_proj or up_proj, and down_proj",
                fix=f"leave quantization out: {self.engine.name}'s own methods may run the model",
            )  # fmt: skip
        return []

    def _module(self, name: str) -> str | None:
        """transformers' name of an engine's experts module that has quantized matrices."""
        of_layers = (module for module, layers in self._layers.items() if any(n.startswith(f"{name}.") for n in layers))
        of_name = (module for module in self._layers if self.renamed(module) == name)  # GGUF names its stacks otherwise
        return next(of_layers, None) or next(of_name, None)

    @without_default_device
    def tensors_of(self, name: str) -> set[str]:
        """The file's names of the unquantized tensors that `load` reads for an experts module: biases, and matrices."""
        module = self._module(name)
        return set() if module is None else set(self._loader.dense_of_experts.get(module, ()))

    def is_for_prediction(self, record: LayerRecord) -> bool:
        """Whether a layer is of the decoder layers for multi-token prediction, which follow the model's own."""
        config = self._loader.model.config.get_text_config()
        layers, extra = (getattr(config, key, 0) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers"))
        number = re.search(r"\blayers\.(\d+)\.", record.name)
        return number is not None and layers <= int(number[1]) < layers + extra

    @without_default_device
    def load(self, name: str) -> QuantExperts:
        """Read, cut and pack the experts of the engine's module `name`, which has quantized ones.

        A missing, surplus or misshapen expert is a CheckpointError. With BITLINE_VERIFY each projection is compared with the
        reference.
        """
        module = self._module(name)
        if module is None:
            raise CheckpointError("the checkpoint has no quantized experts of this name", file=self.checkpoint.path, tensor=name)
        experts = self._loader.load_experts(module)
        for part_name, part in experts.named_modules():
            if isinstance(part, ExpertStack | QuantLinear):
                packed_layer.log_choice(part, f"{name}.{part_name}", self.engine)
                if env.verify():
                    weight = self._loader.read_weight[f"{module}.{part_name}"]()
                    packed_layer.check_packed(part, weight, f"{name}.{part_name}", self.engine)
        return experts
