"""A transformers model as llama.cpp stores it: metadata, tensor names, and row order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitline.conversion.gguf.model_config import ModelConfig
from bitline.conversion.gguf.tokenizer import tokenizer_metadata
from bitline.conversion.gguf.writer import F32, STRING, U32, Array, Value
from bitline.conversion.source_model import EMBEDDINGS, HEADS, QuantizedLayer, SourceModel
from bitline.errors import BitlineError, ConversionError
from bitline.model.meta_model import check_config_sizes

_LAYER_NAME = re.compile(r"(.*\blayers\.)(0|[1-9][0-9]*)(\..*)")
_COMPUTED_BY_LLAMA_CPP = ("rotary_emb.inv_freq", ".position_ids")
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}  # llama.cpp's llama_ftype of the commonest block type
_MOSTLY_F16 = 1


class LlamaCppModel:
    """Names, row order and metadata of a model in a GGUF file.

    names: llama.cpp's name of each layer's module and of each unquantized tensor. left_out: tensors that the file has no use
    for. A model that llama.cpp would load as another one is a ConversionError.
    """

    def __init__(self, source: SourceModel) -> None:
        check_config_sizes(source.checkpoint)
        self._source, self._config = source, ModelConfig(source)
        self.names: dict[str, str] = {}
        self.left_out: list[str] = []
        table = self._name_table()
        for entry in source.entries:
            quantized = isinstance(entry, QuantizedLayer)
            stem, _, suffix = (entry.name, "", "weight") if quantized else entry.name.rpartition(".")
            if suffix == "weight":
                self._check_rows(stem, entry.record.spec.n if isinstance(entry, QuantizedLayer) else (*entry.shape, 0)[0])
            if any(part in entry.name for part in _COMPUTED_BY_LLAMA_CPP):
                self.left_out.append(entry.name)
                continue
            found = self._gguf_name(table, stem)
            if found is None or suffix not in ("weight", "bias"):
                raise self._config.error("a tensor has no name in llama.cpp", entry.name, None)
            self.names[entry.name] = found if quantized else f"{found}.{suffix}"

    # ---- names -----------------------------------------------------------------------------------------------------------

    def _name_table(self) -> Any:
        """gguf's table of tensor names, for one layer: its size grows with the number of layers that a config claims."""
        try:
            import gguf
        except ImportError as error:
            raise BitlineError("gguf files need the gguf package's name tables", fix="pip install 'bitline[models]'") from error
        architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        return gguf.get_tensor_name_map(architectures[self._config.architecture], 1)

    def _gguf_name(self, table: Any, module: str) -> str | None:
        """llama.cpp's name of a module, from the table's layer 0."""
        match = _LAYER_NAME.fullmatch(module)
        if match is None:
            return table.get_name(module)
        layers = self._config.integer("num_hidden_layers")
        if len(match[2]) > 9 or int(match[2]) >= layers:
            raise self._config.error("a tensor belongs to a layer that config.json does not have", module, f"{layers} layers")
        found = table.get_name(f"{match[1]}0{match[3]}")
        return None if found is None else found.replace("blk.0.", f"blk.{match[2]}.", 1)

    # ---- rows ------------------------------------------------------------------------------------------------------------

    def row_order(self, name: str) -> Tensor | None:
        """The source row of each row of a module or tensor in the file, int64 [N]; None where the order is the same.

        For `llama`, llama.cpp rotates pairs of adjacent query and key rows, transformers pairs half a head apart.
        """
        leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if self._config.architecture != "llama" or leaf not in ("q_proj", "k_proj"):
            return None
        heads, head_dim = self._heads_of(leaf), self._config.head_dim()
        return torch.arange(heads * head_dim).view(heads, 2, head_dim // 2).transpose(1, 2).reshape(-1)

    def _heads_of(self, leaf: str) -> int:
        return self._config.heads() if leaf == "q_proj" else self._config.kv_heads()

    def _check_rows(self, module: str, rows: int) -> None:
        """Refuse a config that does not belong to the weights: llama.cpp reads them by its sizes."""
        leaf = module.rpartition(".")[2]
        expected = None
        if leaf in ("q_proj", "k_proj", "v_proj"):
            expected = self._heads_of(leaf) * self._config.head_dim()
        elif leaf in EMBEDDINGS | HEADS:
            expected = self._config.integer("vocab_size")
        if expected is not None and rows != expected:
            raise ConversionError(
                "a weight's rows do not match config.json", file=self._source.checkpoint.path, tensor=module, found=rows,
                expected=expected, fix="the config does not belong to these tensors",
            )  # fmt: skip

    # ---- metadata --------------------------------------------------------------------------------------------------------

    def metadata(self, block_types: Mapping[str, int]) -> dict[str, Value | Array]:
        """Every metadata key. block_types: how many layers have each block type."""
        config, arch = self._config, self._config.architecture
        integer = lambda key: Value(U32, config.integer(key))
        head_dim = Value(U32, config.head_dim())
        commonest = max(block_types, key=lambda name: block_types[name], default="")
        out: dict[str, Value | Array] = {
            "general.architecture": Value(STRING, arch), "general.type": Value(STRING, "model"),
            "general.name": Value(STRING, config.text("_name_or_path") or self._source.checkpoint.path.name),
            "general.file_type": Value(U32, _FILE_TYPES.get(commonest, _MOSTLY_F16)),
            "general.quantization_version": Value(U32, 2),
            f"{arch}.block_count": integer("num_hidden_layers"), f"{arch}.context_length": integer("max_position_embeddings"),
            f"{arch}.embedding_length": integer("hidden_size"), f"{arch}.feed_forward_length": integer("intermediate_size"),
            f"{arch}.attention.head_count": Value(U32, config.heads()),
            f"{arch}.attention.head_count_kv": Value(U32, config.kv_heads()),
            f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": Value(F32, config.number("rms_norm_eps", 1e-6)),
            f"{arch}.rope.freq_base": Value(F32, config.rope_number("rope_theta")),
            f"{arch}.rope.dimension_count": head_dim,
            f"{arch}.vocab_size": integer("vocab_size"),
        }  # fmt: skip
        if config.rope["rope_type"] == "linear":
            out[f"{arch}.rope.scaling.type"] = Value(STRING, "linear")
            out[f"{arch}.rope.scaling.factor"] = Value(F32, config.rope_number("factor"))
        return out | tokenizer_metadata(self._source, config.integer("vocab_size"))

    def computed_tensors(self) -> dict[str, Tensor]:
        """Tensors that llama.cpp stores and transformers computes: the frequency factors of Llama 3's rotary embedding."""
        config = self._config
        if config.rope["rope_type"] != "llama3":
            return {}
        # transformers' _compute_llama3_parameters: long wavelengths are stretched by `factor`, short ones are not.
        factor, low, high = (config.rope_number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        old_context = config.rope_number("original_max_position_embeddings")
        head_dim = config.head_dim()
        wavelength = 2 * math.pi * config.rope_number("rope_theta") ** (torch.arange(0, head_dim, 2).double() / head_dim)
        smooth = (old_context / wavelength - low) / (high - low)
        interpolated = 1 / ((1 - smooth) / factor + smooth)
        short = torch.where(wavelength < old_context / high, 1.0, interpolated)
        return {"rope_freqs.weight": torch.where(wavelength > old_context / low, factor, short).float()}
