"""The `bitline` command in a process of its own, without the seconds that importing torch and transformers takes each time.

The process is forked from a server that has imported them. What it does from there on is what `python -m bitline` does: its
arguments, environment, streams, signals and exit status are its own. That `python -m bitline` starts is tested apart.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

# What takes its time. None of them may start a thread, which a fork would lose.
IMPORTED = (
    "bitline.cli.main", "bitline.model.load", "bitline.model.generate", "bitline.kernels.registry", "transformers",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _child(arguments: list[str], env: Mapping[str, str], folder: str, out: str, err: str) -> None:
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, mode, encoding=encoding) for i, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["bitline", *arguments]
    from bitline.cli import console, main

    console.out.__init__()  # type: ignore[misc]  (they take their width from the environment when they are made)
    console.err.__init__(stderr=True)  # type: ignore[misc]
    main.run()


def bitline(*arguments: object, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `bitline` with these arguments, and variables beside the process's own; what it printed, and its exit status."""
    texts = [str(argument) for argument in arguments]
    settings = {**os.environ, "COLUMNS": "200", "TERM": "dumb", **env}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = _server().Process(target=_child, args=(texts, settings, str(Path.cwd()), str(out), str(err)))
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            raise subprocess.TimeoutExpired(["bitline", *texts], timeout)
        return subprocess.CompletedProcess(["bitline", *texts], child.exitcode, out.read_text(), err.read_text())
