"""A checkpoint's layers under an engine's names: quantized weights from Bitline's readers, and tensors that it loads itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.engines.engine import Engine
from bitline.engines.expert_weights import ExpertWeights
from bitline.errors import CheckpointError
from bitline.formats.base import LayerRecord
from bitline.model.gguf_names import GGUFNameMap
from bitline.model.meta_model import make_config, make_meta_model
from bitline.model.rank_slices import OneRank
from bitline.weight import QuantizedWeight


class ModelWeights:
    """A checkpoint whose layers are found by the names of an engine's modules.

    path: a folder or file. mappers: the engine's renamings from the checkpoint's names to its modules', in order. Nothing is
    read before it is needed, and what was read is not pickled, so that an engine can send it to other processes.
    """

    def __init__(self, engine: Engine, path: Path, mappers: Sequence[Any] = ()) -> None:
        self.engine, self.path, self.mappers = engine, path, list(mappers)
        self.used: set[str] = set()  # the engine's names of the layers that modules have taken
        self._experts: dict[tuple[torch.dtype, torch.device, OneRank], ExpertWeights] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"engine": self.engine, "path": self.path, "mappers": self.mappers, "used": set(), "_experts": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """The open checkpoint."""
        return open_checkpoint(self.path)

    @functools.cached_property
    def _gguf_names(self) -> GGUFNameMap | None:
        if not self.checkpoint.is_gguf:
            return None
        with torch.device("cpu"):
            model = make_meta_model(make_config(self.checkpoint), torch.bfloat16, self.checkpoint)
        return GGUFNameMap(model, self.checkpoint)

    @functools.cached_property
    def records(self) -> dict[str, LayerRecord]:
        """The quantized layers by the names of the engine's modules."""
        names = self._gguf_names
        return {self._renamed(r.name if names is None else names.module_name(r.name)): r for r in self.checkpoint.layers()}

    @functools.cached_property
    def _dense(self) -> dict[str, str]:
        """Tensors that belong to no quantized layer: the engine's name -> the file's."""
        return {self._renamed(name): file_name for file_name, name in self._dense_names()}

    def _dense_names(self) -> Iterator[tuple[str, str]]:
        """(the file's name, transformers' name) of each tensor that belongs to no quantized layer."""
        for name in self.checkpoint.dense_names():
            target = name if self._gguf_names is None else self._gguf_names.parameter_name(name)
            if target is not None:
                yield name, target

    def table_name(self, name: str, *, is_head: bool, tied: bool) -> str:
        """The quantized layer of an embedding or output layer: its own name, else the only table's.

        Most models give their embedding no name, and an output layer that is tied to it has no layer of its own.
        """
        if name in self.records or (is_head and not tied):
            return name
        tables = [n for n in self.records if n.endswith(("embed_tokens", "wte", "word_embeddings"))]
        return tables[0] if len(tables) == 1 else name

    def _renamed(self, name: str) -> str:
        for mapper in self.mappers:
            name = mapper.map_name(name) or name
        return name

    def weight(self, name: str) -> QuantizedWeight:
        """The canonical weight of a quantized layer, rows in the model's order."""
        record = self.records[name]
        weight = record.weight()
        return weight if self._gguf_names is None else self._gguf_names.permute_rows(record.name, weight)

    def experts(self, dtype: torch.dtype, device: torch.device, ranks: OneRank) -> ExpertWeights:
        """The experts modules, to run in `dtype` on `device`, cut over ranks."""
        key = (dtype, device, ranks)
        if key not in self._experts:
            self._experts[key] = ExpertWeights(self.engine, self.checkpoint, self.records, self._renamed, *key)
        return self._experts[key]

    def dense_weight(self, name: str) -> Tensor:
        """The unquantized matrix of a layer whose siblings are quantized."""
        file_name = self._dense.get(f"{name}.weight")
        if file_name is None:
            raise CheckpointError("a layer is missing whose siblings are quantized", file=self.path, tensor=f"{name}.weight")
        return self._tensor(file_name)

    def dense_tensors(self, skip: set[str], skip_tensors: set[str]) -> Iterator[tuple[str, Tensor]]:
        """(transformers' name, tensor) of all tensors that the engine loads itself.

        skip: its names of layers without such. skip_tensors: the file's names of tensors that Bitline reads.
        """
        for name, target in self._dense_names():
            if name not in skip_tensors and self._renamed(target).removesuffix(".weight") not in skip:
                yield target, self._tensor(name)

    def dequantized(self, name: str, dtype: torch.dtype) -> tuple[str, Tensor]:
        """(transformers' name, matrix) of a quantized layer that the engine runs unquantized, as routers."""
        record = self.records[name]
        target = record.name if self._gguf_names is None else self._gguf_names.module_name(record.name)
        self.used.add(name)
        return f"{target}.weight", self.weight(name).dequantize(dtype)

    def _tensor(self, file_name: str) -> Tensor:
        tensor = self.checkpoint.read(file_name)
        return tensor if self._gguf_names is None else self._gguf_names.convert_tensor(file_name, tensor)

    def check_all_used(self, absent: set[str]) -> None:
        """Refuse a checkpoint with quantized layers that no module has taken. absent: names of modules of other ranks."""
        unused = [n for n in self.records if n not in self.used and not any(f"{n}.".startswith(f"{a}.") for a in absent)]
        for experts in self._experts.values():
            unused = [n for n in unused if not experts.is_for_prediction(self.records[n])]
        if unused:
            record = self.records[unused[0]]
            raise CheckpointError(
                f"{self.engine.name}'s model has no modules for {len(unused)} of {len(self.records)} quantized layers",
                file=self.checkpoint.source.tensors[record.tensors[0]].file, tensor=record.name,
                found=", ".join(unused[:5]) + (", …" if len(unused) > 5 else ""),
                fix=f"{self.engine.name} names this architecture's modules otherwise; bitline.load_model may run the checkpoint",
            )  # fmt: skip
