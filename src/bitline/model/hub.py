"""Checkpoints by their names on the Hugging Face hub, downloaded by huggingface_hub into its own cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bitline.errors import BitlineError, CheckpointError

FILES = ("*.json", "*.safetensors", "*.gguf", "*.model", "*.txt", "*.jinja", "tokenizer*")
_FOLDER_FILES = tuple(pattern for pattern in FILES if pattern != "*.gguf")  # a repository may hold a model in twenty sizes
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/(.+\.gguf))?")


def resolve(model: str | Path) -> Path:
    """A local path as it is; a name on the hub (ORG/NAME, or ORG/NAME/FILE.gguf) as the path of its downloaded copy.

    Raises CheckpointError as `download`, and for a repository of GGUF files of which none is named.
    """
    path = Path(model).expanduser()
    name = str(model)
    if path.exists() or name.startswith(".") or _NAME.fullmatch(name) is None:
        return path
    folder = download(name, _FOLDER_FILES)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise CheckpointError("the hub's repository has no config.json", file=name,
                              fix=f"for a GGUF file name it: {name}/FILE.gguf")  # fmt: skip
    return folder


def download(name: str, files: Sequence[str] = FILES, *, revision: str | None = None, cache: str | Path | None = None) -> Path:
    """The folder, or the GGUF file, of a checkpoint on the hub; only what the cache lacks is downloaded.

    name: ORG/NAME, or ORG/NAME/FILE.gguf for one file. files: patterns of the files that a folder needs. revision: a branch, tag
    or commit. cache: the hub's cache folder; by default its own. Without a network the cache's copy is taken.

    Raises:
        CheckpointError: Where the hub does not have it, or cannot be reached and the cache does not have it.
        BitlineError: Without the huggingface_hub package.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise BitlineError(
            "a checkpoint by its name on the hub needs huggingface_hub", fix="pip install 'bitline[models]'"
        ) from error
    found = _NAME.fullmatch(name)
    repository, file = (name, None) if found is None else found.groups()
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, revision=revision, cache_dir=cache))
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "no such file or folder here, and the Hugging Face hub did not give it", file=name,
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix="give a local path or a name of the hub; HF_TOKEN opens gated models; without a network, run "
            f"`hf download {repository}` elsewhere and copy the folder here",
        ) from error  # fmt: skip
