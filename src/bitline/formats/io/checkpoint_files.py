"""Which files of a folder are the checkpoint: one safetensors file, an index and its shards, or a numbered series."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from bitline.errors import CheckpointError
from bitline.formats.io.json_object import parse_object, read_limited

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def choose_files(folder: Path) -> tuple[list[Path], tuple[Path, dict[str, str]] | None]:
    """The safetensors files of a folder, and, where an index lists them, its path and its weight_map."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single], None
    indexes = sorted(p for p in folder.glob("*.safetensors.index.json") if p.is_file())
    main = folder / "model.safetensors.index.json"
    if main in indexes or len(indexes) == 1:
        index = main if main in indexes else indexes[0]
        return _indexed_files(folder, index)
    files = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    if not files:
        raise _no_files(folder)
    _check_series(folder, files)
    return files, None


def _indexed_files(folder: Path, index: Path) -> tuple[list[Path], tuple[Path, dict[str, str]]]:
    weight_map = _read_weight_map(index)
    shards = dict.fromkeys(weight_map.values())
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            "shards that the index names are missing", file=index, field="weight_map", found=f"no {', '.join(missing[:3])}",
            expected=f"all {len(shards)} files", fix="finish the download",
        )  # fmt: skip
    return [folder / shard for shard in shards], (index, weight_map)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = parse_object(read_limited(index, "index"), index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no weight_map", file=index, field="weight_map", expected='{"weight_map": {tensor: file}}'
        )
    inside = {shard: _stays_inside(shard) for shard in set(filter(lambda s: isinstance(s, str), weight_map.values()))}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not inside[shard]:
            raise CheckpointError(
                "the index names a file outside the checkpoint's folder", file=index, tensor=ascii(name), field="weight_map",
                found=ascii(shard), expected="the name of a file in it",
            )  # fmt: skip
    return weight_map


def _stays_inside(name: str) -> bool:
    """Judged by the name alone: a symbolic link may point anywhere, which is how download caches are built."""
    parts = PurePosixPath(name).parts
    return bool(parts) and name.isprintable() and not (name.startswith("/") or ".." in parts or "\\" in name or ":" in name)


def _check_series(folder: Path, files: list[Path]) -> None:
    """Without an index, the shard numbers in file names (`model-00001-of-00003`) show whether one is missing."""
    series: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", file.name):
            series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), found in series.items():
        if len(found) < count:
            raise CheckpointError(
                "shards are missing", file=folder, found=f"{len(found)} files {stem}-*-of-{count:05d}.safetensors",
                expected=count, fix="finish the download",
            )  # fmt: skip


def _no_files(folder: Path) -> CheckpointError:
    entries = sorted(p.name for p in folder.iterdir())
    pickles = [name for name in entries if Path(name).suffix.lower() in PICKLES]
    if pickles:
        return pickle_error(folder, pickles[0])
    found = "an empty folder" if not entries else f"{len(entries)} other entries, such as {entries[0]}"
    return CheckpointError("no weights in this folder", file=folder, found=found, expected="*.safetensors or one *.gguf file")


def pickle_error(path: Path, name: str) -> CheckpointError:
    """The refusal of a pickle, which could run code on loading."""
    return CheckpointError(
        "the weights are pickled, and pickle is never loaded: it can run any code", file=path, found=name,
        expected="*.safetensors", fix="convert it to safetensors where you trust it, or get the safetensors version",
    )  # fmt: skip
