"""What `quantization="bitline"` implies for vLLM's engine: Bitline's loader, a local folder, and a folder for a GGUF file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from bitline.checkpoint import open_checkpoint
from bitline.errors import BitlineError
from bitline.model import hub
from bitline.version import __version__
from bitline.vllm.engine import VLLM
from bitline.vllm.gguf_folder import gguf_folder
from bitline.vllm.kernels import TABLES


def install(*, serve_all: bool) -> None:
    """Let `prepare` see an engine's arguments before vLLM makes a configuration of them. serve_all: BITLINE_VLLM=all."""
    original = EngineArgs.create_engine_config
    if getattr(original, "bitline", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
        VLLM.log.info("Bitline %s ranks kernels of %s, and serves quantization='bitline'", __version__, ", ".join(TABLES))
        if serve_all and self.quantization is None and _is_readable(self.model):
            self.quantization = "bitline"
        if self.quantization == "bitline":
            prepare(self)
        return original(self, *args, **options)

    create_engine_config.bitline = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def prepare(args: Any) -> None:
    """Complete the arguments of an engine with quantization="bitline".

    args: vLLM's EngineArgs. A model of the hub is downloaded; a GGUF file gets a folder with the configuration and the
    tokenizer that its metadata describe.
    """
    if args.load_format == "auto":
        args.load_format = "bitline"
    named = args.model
    if not Path(named).exists():
        args.model = str(hub.download(named, revision=args.revision, cache=args.download_dir))
    if _gguf(Path(args.model)):
        own_tokenizer = args.tokenizer is None and not args.skip_tokenizer_init
        args.model = str(gguf_folder(Path(args.model), tokenizer=own_tokenizer))
    if args.model != named and args.served_model_name is None:
        args.served_model_name = [named]


def _gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" or (path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf")))


def _is_readable(model: str) -> bool:
    """Whether a local checkpoint is quantized in a format that Bitline reads."""
    if not Path(model).exists():
        return False
    try:
        return bool(open_checkpoint(model).layers())
    except BitlineError as error:
        VLLM.log.info("Bitline leaves %s to vLLM: %s", model, error)
        return False
