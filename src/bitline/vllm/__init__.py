"""Bitline inside vLLM: a plug-in that vLLM loads by itself, through the entry point `vllm.general_plugins`.

Nothing of vLLM is imported before `register` runs.
"""

from __future__ import annotations

import importlib

from bitline import env
from bitline.vllm.engine import VLLM

MODES = ("off", "kernels", "all")
TESTED = ("0.32",)  # releases of vLLM, by the start of their version


def register() -> None:
    """Offer Bitline's kernels, checkpoints and loader to vLLM. vLLM calls this in each of its processes, maybe repeatedly.

    It never raises, since that would end the server: where Bitline cannot join, one error in vLLM's log says why.
    """
    log = VLLM.log
    mode = env.vllm_mode()
    if mode not in MODES:
        log.error("Bitline is off: BITLINE_VLLM is %r, expected one of %s", mode, ", ".join(MODES))
        return
    if mode == "off":
        return
    import vllm

    if not vllm.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        log.warning("Bitline is tested with vLLM %s; this is %s", ", ".join(TESTED), vllm.__version__)
    try:
        importlib.import_module("bitline.vllm.plugin").register(mode)
    except Exception as error:  # a release whose parts have moved may raise anything
        log.error("Bitline is off: it does not fit vLLM %s (%s: %s); it is tested with %s", vllm.__version__,
                  type(error).__name__, error, ", ".join(TESTED))  # fmt: skip
