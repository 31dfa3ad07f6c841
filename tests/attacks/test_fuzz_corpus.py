"""The fuzz targets on their seeds, without a fuzzer, and regression tests of what fuzzing found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from bases import FAMILIES, LAYER, group, packed, write
from outcomes import time_limit

import bitline
from bitline import CheckpointError

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.append(str(FUZZ))

import fuzz_targets  # noqa: E402
import make_corpus  # noqa: E402

SEEDS = sorted(file.relative_to(FUZZ / "corpus") for file in (FUZZ / "corpus").glob("*/*"))


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_seed(seed):
    with time_limit():
        fuzz_targets.TARGETS[seed.parent.name]((FUZZ / "corpus" / seed).read_bytes())


def test_seeds_are_up_to_date_and_most_of_them_open():
    made = {Path(target) / name: data for target, files in make_corpus.seeds().items() for name, data in files.items()}
    assert made == {seed: (FUZZ / "corpus" / seed).read_bytes() for seed in SEEDS}
    assert {seed.parent.name for seed in made} == set(fuzz_targets.TARGETS)
    opened = sum(fuzz_targets.TARGETS[seed.parent.name](data) for seed, data in made.items())
    assert opened > len(made) * 0.8


@pytest.mark.parametrize(
    ("target", "data"),
    [
        ("safetensors", b""), ("safetensors", b"{"), ("safetensors", b"\xff" * 30), ("index", b""), ("gguf", b""),
        ("config", b""), ("config", b"mystery\n{}"), ("weights", b"gptq\n{\n"), ("weights", b"mystery\n\n"),
        ("weights", b"gptq\n\n\x00\x00\x00"),
        ("safetensors", b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}}'),
    ],
)  # fmt: skip
def test_a_target_takes_any_bytes(target, data):
    fuzz_targets.TARGETS[target](data)


def test_a_target_sees_a_wrong_weight(monkeypatch):
    """A weight that is off by one code anywhere is a wrong weight."""
    real = bitline.QuantizedWeight.dequantize

    def wrong(self, *args):
        out = real(self, *args).clone()
        out[0, 0] += 1
        return out

    monkeypatch.setattr(bitline.QuantizedWeight, "dequantize", wrong)
    with pytest.raises(AssertionError, match="a wrong weight"):
        fuzz_targets.weights(b"gptq\n\n")


def test_a_target_sees_another_exception(monkeypatch):
    monkeypatch.setattr(bitline, "open_checkpoint", lambda path: {}["a"])
    with pytest.raises(KeyError):
        fuzz_targets.config(b"gptq\n{}")


# ---- regressions ---------------------------------------------------------------------------------------------------------


def refused(folder: Path, tensors: dict[str, torch.Tensor], config: object, tensor: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        for record in bitline.open_checkpoint(write(folder, tensors, config)).layers():
            record.weight()
    assert caught.value.tensor == f"{LAYER}.{tensor}", caught.value
    return caught.value


@pytest.mark.parametrize("shape", [(64, 1, 1), (1, 64, 1), (1, 1, 64)])
def test_a_g_idx_of_three_dimensions_is_not_a_stack_of_experts(shape, tmp_path):
    """Dropping it would lose the order of the columns."""
    tensors, config = packed()
    order = (torch.arange(64) * 5 % 2).int().reshape(shape)
    refused(tmp_path, tensors | {f"{LAYER}.weight_g_idx": order}, config, "weight_g_idx")


@pytest.mark.parametrize("base", ["fp8", "fp8_block", "modelopt_nvfp4", "int8"])
def test_a_bias_of_three_dimensions_is_not_a_stack_of_experts(base, tmp_path):
    """Dropping it would lose the bias."""
    tensors, config = FAMILIES[base]()
    bias = torch.ones(32, 1, 1).to(torch.float8_e4m3fn)
    refused(tmp_path, tensors | {f"{LAYER}.bias": bias}, config, "bias")


def test_ambiguous_group_sizes_of_a_preset_are_refused(tmp_path):
    """Three groups of 100 columns may be 34, 34 and 32, or 40, 40 and 20 columns."""
    parts = {
        "weight_packed": torch.zeros(4, 13).int(), "weight_scale": torch.ones(4, 3).half(),
        "weight_shape": torch.tensor([4, 100]),
    }  # fmt: skip
    config = group({}) | {"config_groups": {"W4A16": ["Linear"]}, "format": "pack-quantized"}
    refused(tmp_path, {f"{LAYER}.{name}": tensor for name, tensor in parts.items()}, config, "weight_scale")
