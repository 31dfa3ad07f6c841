"""Layers that `load_model` packs as one on a GPU, for `bitline explain`: what they become, and the estimated times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitline.model.merged_specs import merged_kinds
from bitline.platform import Platform
from bitline.select import Policy, choose
from bitline.types import LinearSpec


def merged_layers(layers: Mapping[LinearSpec, Sequence[str]], platform: Platform, policy: Policy) -> list[dict[str, Any]]:
    """One entry for each of `merged_kinds`. layers: names by spec."""
    found = []
    for kind in merged_kinds({name: spec for spec, names in layers.items() for name in names}, platform, policy):
        one, *apart = (choose(spec, platform, policy) for spec in (kind.spec, *kind.parts))
        found.append({
            "names": list(kind.leaves), "layers": len(kind.names), "shape": [kind.spec.n, kind.spec.k], "kernel": one.best.name,
            "cost_seconds": _costs([one]), "separate_seconds": _costs(apart),
        })  # fmt: skip
    return found


def _costs(choices: Sequence[Any]) -> dict[str, float]:
    """Seconds by M, of all choices."""
    best = [choice.best for choice in choices]
    return {str(m): sum(c.costs[i] for c in best) for i, m in enumerate(best[0].m)} if all(c.costs for c in best) else {}
