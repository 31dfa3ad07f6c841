"""The serving engine that a plug-in works for: its name in messages, and its log."""

from __future__ import annotations

import logging
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """A serving engine.

    name: as its users write it. logger: a logger below the engine's own, so that its handlers, format and levels apply.
    """

    name: str
    logger: str

    @property
    def log(self) -> logging.Logger:
        """Bitline's logger in this engine."""
        return logging.getLogger(self.logger)
