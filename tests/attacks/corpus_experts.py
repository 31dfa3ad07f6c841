"""Attacks on mixture-of-experts checkpoints. Importing this file adds them to the corpus."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bases import DTYPES, Q8_0, TYPE_F32, entry, gguf_bytes, pair, q8_0, random_int32, random_scales, write
from corpus import ATTACKS, Attack
from torch import Tensor

DTYPES |= {torch.float8_e4m3fn: "F8_E4M3"}
E, HIDDEN, INNER, VOCABULARY = 4, 64, 32, 32
MOE = "model.layers.0.mlp.experts"
Tensors = dict[str, Tensor]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 64,
    "moe_intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": VOCABULARY, "num_experts": E, "num_experts_per_tok": 2, "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}},
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
       "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate."]}  # fmt: skip


# ---- the bases -----------------------------------------------------------------------------------------------------------


def dense() -> Tensors:
    """Everything but the experts."""
    shapes = {"q_proj": (64, HIDDEN), "k_proj": (32, HIDDEN), "v_proj": (32, HIDDEN), "o_proj": (HIDDEN, 64)}
    layer = "model.layers.0"
    tensors = {f"{layer}.self_attn.{name}.weight": random_scales(*shape) for name, shape in shapes.items()}
    tensors |= {f"{layer}.self_attn.{name}_norm.weight": torch.ones(32) for name in "qk"}
    tensors |= {f"{layer}.{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
    tensors |= {f"{layer}.mlp.gate.weight": random_scales(E, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    return tensors | {name: random_scales(VOCABULARY, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}


def packed(name: str, n: int, k: int) -> Tensors:
    """One layer."""
    return {f"{name}.weight_packed": random_int32(n, k // 8), f"{name}.weight_scale": random_scales(n, k // 32),
            f"{name}.weight_shape": torch.tensor([n, k])}  # fmt: skip


def one_expert(e: object, prefix: str = MOE) -> Tensors:
    """Gate, up and down of an expert."""
    sides = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {key: t for leaf, shape in sides.items() for key, t in packed(f"{prefix}.{e}.{leaf}", *shape).items()}


def each() -> Tensors:
    """Layers of single experts."""
    return dense() | {key: t for e in range(E) for key, t in one_expert(e).items()}


def unquantized() -> Tensors:
    """Unquantized experts beside a quantized layer."""
    tensors = dense() | packed("model.layers.0.self_attn.q_proj", 64, HIDDEN)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    for e in range(E):
        tensors |= {f"{MOE}.{e}.{leaf}_proj.weight": random_scales(INNER, HIDDEN) for leaf in ("gate", "up")}
        tensors |= {f"{MOE}.{e}.down_proj.weight": random_scales(HIDDEN, INNER)}
    return tensors


def stacks() -> Tensors:
    """All experts in one tensor."""
    shapes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return dense() | {key: t for leaf, shape in shapes.items() for key, t in fp8_stack(leaf, E, *shape).items()}


def fp8_stack(leaf: str, experts: int, n: int, k: int) -> Tensors:
    return {f"{MOE}.{leaf}.weight": random_scales(experts, n, k).to(torch.float8_e4m3fn),
            f"{MOE}.{leaf}.weight_scale_inv": random_scales(experts, n // 32, k // 32, dtype=torch.float32)}  # fmt: skip


BASES: dict[str, tuple[Callable[[], Tensors], dict[str, Any]]] = {
    "each": (each, PACKED), "stacks": (stacks, FP8),
    "unquantized": (unquantized, PACKED | {"ignore": [*PACKED["ignore"][::2], "re:.*experts.*", "re:.*[kvo]_proj"]}),
}  # fmt: skip


def experts(
    base: str, name: str, says: str, change: Callable[[Tensors], Any] = lambda t: None, tensor: str | None = None,
    config: dict[str, Any] | None = None, **facts: Any,
) -> None:  # fmt: skip
    """An attack on a model. change: edits its tensors. config: changes to it."""

    def build(folder: Path) -> Path:
        make, quantization = BASES[base]
        tensors = make()
        change(tensors)
        return write(folder, tensors, config=CONFIG | {"quantization_config": quantization} | (config or {}))

    ATTACKS.append(Attack(f"experts-{base}-{name}", build, says, tensor, model=True, **facts))


def without(*parts: str) -> Callable[[Tensors], None]:
    """Removes the tensors whose names have one of these parts."""

    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if any(part in name for part in parts)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


def with_more(more: Callable[[], Tensors]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update(more())


# ---- single experts ------------------------------------------------------------------------------------------------------

for _base in BASES:
    experts(_base, "valid", ".", harmless=True)
experts("each", "missing", "an expert is missing", without("experts.2."))
experts("each", "last-missing", "an expert is missing", without("experts.3."))
experts("each", "all-missing", "lacks 2 of the model's tensors", without("experts."), MOE + ".down_proj")
experts("each", "down-missing", "an expert is missing", without("experts.1.down_proj"))
experts("each", "all-down-missing", "lacks", without("down_proj"), MOE + ".down_proj")
experts("each", "gate-without-up", "an expert is missing", without("experts.1.up_proj"))
experts("each", "all-gates-without-up", "an expert is missing", without("up_proj"))
experts("each", "beyond-the-config", "the configuration does not have", with_more(lambda: one_expert(E)))
experts("each", "far-beyond-the-config", "the configuration does not have", with_more(lambda: one_expert(10**30)))
experts("each", "number-of-5000-digits", ".", with_more(lambda: one_expert("9" * 5000)))
experts("each", "number-with-a-zero", "two tensors hold one expert's weight", with_more(lambda: one_expert("01")))
experts("each", "number-in-other-digits", "two tensors hold one expert's weight", with_more(lambda: one_expert("١")))
experts("each", "negative-number", ".", with_more(lambda: one_expert(-1)))
experts("each", "no-number", ".", with_more(lambda: one_expert("x")))
experts("each", "fewer-in-the-config", "the configuration does not have|different shape", config={"num_experts": 3})
experts("each", "more-in-the-config", "is missing|different shape", config={"num_experts": 5})
for _many in (10**7, 1 << 31, 1 << 62):
    experts("each", f"{_many}-in-the-config", ".", config={"num_experts": _many}, huge=True)
    experts("stacks", f"{_many}-in-the-config", ".", config={"num_experts": _many}, huge=True)
    experts("unquantized", f"{_many}-in-the-config", ".", config={"num_experts": _many}, huge=True)
for _base in BASES:
    experts(_base, "wide-in-the-config", "different shape|is missing", huge=True,
            config={"num_experts": 4096, "moe_intermediate_size": 1 << 19})  # fmt: skip
for _k in (0, -1, 5, 1 << 40, "2", 1.5, None):
    experts("each", f"top-{_k}", ".", config={"num_experts_per_tok": _k}, harmless=None)
for _e in (0, -1, "4", None, 4.0):
    experts("each", f"{_e!r}-experts", ".", config={"num_experts": _e}, harmless=None)
experts("each", "of-another-width", "different shape", lambda t: t.update(packed(f"{MOE}.1.down_proj", HIDDEN, 64)),
        f"{MOE}.1.down_proj")  # fmt: skip
experts("each", "of-another-height", "different shape", lambda t: t.update(packed(f"{MOE}.2.up_proj", 40, HIDDEN)),
        f"{MOE}.2.up_proj")  # fmt: skip
experts("each", "gate-and-up-of-one-sum", "different shape",
        lambda t: t.update(packed(f"{MOE}.0.gate_proj", 24, HIDDEN) | packed(f"{MOE}.0.up_proj", 40, HIDDEN)))  # fmt: skip
experts("each", "of-a-layer-beyond-the-config", ".",
        with_more(lambda: one_expert(0, "model.layers.1.mlp.experts")))  # fmt: skip
experts("each", "beside-a-stack", "some experts of a layer are quantized and others are not", lambda t: t.update(
    {f"{MOE}.down_proj": random_scales(E, HIDDEN, INNER)}))  # fmt: skip
experts("each", "one-unquantized", "an expert is missing",
        lambda t: (
    without("experts.1.down_proj")(t), t.update({f"{MOE}.1.down_proj.weight": random_scales(HIDDEN, INNER)})))  # fmt: skip
experts("each", "one-twice-unquantized", "an expert is missing|nothing uses",
        lambda t: t.update({f"{MOE}.1.down_proj.weight": random_scales(HIDDEN, INNER)}))  # fmt: skip
experts("each", "dense-mlp-in-its-place", ".", lambda t: t.update(packed("model.layers.0.mlp.up_proj", 64, HIDDEN)))

# ---- unquantized ones ----------------------------------------------------------------------------------------------------

ONE = f"{MOE}.1.up_proj.weight"
experts("unquantized", "missing", "an expert is missing", without("experts.1.up_proj"))
experts("unquantized", "all-down-missing", "lacks", without("down_proj"))
experts("unquantized", "wide", "different shape", lambda t: t.update({ONE: random_scales(INNER, 2 * HIDDEN)}), ONE)
experts("unquantized", "flat", "different shape", lambda t: t.update({ONE: random_scales(INNER * HIDDEN)}), ONE)
experts("unquantized", "transposed", "different shape", lambda t: t.update({ONE: random_scales(HIDDEN, INNER)}), ONE)
experts("unquantized", "one-row", "different shape", lambda t: t.update({ONE: random_scales(1, HIDDEN)}), ONE)
for _dtype in (torch.int32, torch.int64, torch.int16, torch.uint8):
    experts("unquantized", f"codes-{_dtype}", "quantized tensor", lambda t, d=_dtype: t.update(
        {ONE: random_int32(INNER, HIDDEN).to(d)}), ONE)  # fmt: skip
experts("unquantized", "codes-without-scales", "lacks a tensor", lambda t: t.update(
    {ONE: random_int32(INNER, HIDDEN).to(torch.int8)}), f"{ONE}_scale")  # fmt: skip
experts("unquantized", "beyond-the-config", "does not have", lambda t: t.update(
    {f"{MOE}.4.up_proj.weight": random_scales(INNER, HIDDEN)}), f"{MOE}.4.up_proj.weight")  # fmt: skip
experts("unquantized", "number-with-a-zero", "twice", lambda t: t.update(
    {f"{MOE}.01.up_proj.weight": random_scales(INNER, HIDDEN)}))  # fmt: skip
experts("unquantized", "number-of-5000-digits", ".", lambda t: t.update(
    {f"{MOE}.{'9' * 5000}.up_proj.weight": random_scales(INNER, HIDDEN)}))  # fmt: skip
experts("unquantized", "beside-a-stack", "two tensors", lambda t: t.update({f"{MOE}.down_proj": random_scales(E, HIDDEN, INNER)}))

# ---- stacks --------------------------------------------------------------------------------------------------------------

for _count in (1, 3, 5):
    experts("stacks", f"of-{_count}", "is missing|does not have|different shape", lambda t, count=_count: t.update(
        fp8_stack("down_proj", count, HIDDEN, INNER)))  # fmt: skip
experts("stacks", "of-another-width", "different shape", lambda t: t.update(fp8_stack("down_proj", E, HIDDEN, 64)))
experts("stacks", "up-alone", "no module for", lambda t: (
    without("gate_up_proj")(t), t.update(fp8_stack("up_proj", E, INNER, HIDDEN))))  # fmt: skip
experts("stacks", "gate-and-up-apart-too", ".", lambda t: t.update(fp8_stack("up_proj", E, INNER, HIDDEN)))
experts("stacks", "one-expert-beside", "two tensors|is missing|different shape|does not", lambda t: t.update({
    f"{MOE}.1.down_proj.weight": random_scales(HIDDEN, INNER).to(torch.float8_e4m3fn),
    f"{MOE}.1.down_proj.weight_scale_inv": random_scales(2, 1, dtype=torch.float32)}))  # fmt: skip
experts("stacks", "scales-of-one-expert-less", ".", lambda t: t.update(
    {f"{MOE}.down_proj.weight_scale_inv": random_scales(E - 1, 2, 1, dtype=torch.float32)}))  # fmt: skip
experts("stacks", "without-scales", ".", without("down_proj.weight_scale_inv"))

# ---- GGUF ----------------------------------------------------------------------------------------------------------------

WIDTH = 768  # of an expert, Qwen3-30B-A3B's
_SIDES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
Stack = tuple[int, int, int, int]  # type, experts, N, K


@functools.cache
def _q8_0(n: int, k: int) -> bytes:
    return q8_0(n, k)


def gguf_model(sides: dict[str, Stack], **changes: int) -> bytes:
    """A Qwen3-MoE of one layer with these stacks of experts. changes: to its metadata."""
    settings = {
        "block_count": 1, "context_length": 32, "embedding_length": HIDDEN, "feed_forward_length": 64, "expert_count": E,
        "expert_used_count": 2, "expert_feed_forward_length": WIDTH, "vocab_size": VOCABULARY, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.key_length": 32, "attention.value_length": 32,
    } | changes  # fmt: skip
    pairs = [pair("general.architecture", 8, "qwen3moe"), pair("qwen3moe.attention.layer_norm_rms_epsilon", 6, 1e-6)]
    pairs += [pair(f"qwen3moe.{key}", 4, value) for key, value in settings.items()]
    norms = {"attn_q_norm": 32, "attn_k_norm": 32, "attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    shapes = {"attn_q": (64, HIDDEN), "attn_k": (32, HIDDEN), "attn_v": (32, HIDDEN), "attn_output": (HIDDEN, 64)}
    floats: dict[str, tuple[int, ...]] = {f"blk.0.{name}": (size,) for name, size in norms.items()}
    floats |= {"output_norm": (HIDDEN,), "blk.0.ffn_gate_inp": (E, HIDDEN)}
    quantized = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    quantized |= {f"blk.0.{name}": shape for name, shape in shapes.items()}
    tensors = {name: (TYPE_F32, shape, np.ones(shape, np.float32).tobytes()) for name, shape in floats.items()}
    tensors |= {name: (Q8_0, shape, _q8_0(*shape)) for name, shape in quantized.items()}
    for name, (kind, count, n, k) in sides.items():
        raw = _q8_0(n, k) * count if kind == Q8_0 else np.full((count, n, k), 0.01, np.float32).tobytes()
        tensors[f"blk.0.ffn_{name}_exps"] = (kind, (count, n, k), raw)
    entries, data = [], b""
    for name, (kind, shape, raw) in tensors.items():
        entries.append(entry(f"{name}.weight", list(shape[::-1]), kind, len(data)))
        data += raw + bytes(-len(raw) % 32)
    return gguf_bytes(pairs, entries, data)


def gguf_experts(name: str, says: str, changes: dict[str, Stack | None], tensor: str | None = None, harmless: bool = False,
                 huge: bool = False, **metadata: int) -> None:  # fmt: skip
    """An attack on the stacks of a file; None takes one away."""

    def build(folder: Path) -> Path:
        usual: dict[str, Stack | None] = {side: (Q8_0, E, *shape) for side, shape in _SIDES.items()}
        kept = {side: stack for side, stack in (usual | changes).items() if stack is not None}
        (folder / "model.gguf").write_bytes(gguf_model(kept, **metadata))
        return folder / "model.gguf"

    ATTACKS.append(Attack(f"gguf-experts-{name}", build, says, tensor, "model.gguf", True, huge, harmless))


gguf_experts("valid", ".", {}, harmless=True)
gguf_experts(
    "valid-up-unquantized", ".", {"up": (TYPE_F32, E, WIDTH, HIDDEN), "gate": (TYPE_F32, E, WIDTH, HIDDEN)}, harmless=True
)
gguf_experts("gate-without-up", "an expert is missing", {"up": None})
gguf_experts("down-missing", "lacks", {"down": None})
gguf_experts("up-unquantized", "an expert is missing", {"up": (TYPE_F32, E, WIDTH, HIDDEN)})
gguf_experts("3-downs", "an expert is missing", {"down": (Q8_0, 3, HIDDEN, WIDTH)})
gguf_experts("5-downs", "the configuration does not have", {"down": (Q8_0, 5, HIDDEN, WIDTH)})
gguf_experts("3-unquantized-downs", "different shape|is missing", {"down": (TYPE_F32, 3, HIDDEN, WIDTH)})
gguf_experts("narrow-down", "different shape", {"down": (Q8_0, E, HIDDEN, 512)})
gguf_experts("gate-and-up-in-one-too", ".", {"gate_up": (Q8_0, E, 2 * WIDTH, HIDDEN)})
gguf_experts("8-experts-in-the-metadata", "is missing|different shape", {}, expert_count=8)
gguf_experts("2^31-experts-in-the-metadata", ".", {}, expert_count=1 << 31, huge=True)
