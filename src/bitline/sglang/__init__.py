"""Bitline inside SGLang: a plug-in that SGLang loads by itself, through the entry point `sglang.srt.plugins`.

Nothing of SGLang is imported before `register` runs.
"""

from __future__ import annotations

import importlib

from bitline.sglang.engine import SGLANG

TESTED = ("0.5.23",)  # releases of SGLang whose interfaces the tests hold


def register() -> None:
    """Offer `quantization="bitline"` to SGLang, which calls this in each of its processes, maybe repeatedly.

    It never raises, since that would hide the reason in a traceback: where Bitline cannot join, one error in the log says why.
    """
    log, version = SGLANG.log, "of an unknown version"
    try:
        version = importlib.import_module("sglang.version").__version__
        if version not in TESTED:
            log.warning("Bitline is tested with SGLang %s; this is %s", ", ".join(TESTED), version)
        importlib.import_module("bitline.sglang.plugin").register()
    except Exception as error:  # a release whose parts have moved may raise anything
        log.error("Bitline is off: it does not fit SGLang %s (%s: %s); it is tested with %s", version,
                  type(error).__name__, error, ", ".join(TESTED))  # fmt: skip
