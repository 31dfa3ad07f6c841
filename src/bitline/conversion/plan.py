"""What is to become of each layer of a conversion, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitline.conversion.base import NotExact
from bitline.conversion.original import Layer
from bitline.types import LinearSpec


@dataclass
class Plan:
    """What is to become of a layer, from its header. form: what it is rounded to, or None. plain: stored as plain weights."""

    layer: Layer
    spec: LinearSpec
    forms: list[LinearSpec] = field(default_factory=list)
    fallback: LinearSpec | None = None
    plain: bool = False
    refused: NotExact | None = None


@dataclass(frozen=True)
class Written:
    """What became of a layer. form: None where it was stored as plain weights. digest: of a rounded weight."""

    plan: Plan
    form: LinearSpec | None
    changes: tuple[str, ...]
    nbytes: int
    digest: str = ""
