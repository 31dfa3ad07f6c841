"""Layers that `load_model` packs as one on a GPU, for `bitline explain`: what they become, and the estimated times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from bitline.model.merge import SIBLINGS
from bitline.model.merge_weights import merge_key, merged_spec
from bitline.platform import Platform
from bitline.select import Policy, choose
from bitline.types import LinearSpec

_GGUF = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))  # llama.cpp's names of such layers


def merged_layers(layers: Mapping[LinearSpec, Sequence[str]], platform: Platform, policy: Policy) -> list[dict[str, Any]]:
    """One entry for each kind of merged layer, by the names in the checkpoint; `load_model` also asks the model's class.

    Values are not read: global scales are taken to be equal. layers: names by spec.
    """
    counts: dict[tuple[LinearSpec, tuple[str, ...], tuple[LinearSpec, ...]], int] = defaultdict(int)
    for leaves, specs in _groups({name: spec for spec, names in layers.items() for name in names}):
        merged = merged_spec(specs)
        if merged is not None:
            counts[merged, leaves, specs] += 1
    found = []
    for (merged, leaves, specs), count in counts.items():
        one, *apart = (choose(spec, platform, policy) for spec in (merged, *specs))
        if one.best.estimated_score <= sum(c.best.estimated_score for c in apart):
            found.append({
                "names": list(leaves), "layers": count, "shape": [merged.n, merged.k], "kernel": one.best.name,
                "cost_seconds": _costs([one]), "separate_seconds": _costs(apart),
            })  # fmt: skip
    return found


def _groups(spec_of: Mapping[str, LinearSpec]) -> Iterator[tuple[tuple[str, ...], tuple[LinearSpec, ...]]]:
    """The leaf names and specs of layers of one parent and one scheme, at least two each."""
    by_parent: dict[str, dict[str, LinearSpec]] = defaultdict(dict)
    for name, spec in spec_of.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        by_parent[parent][leaf] = spec
    for children in by_parent.values():
        for siblings in (*SIBLINGS, *_GGUF):
            same: dict[Hashable, list[str]] = defaultdict(list)
            for leaf in siblings:
                if leaf in children and all(name in children for name in siblings) and merge_key(children[leaf]) is not None:
                    same[merge_key(children[leaf])].append(leaf)
            yield from ((tuple(v), tuple(children[leaf] for leaf in v)) for v in same.values() if len(v) > 1)


def _costs(choices: Sequence[Any]) -> dict[str, float]:
    """Seconds by M, of all choices."""
    best = [choice.best for choice in choices]
    return {str(m): sum(c.costs[i] for c in best) for i, m in enumerate(best[0].m)} if all(c.costs for c in best) else {}
