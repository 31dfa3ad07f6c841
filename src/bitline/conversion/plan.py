"""What to do with each layer of a conversion, decided from its spec, and what was done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bitline.conversion.source_model import EMBEDDINGS, QuantizedLayer, SourceModel
from bitline.conversion.target import NotRepresentable, Target
from bitline.types import LinearSpec


@dataclass
class LayerPlan:
    """What to do with a layer.

    refused: why it cannot be converted, if set. Otherwise one of: stored_specs, to try in turn for an exact re-encoding;
    lossy_spec, to round to; dequantize, to store an unquantized tensor.
    """

    layer: QuantizedLayer
    spec: LinearSpec
    stored_specs: list[LinearSpec] = field(default_factory=list)
    lossy_spec: LinearSpec | None = None
    dequantize: bool = False
    refused: NotRepresentable | None = None

    @property
    def stored_spec(self) -> LinearSpec | None:
        """The first choice of stored spec, exact or lossy; None for a layer that is dequantized or refused."""
        return self.stored_specs[0] if self.stored_specs else self.lossy_spec


@dataclass(frozen=True)
class WrittenLayer:
    """What was written for a layer. stored: its spec, None if it was stored unquantized. digest: of a rounded weight, else ""."""

    plan: LayerPlan
    stored: LinearSpec | None
    changes: tuple[str, ...]
    nbytes: int
    digest: str = ""


def plan_layers(source: SourceModel, target: Target, *, lossy: bool, weights_only: bool) -> dict[str, LayerPlan]:
    """A plan for each layer, by name, whose stored specs agree with each other where the format needs them to."""
    plans = {layer.name: _plan_layer(layer, target, lossy=lossy, weights_only=weights_only) for layer in source.layers}
    first = {name: plan.stored_spec for name, plan in plans.items()}
    agreed, conflicts = target.reconcile({name: spec for name, spec in first.items() if spec is not None})
    for name, spec in agreed.items():
        plan = plans[name]
        if plan.stored_specs:
            plan.stored_specs[0] = spec
        else:
            plan.lossy_spec = spec
    for name, reason in conflicts.items():
        plans[name].refused = reason
    return plans


def _plan_layer(layer: QuantizedLayer, target: Target, *, lossy: bool, weights_only: bool) -> LayerPlan:
    spec = layer.record.spec
    if weights_only:
        spec = spec.replace(act=None)
    plan = LayerPlan(layer, spec)
    if not target.quantizes_embeddings and layer.name.rpartition(".")[2] in EMBEDDINGS and is_weight_alone(spec):
        plan.dequantize = True
        return plan
    try:
        if spec.block_offset != (0, 0):
            raise NotRepresentable("it is a shard that starts inside a scale block")
        plan.stored_specs = target.stored_specs(spec)
    except NotRepresentable as error:
        plan_without_exact(plan, error, target, lossy=lossy)
    return plan


def plan_without_exact(plan: LayerPlan, reason: NotRepresentable, target: Target, *, lossy: bool) -> None:
    """Change a plan whose exact re-encoding is impossible: dequantize an embedding or head, else round it, else refuse it."""
    plan.stored_specs = []
    if plan.layer.is_embedding_or_head and is_weight_alone(plan.spec):
        plan.dequantize = True
        return
    plan.refused = reason
    if lossy:
        try:
            plan.lossy_spec = target.lossy_spec(plan.spec.replace(block_offset=(0, 0)))
            plan.refused = None
        except NotRepresentable as other:
            plan.refused = other


def is_weight_alone(spec: LinearSpec) -> bool:
    """True for a layer without activation quantization and input factors, which a dequantized tensor can replace."""
    return spec.act is None and not spec.input_multiplier


def can_store_all(target: Target, plans: Iterable[LayerPlan]) -> bool:
    """Whether a target has a stored spec for every layer and one config for all of them, as far as the specs tell."""
    first: dict[LinearSpec, LinearSpec] = {}
    stored: dict[str, LinearSpec] = {}
    for plan in plans:
        try:
            if plan.spec not in first:
                first[plan.spec] = target.stored_specs(plan.spec)[0]
            stored[plan.layer.name] = first[plan.spec]
        except NotRepresentable:
            if not (plan.layer.is_embedding_or_head and is_weight_alone(plan.spec)):
                return False
    return not target.reconcile(stored)[1]
