"""All of Bitline's torch operators, for programs that run exported or compiled graphs without building a layer first."""

from __future__ import annotations

import importlib

_MODULES = ("linear", "experts", "ops", "model.embedding", "kernels.cpu.native_linear")


def register_operators() -> None:
    """Register every `bitline::` operator with torch.

    Modules that define layers register theirs when they are imported; a program that only loads a graph (`torch.export.load`,
    `torch._inductor.aoti_load_package`) calls this before.
    """
    for module in _MODULES:
        importlib.import_module(f"bitline.{module}")
