"""Fixtures of the smaller families against their producers' dequantization (expected_other.json); a writer of tiny files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bitline import open_checkpoint

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
EXPECTED = json.loads((CHECKPOINTS / "expected_other.json").read_text())


def cases(*prefixes):
    """Names of the fixtures with one of these prefixes."""
    return [case for case in EXPECTED if case.startswith(prefixes)]


def check(case):
    """Every layer of a producer's checkpoint is bit-equal to its own dequantization, claims its tensors, and has no warnings."""
    checkpoint = open_checkpoint(CHECKPOINTS / case)
    assert checkpoint.dense_names() == []
    for layer in checkpoint.layers():
        weight = layer.weight()
        assert weight.spec == layer.spec and not layer.oddities
        assert layer.nbytes == sum(checkpoint.source.tensors[name].nbytes for name in layer.tensors)
        entry = EXPECTED[case].get(layer.name)
        if entry is not None:
            found = weight.dequantize(getattr(torch, entry.get("through", entry["dtype"]))).to(getattr(torch, entry["dtype"]))
            digest = hashlib.sha256((found + 0.0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            assert digest == entry["sha256"], layer.name
    assert EXPECTED[case].keys() <= {layer.name for layer in checkpoint.layers()}
    return checkpoint


def write(folder, config, tensors, metadata=None, modules=None, model="llama"):
    """A checkpoint of these tensors of the module "m.proj", opened. modules: tensors by their full names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model, "quantization_config": config}))
    whole = {f"m.proj.{name}": tensor.contiguous() for name, tensor in tensors.items()} | (modules or {})
    save_file(whole, folder / "model.safetensors", metadata)
    return open_checkpoint(folder)


def one(folder, config, tensors, metadata=None):
    """The only layer of such a checkpoint."""
    (layer,) = write(folder, config, tensors, metadata).layers()
    return layer
