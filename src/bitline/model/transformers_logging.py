"""Logging of transformers around a command that prints its own output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bitline.model.meta_model import import_transformers


@contextmanager
def suppress_transformers_logging() -> Iterator[None]:
    """Silence transformers' warnings and progress bars, and restore its verbosity afterwards. Needs transformers."""
    import_transformers()
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()
