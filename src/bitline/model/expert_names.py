"""Where a checkpoint's expert tensors belong in transformers' fused experts modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

UP_NAMES = ("gate_up_proj", "up_proj")  # the first projection, gated or not
DOWN_NAME = "down_proj"
# Keys of configurations for the number of experts of a token
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
# experts.3.up_proj, experts.gate_up_proj.3, blk.0.ffn_up_exps.3
EXPERT_LAYER = re.compile(r"(?:^|\.)experts\.(?:\w+\.)?(\d+)(?:\.|$)|_exps\.(\d+)$")
_GGUF_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps(?:\.(\d+))?")


def top_k_of(config: Any) -> int:
    """Experts of a token by transformers' configuration; 1 where it does not say."""
    config = config.get_text_config()
    return next((v for key in TOP_K_KEYS if isinstance(v := getattr(config, key, None), int) and v > 0), 1)


def expert_number(name: str) -> int | None:
    """The number of the expert that a layer of a checkpoint belongs to."""
    found = EXPERT_LAYER.search(name)
    return None if found is None else int(found[1] or found[2])


class ExpertPlace(NamedTuple):
    """One expert's matrix in a fused parameter.

    module: of the experts. parameter: of it. expert: its number; None for all experts in one tensor. part, parts: which of
    `parts` equal ranges of the parameter's rows it is; of a gated projection 0 is the gate and 1 is "up".
    """

    module: str
    parameter: str
    expert: int | None
    part: int
    parts: int


def stacks_of(state_dict: Mapping[str, Any]) -> set[str]:
    """Names of a model's fused expert parameters."""
    leaves = (*UP_NAMES, DOWN_NAME)
    return {name for name, t in state_dict.items() if t.dim() == 3 and name.rpartition(".")[2] in leaves}


def place_of_converted(target: str, name: str, pattern: str, patterns: list[str], stacks: set[str]) -> ExpertPlace | None:
    """The place of a tensor `name` that one of transformers' converters fuses into `target`.

    pattern: of the converter's `patterns`, the one that the name matched, with one number of any size for the expert.
    """
    if target not in stacks:
        return None
    number = re.search(_with_number(pattern), name) or re.search(r"experts\.(\d+)\.", name)
    if number is None:
        return None
    module, _, parameter = target.rpartition(".")
    return ExpertPlace(module, parameter, int(number[1]), patterns.index(pattern), len(patterns))


def _with_number(pattern: str) -> str:
    """A converter's pattern as an expression whose first group is the expert's number."""
    literal = pattern.replace(r"\.", ".").replace(r"\d+", "*")
    return re.escape(literal).replace(r"\*", r"(\d+)", 1)


def place_in_stack(target: str, expert: int | None, stacks: set[str]) -> ExpertPlace | None:
    """The place of an expert of a tensor that is stacked as the parameter `target` is."""
    module, _, parameter = target.rpartition(".")
    return ExpertPlace(module, parameter, expert, 0, 1) if target in stacks else None


def gguf_place(name: str, stacks: set[str]) -> ExpertPlace | None:
    """The place of a GGUF stack `blk.3.ffn_up_exps`, or of one expert of it, `blk.3.ffn_up_exps.7`."""
    found = _GGUF_STACK.fullmatch(name)
    if found is None:
        return None
    layer, kind, expert = found[1], found[2], None if found[3] is None else int(found[3])
    in_layer = {s.rpartition(".")[2]: s.rpartition(".")[0] for s in stacks if re.search(rf"\blayers\.{layer}\.", s)}
    if kind == "down":
        parameter, part, parts = DOWN_NAME, 0, 1
    elif kind == "gate_up" or "gate_up_proj" not in in_layer:
        parameter, part, parts = ("gate_up_proj" if kind == "gate_up" else "up_proj"), 0, 1
    else:
        parameter, part, parts = "gate_up_proj", int(kind == "up"), 2
    module = in_layer.get(parameter)
    return None if module is None else ExpertPlace(module, parameter, expert, part, parts)
