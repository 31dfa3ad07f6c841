"""Which layers `load_model` packs as one, worked out from their names and specs: what is known before a weight is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bitline.model.merge import SIBLINGS
from bitline.model.merge_weights import merge_key, merged_spec
from bitline.platform import Platform
from bitline.select import Policy, choose
from bitline.types import LinearSpec

_GGUF = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))  # llama.cpp's names of such layers


class MergedKind(NamedTuple):
    """Layers that become one, with one spec.

    Attributes:
        spec: Of the merged layer.
        leaves: The last components of the parts' names.
        parts: Their specs.
        names: For each merged layer the names of its parts.
    """

    spec: LinearSpec
    leaves: tuple[str, ...]
    parts: tuple[LinearSpec, ...]
    names: list[tuple[str, ...]]

    def merged_names(self) -> list[str]:
        """The merged layers' names: their module's as `load_model` calls it, where the checkpoint has transformers' names."""
        leaf = SIBLINGS.get(self.leaves, "+".join(self.leaves))
        return [f"{parts[0].removesuffix('.weight').rpartition('.')[0]}.{leaf}".lstrip(".") for parts in self.names]


def merged_kinds(spec_of: Mapping[str, LinearSpec], platform: Platform, policy: Policy) -> list[MergedKind]:
    """The kinds of layers that are merged, by their names in the checkpoint; `load_model` also asks the model's class.

    Values are not read: global scales are taken to be equal, scales per tensor to differ. spec_of: the layers by name.
    """
    found: dict[tuple[LinearSpec, tuple[str, ...], tuple[LinearSpec, ...]], list[tuple[str, ...]]] = defaultdict(list)
    for names, leaves, parts in _groups(spec_of):
        merged = merged_spec(parts)
        if merged is not None:
            found[merged, leaves, parts].append(names)
    return [MergedKind(*kind, names) for kind, names in found.items() if is_faster(kind[0], kind[2], platform, policy)]


def is_faster(merged: LinearSpec, parts: Sequence[LinearSpec], platform: Platform, policy: Policy) -> bool:
    """Whether one call is estimated to take no longer than one for each part. Measured times do not count, so that it is not
    tuning that decides which layers there are."""
    one, *apart = (choose(s, platform, policy, measured={}).best.estimated_score for s in (merged, *parts))
    return one <= sum(apart)


def may_differ(spec: LinearSpec) -> bool:
    """Whether a merged layer would have values once that differ between such layers, which are then not merged."""
    act, scale2 = spec.act, spec.scale2_block
    return (
        spec.act_order or spec.input_multiplier or (act is not None and (not act.dynamic or act.scale == "e4m3"))
        or (scale2 is not None and scale2 == (spec.n, spec.k))
    )  # fmt: skip


def _groups(
    spec_of: Mapping[str, LinearSpec],
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], tuple[LinearSpec, ...]]]:
    """Names, leaf names and specs of layers of one parent and one scheme, at least two each."""
    by_parent: dict[str, dict[str, tuple[str, LinearSpec]]] = defaultdict(dict)
    for name, spec in spec_of.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        by_parent[parent][leaf] = name, spec
    for children in by_parent.values():
        for siblings in (*SIBLINGS, *_GGUF):
            same: dict[Hashable, list[str]] = defaultdict(list)
            for leaf in siblings if all(name in children for name in siblings) else ():
                if (key := merge_key(children[leaf][1])) is not None:
                    same[key].append(leaf)
            for leaves in same.values():
                if len(leaves) > 1:
                    names, specs = zip(*(children[leaf] for leaf in leaves), strict=True)
                    yield names, tuple(leaves), specs
