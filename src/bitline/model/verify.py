"""Verification of a loaded model: layers against the float64 reference, and the first layer whose output overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bitline.act_quant import fake_quantize
from bitline.errors import InputError, VerificationError
from bitline.experts import ExpertStack, QuantExperts
from bitline.linear import QuantLinear
from bitline.model import decode_step
from bitline.model.embedding import QuantEmbedding
from bitline.model.expert_names import top_k_of
from bitline.model.known_modules import is_known_layer
from bitline.model.layer_check import LayerCheck, fault_of
from bitline.model.packed_differences import packed_differences
from bitline.model.plan import plan, quant_linears
from bitline.model.verify_fused import DECODE_STEP, check_decode_step, check_experts
from bitline.testing.tolerance import compare_batches, compare_outputs
from bitline.weight import QuantizedWeight

_MAX_N = 1024  # output features compared; a vocabulary of 150,000 in float64 would take gigabytes


@dataclass(frozen=True)
class Overflow:
    """The first layer whose output is not finite. bad: NaN or infinite values; values: all values."""

    layer: str
    bad: int
    values: int


def find_overflow(model: Any, ids: torch.Tensor) -> Overflow | None:
    """Run a model on token ids [1, T]: the first quantized layer whose output has NaN or infinity, None where all are finite."""
    found: list[Overflow] = []

    def record(name: str, y: torch.Tensor) -> None:
        bad = int((~torch.isfinite(y)).sum())
        if bad and not found:
            found.append(Overflow(name, bad, y.numel()))

    watched = [*quant_linears(model), *((n, m) for n, m in model.named_modules() if isinstance(m, QuantExperts))]
    hooks = [layer.register_forward_hook(lambda _module, _args, y, name=name: record(name, y)) for name, layer in watched]
    try:
        with torch.inference_mode():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def check_layers(model: Any, batch_sizes: tuple[int, ...] = (1, 17)) -> list[LayerCheck]:
    """Compare one layer of each spec with the reference, on random input at each of these M; of experts the first."""
    checks = []
    for row in plan(model):
        name = row.names[0]
        checks += list(check_layer(model.get_submodule(name), model.bitline_weights[name](), name, batch_sizes))
    return checks


def verify(model: Any) -> list[LayerCheck]:
    """Compare a loaded model's packed layers with the checkpoint that they came from.

    The model: of `load_model`, of transformers' `from_pretrained` with a BitlineConfig, either with PEFT's adapters around its
    layers; or any module with QuantLinears. Of tensor-parallel models this rank's layers.

    Every layer, experts included, is packed again from the checkpoint and must have the same packed tensors, bit for bit. Then it
    runs on random input at M = 1 and 17 (of a stack of experts the first one), which must agree with the reference in float64
    within the tolerance of `bitline.testing.compare`. A layer that no checkpoint is known of can only be compared with its own
    packed weight, as `Kernel.unpack` gives it: that finds a kernel that computes wrong outputs, and not a wrong packed tensor.
    What runs as one call, all experts of a layer and the native decode step, is then compared with float64 too.

    Args:
        model: A torch module.

    Returns:
        The checks of outputs, those nearest to what is allowed first.

    Raises:
        VerificationError: Where a layer is off, with the worst one's name, what differs and how many others there are.
        InputError: For a module without packed layers.
    """
    checks = [*_checks(model)]
    checks += _fused_checks(model, {check.layer for check in checks if not check.ok})
    checks.sort(key=lambda check: -check.badness)
    if not checks and _checkpoint_path(model) is None:
        raise InputError("nothing to verify", found=f"no packed layer in {type(model).__name__}",
                         expected="a model of bitline.load_model, or a module with a QuantLinear")  # fmt: skip
    failed = [check for check in checks if not check.ok]
    if failed:
        raise _failure(failed, _checkpoint_path(model))
    return checks


def _failure(failed: list[LayerCheck], path: Any) -> VerificationError:
    worst, layers = failed[0], {check.layer for check in failed}
    others = f"; {len(layers) - 1} other layers are off too" if len(layers) > 1 else ""
    if worst.fault:
        return VerificationError("a layer differs from its checkpoint", file=path, tensor=worst.layer, found=worst.fault + others,
                                 expected="what the kernel packs of the checkpoint", fix="load the model again")  # fmt: skip
    leave_out = f"Policy(disabled={{{worst.kernel!r}}}) leaves the kernel out"
    if worst.kernel == DECODE_STEP:
        leave_out = "load_model(native_step=False) leaves it out"
    return VerificationError(
        "a layer's output is not the reference's", file=path, tensor=worst.layer,
        found=f"an error of {worst.error:.3g} with {worst.kernel} at M={worst.m}{others}",
        expected=f"at most {worst.allowed:.3g}",
        fix=f"{leave_out}; please report it",
    )  # fmt: skip


def _checks(model: Any) -> Iterator[LayerCheck]:
    """The checks of all packed modules of a loaded model."""
    weights = _weights_by_module(model)
    for name, module in model.named_modules():
        if not isinstance(module, QuantLinear | ExpertStack | QuantEmbedding):
            continue
        read = weights.get(id(module))
        if read is None:
            if not isinstance(module, QuantEmbedding):
                yield from check_against_itself(module, name)
            continue
        differences = list(packed_differences(module, read, name))
        yield from (fault_of(*difference) for difference in differences)
        if not differences and not isinstance(module, QuantEmbedding):  # a kernel may do anything on tensors that are not its own
            yield from check_layer(module, read(), name)


def _fused_checks(model: Any, failed: set[str]) -> Iterator[LayerCheck]:
    """The checks of what a loaded model runs as one call, where its layers are sound. failed: names of layers that are not."""
    weights = _weights_by_module(model)
    for name, module in model.named_modules():
        if any(layer.startswith(f"{name}.") for layer in failed):
            continue
        reads = {leaf: weights[id(part)] for leaf, part in module.named_modules() if id(part) in weights}
        if isinstance(module, QuantExperts) and module.is_one_call and {"up.0", "down"} <= reads.keys():
            top_k = top_k_of(model.config) if hasattr(model, "config") else 1
            yield from check_experts(module, reads["up.0"], reads["down"], name, top_k)
        elif is_known_layer(module) and decode_step.has_native_step(module):
            yield from check_decode_step(module, reads, name)


def _weights_by_module(model: Any) -> dict[int, Callable[..., QuantizedWeight]]:
    """What reads the canonical weight of a packed module, by the module's id."""
    found: dict[int, Callable[..., QuantizedWeight]] = {}
    for owner in model.modules():
        reads = owner.__dict__.get("bitline_weights")
        if reads is None:
            continue
        for name, module in owner.named_modules(remove_duplicate=False):
            # PEFT puts a layer inside of its adapter, under this name.
            if (read := reads.get(name.replace(".base_layer", ""))) is not None:
                found[id(module)] = read
    return found


def _checkpoint_path(model: Any) -> Any:
    checkpoints = (owner.__dict__.get("bitline_checkpoint") for owner in model.modules())
    return next((checkpoint.path for checkpoint in checkpoints if checkpoint is not None), None)


def check_layer(
    layer: QuantLinear | ExpertStack, weight: QuantizedWeight, name: str, batch_sizes: tuple[int, ...] = (1, 17), *,
    every_row: bool = False,
) -> Iterator[LayerCheck]:  # fmt: skip
    """Compare one layer with the reference on random input at each M. weight: what the layer packed; of experts the first.

    The first 1024 rows of the weight count. every_row: all of them at the smallest M, at others the first and the last 2048 (in
    float32, whose baseline takes long, 512).
    """
    bias: torch.Tensor | None
    run: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(layer, ExpertStack):
        bias, device, run = None if layer.bias is None else layer.bias[0], layer.device, layer.layer(0)
    else:
        bias, device, run = layer._buffers["bias"], layer._packed[0].device, layer
    dtype, n = layer.spec.act_dtype, weight.spec.n
    whole = weight.with_bias(None if bias is None else bias.cpu()).with_act_dtype(dtype)
    inputs = [torch.randn(m, weight.spec.k, generator=torch.Generator().manual_seed(m)).to(dtype) for m in batch_sizes]
    with torch.inference_mode():
        outputs = [run(x.to(device)).cpu() for x in inputs]
    rows = _edges(n, dtype) if every_row else [(0, min(_MAX_N, n))]
    found = compare_batches(outputs, inputs, whole, rows)
    if every_row and rows != [(0, n)]:
        smallest = batch_sizes.index(min(batch_sizes))
        found[smallest] = compare_batches([outputs[smallest]], [inputs[smallest]], whole, [(0, n)])[0]
    for m, one in zip(batch_sizes, found, strict=True):
        yield LayerCheck(name, layer.choice.best.name, m, one.error, one.allowed, one.nmse, one.cosine)


def _edges(n: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """The first and the last rows of n, or all of a few."""
    size = 512 if dtype == torch.float32 else 2048
    return [(0, n)] if n <= 2 * size else [(0, size), (n - size, n)]


def check_against_itself(layer: QuantLinear | ExpertStack, name: str) -> Iterator[LayerCheck]:
    """Compare a layer's output on random input with the weight that its kernel unpacks, in float64; of experts the first.

    Raises:
        InputError: Where the kernel cannot unpack it, or activations have a static scale, which is inside the packed tensors.
    """
    run: Callable[[torch.Tensor], torch.Tensor]
    multiplier: torch.Tensor | None = None
    if isinstance(layer, ExpertStack):
        packed, run = [t[0] for t in layer.packed], layer.layer(0)
        bias = None if layer.bias is None else layer.bias[0].cpu()
    else:
        packed, run, bias, multiplier = layer._packed, layer, layer._buffers["bias"], layer._buffers["input_multiplier"]
        bias = None if bias is None else bias.cpu()
    spec = layer.spec.replace(bias=False)
    if spec.act is not None and (not spec.act.dynamic or spec.act.scale == "e4m3"):
        raise InputError("a layer with static activation scales is verified against its checkpoint alone", tensor=name,
                         found="no checkpoint", fix="verify the model that load_model returned")  # fmt: skip
    device, dtype = packed[0].device, spec.act_dtype
    w = layer.choice.kernel.unpack(packed, spec).cpu()
    for m in (1, 17):
        x = torch.randn(m, spec.k, generator=torch.Generator().manual_seed(m)).to(dtype)
        with torch.inference_mode():
            y = run(x.to(device)).cpu()
        seen = x if multiplier is None else (x.float() * multiplier.cpu().float()).to(dtype)
        seen = seen if spec.act is None else fake_quantize(seen, spec.act, None, None)
        exact = seen.double() @ w.double().T + (0 if bias is None else bias.double())
        own = torch.nn.functional.linear(seen.to(dtype), w, None if bias is None else bias.to(dtype))
        # The unpacked weight is rounded to dtype, which the kernel's own need not be.
        rounding = torch.finfo(dtype).eps * float((seen.double().abs() @ w.double().abs().T).max())
        found = compare_outputs(y, exact, own)
        allowed = found.allowed + rounding
        yield LayerCheck(name, layer.choice.best.name, m, found.error, allowed, found.nmse, found.cosine)
