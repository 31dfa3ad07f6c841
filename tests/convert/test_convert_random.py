"""Random canonical weights: every format represents each exactly or refuses it."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from expected import LLAMA
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import bitline
from bitline import types
from bitline.conversion import TARGETS
from bitline.errors import ConversionError
from bitline.formats import discovery
from bitline.formats.base import LayerRecord
from bitline.formats.quant_config import quantization_config
from bitline.testing.generators import random_spec, random_weight
from bitline.types import LinearSpec

LAYER = "model.layers.0.mlp.up_proj"


class MemoryReader:
    """A reader of layers that are in memory only."""

    name = "memory"

    def __init__(self, weights):
        self.weights = weights

    def matches(self, source):
        return quantization_config(source).get("quant_method") == "memory"

    def layers(self, source):
        for name, weight in self.weights.items():
            yield LayerRecord(name, "memory", weight.spec, (f"{name}.memory",), lambda w=weight: w)


def attempt(weights, to, **how):
    """Convert these weights. -> the report, or the refusal's reasons by layer."""
    known = list(discovery.registered)
    discovery.registered[:] = [MemoryReader(weights)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            source.mkdir()
            (source / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "memory"}}))
            save_file({f"{name}.memory": torch.zeros(1, dtype=torch.uint8) for name in weights}, source / "model.safetensors")
            result = Path(folder) / ("result.gguf" if to == "gguf" else "result")
            try:
                return bitline.convert(source, result, to=to, **how)
            except ConversionError as error:
                assert error.layers and not result.exists()
                return error.layers
            finally:
                assert sorted(p.name for p in Path(folder).iterdir()) in (["source"], sorted(["source", result.name]))
    finally:
        discovery.registered[:] = known


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_weight(seed):
    weight = random_weight(random_spec(seed), seed)
    for to in TARGETS:
        found = attempt({LAYER: weight}, to)
        assert isinstance(found, dict) or found.exact
        rounded = attempt({LAYER: weight}, to, lossy=True, weights_only=True)
        if isinstance(found, dict) and not isinstance(rounded, dict) and weight.spec.act is None:
            assert not rounded.exact


INTEGERS = [types.SCALAR_TYPES[f"uint{b}"] for b in range(1, 9)] + [types.unsigned(b, symmetric=True) for b in range(2, 9)]


@settings(max_examples=60, deadline=None)
@given(
    scalar=st.sampled_from([*INTEGERS, types.int8, types.uint2b1]), n=st.sampled_from([8, 32, 40, 64]),
    k=st.sampled_from([32, 64, 96, 256, 288]), size=st.sampled_from([16, 32, 64, 128, 0]), order=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]), seed=st.integers(0, 1 << 32),
)  # fmt: skip
def test_integers_with_16_bit_scales_are_always_exact(scalar, n, k, size, order, dtype, seed):
    """Integers in whole groups with 16-bit scales fit compressed-tensors and, where they fill whole int32, GPTQ."""
    zero = "none" if scalar.bias or scalar.signed else "int"
    block = (1, size if 0 < size < k else k)
    order = order and block[1] < k and k % block[1] == 0
    spec = LinearSpec(n, k, scalar, block, scale_dtype=dtype, zero=zero, act_order=order)
    weights = {LAYER: random_weight(spec, seed)}
    fills_int32 = k % 32 == 0 and (scalar.bits not in (3, 5, 6, 7) or n % 32 == 0)
    for to, sure in (("compressed-tensors", not order), ("gptq", fills_int32), ("awq", not order and scalar.bits <= 4)):
        found = attempt(weights, to)
        assert isinstance(found, dict) != sure, (to, found)
        assert isinstance(found, dict) or found.exact
    found = attempt(weights, "gguf")
    sure = not order and (spec.block[1] % 32 == 0 or block[1] == k) and zero == "none" and dtype == torch.float16
    assert not sure or not isinstance(found, dict), found


def test_offsets_that_are_multiples_of_the_scale_become_zero_points():
    """Q4_1's and HQQ's offsets: exact if and only if -offset is an integer multiple of the scale in every group."""
    spec = LinearSpec(32, 64, types.uint4, (1, 32), scale_dtype=torch.float16, zero="float")
    weight = random_weight(spec, 1)
    steps = torch.randint(0, 16, spec.grid)
    scale = (torch.randint(64, 128, spec.grid) * 2.0**-14).half()  # 7 bits, so that products with 4 bits are exact in float16
    whole = bitline.QuantizedWeight(spec, weight.codes, scale, offset=-(steps * scale.float()).half())
    assert attempt({LAYER: whole}, "gptq").exact and attempt({LAYER: whole}, "gguf").exact
    changed = whole.offset.clone()
    changed[3, 1] = torch.nextafter(changed[3, 1], torch.tensor(-1.0, dtype=torch.float16))
    one_off = bitline.QuantizedWeight(spec, weight.codes, scale, offset=changed)
    found = attempt({LAYER: one_off}, "gptq")
    assert isinstance(found, dict) and "1 of 64 offsets" in found[LAYER]
    assert not isinstance(attempt({LAYER: one_off}, "gguf"), dict)


@pytest.mark.parametrize("power", [True, False])
def test_global_scale_conventions_are_exchanged_only_if_exact(power):
    """A multiplier that is a power of two has an exact divisor; 0.1 has none."""
    spec = LinearSpec(32, 64, types.float4_e2m1, (1, 16), scale_dtype=torch.float8_e4m3fn, scale2_block=(32, 64))
    weight = random_weight(spec, 2)
    factor = torch.tensor([[2.0**-9 if power else 0.1]], dtype=torch.float32).double()
    weight = bitline.QuantizedWeight(spec, weight.codes, weight.scale, scale2=factor)
    found = attempt({LAYER: weight}, "compressed-tensors")
    assert isinstance(found, dict) != power
    assert attempt({LAYER: weight}, "modelopt").exact


def test_refusals_name_layers_reason_and_alternatives():
    nf4 = LinearSpec(32, 64, types.nf4, (1, 64), scale_dtype=torch.float32)
    e4m3 = LinearSpec(32, 64, types.float8_e4m3fn, (1, 64), scale_dtype=torch.float32)
    weights = {f"model.layers.{i}.mlp.up_proj": random_weight(e4m3, i) for i in range(6)}
    with pytest.raises(AssertionError, match="--to compressed-tensors"):
        refused(weights, "gptq", AssertionError)
    with pytest.raises(AssertionError, match=", and 2 more:"):
        refused(weights, "gptq", AssertionError)
    only = {LAYER: random_weight(nf4, 1)}
    with pytest.raises(AssertionError, match=r"gptq cannot represent 1 of 1 layers exactly.*codes are nf4.*--lossy"):
        refused(only, "gptq", AssertionError)


def refused(weights, to, kind):
    """Raise the refusal's text as another error, for pytest.raises."""
    known = list(discovery.registered)
    discovery.registered[:] = [MemoryReader(weights)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "memory"}}))
            save_file({f"{n}.memory": torch.zeros(1, dtype=torch.uint8) for n in weights}, Path(folder) / "model.safetensors")
            bitline.convert(folder, Path(folder) / "result", to=to)
    except ConversionError as error:
        raise kind(str(error)) from error
    finally:
        discovery.registered[:] = known
