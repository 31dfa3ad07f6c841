"""The error of a conversion that would not be exact: the layers, the reasons, and what would work instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bitline.conversion.exact import exact_encoding
from bitline.conversion.plan import LayerPlan, can_store_all
from bitline.conversion.source_model import SourceModel
from bitline.conversion.target import NotRepresentable, Target
from bitline.conversion.targets import TARGETS
from bitline.errors import BitlineError, ConversionError

_MAX_NAMED = 4  # layers that the message names, and that are tried in other formats
_MAX_REASONS = 3


def refusal(
    source: SourceModel, target: Target, plans: Mapping[str, LayerPlan], refused: Mapping[str, NotRepresentable], *, lossy: bool
) -> ConversionError:
    """A ConversionError for layers that a target cannot represent exactly. Its `layers` has every layer's reason."""
    names = list(refused)
    more = f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    reasons = "; ".join(_distinct_reasons(refused)[:_MAX_REASONS])
    return ConversionError(
        f"{target.name} cannot represent {len(names)} of {len(plans)} layers exactly", file=source.checkpoint.path,
        tensor=names[0], found=f"{', '.join(names[:_MAX_NAMED])}{more}: {reasons}",
        fix="; or ".join(_fixes(source, target, plans, refused, lossy=lossy)) or None,
        layers={name: str(error) for name, error in refused.items()},
    )  # fmt: skip


def _distinct_reasons(refused: Mapping[str, NotRepresentable]) -> list[str]:
    """The reasons, the first of those that differ in numbers only."""
    return list({re.sub(r"\d+", "", str(error)): str(error) for error in reversed(list(refused.values()))}.values())[::-1]


def _fixes(
    source: SourceModel, target: Target, plans: Mapping[str, LayerPlan], refused: Mapping[str, NotRepresentable], *, lossy: bool
) -> list[str]:
    """What a user could do: an option that a reason names, another format, or rounding."""
    names = list(refused)
    fixes = list(dict.fromkeys(error.fix for error in refused.values() if error.fix))
    formats = _other_formats(source, target, plans, names)
    if formats:
        certainty = "can" if len(names) <= _MAX_NAMED else "should"  # not every layer was tried
        listed = " or ".join(filter(None, [", ".join(formats[:-1]), formats[-1]]))
        fixes.append(f"--to {listed} {certainty} represent {'them' if len(names) > 1 else 'it'} exactly")
    if not lossy and _can_round(target, plans, refused) and not any("--lossy" in fix for fix in fixes):
        fixes.append("--lossy requantizes them")
    return fixes


def _other_formats(source: SourceModel, target: Target, plans: Mapping[str, LayerPlan], names: list[str]) -> list[str]:
    """Formats that represent all layers exactly: by the specs of all, and by trying the first of those refused here."""
    found: list[str] = []
    if any(plans[name].spec.block_offset != (0, 0) for name in names):
        return found
    for to, target_class in TARGETS.items():
        if to == target.name or (to == "gguf" and source.checkpoint.is_gguf):
            continue
        other = target_class()
        try:
            if can_store_all(other, plans.values()):
                for name in names[:_MAX_NAMED]:
                    plan = plans[name]
                    exact_encoding(other, plan.layer.read(), other.stored_specs(plan.spec))
                found.append(to)
        except (NotRepresentable, BitlineError):
            continue
    return found


def _can_round(target: Target, plans: Mapping[str, LayerPlan], refused: Mapping[str, NotRepresentable]) -> bool:
    try:
        for name in refused:
            target.lossy_spec(plans[name].spec.replace(block_offset=(0, 0)))
    except NotRepresentable:
        return False
    return True
