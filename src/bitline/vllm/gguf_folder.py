"""A GGUF file as a folder that vLLM accepts as a model: configuration and tokenizer from the metadata, and a link to the file."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from bitline import env
from bitline.checkpoint import Checkpoint, open_checkpoint
from bitline.errors import BitlineError, CheckpointError
from bitline.model.meta_model import make_config
from bitline.model.tokenizer import load_tokenizer
from bitline.version import __version__


def gguf_folder(path: Path, *, tokenizer: bool = True) -> Path:
    """The folder of a GGUF file or of a folder with one, in Bitline's cache; made on first use, and again when the file changes.

    tokenizer: whether to write the file's tokenizer, which an engine with another one does not need.
    Raises CheckpointError where transformers cannot make a configuration or a tokenizer of the metadata, BitlineError where the
    cache cannot be written.
    """
    checkpoint = open_checkpoint(path)
    file = checkpoint.path.resolve()
    state = file.stat()
    key = hashlib.sha256(f"{__version__} {file} {state.st_size} {state.st_mtime_ns} {tokenizer}".encode()).hexdigest()[:16]
    folder = env.cache_dir() / "vllm" / f"{file.stem}-{key}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            _fill(made, checkpoint, tokenizer)
            if not folder.is_dir():
                made.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # another process may have made it meanwhile
            raise BitlineError("cannot write a GGUF file's configuration for vLLM", file=folder, found=error,
                               fix="set BITLINE_CACHE to a folder that can be written") from error  # fmt: skip
    return folder


def _fill(folder: Path, checkpoint: Checkpoint, tokenizer: bool) -> None:
    folder.mkdir()
    config = make_config(checkpoint)
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    settings |= {"architectures": [_architecture(config.model_type, checkpoint)], "dtype": "bfloat16"}
    if tokenizer:
        load_tokenizer(checkpoint).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    for part in sorted({info.file.resolve() for info in checkpoint.source.tensors.values()} | {checkpoint.path.resolve()}):
        (folder / part.name).symlink_to(part)


def _architecture(model_type: str, checkpoint: Checkpoint) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError("transformers has no causal language model for this file", file=checkpoint.path, found=model_type)
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
