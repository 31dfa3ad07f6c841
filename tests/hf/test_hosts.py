"""Readers, kernels and models give the same bits whatever the host process has set."""

import sys
from pathlib import Path

import pytest
import torch
from hosts import HOSTS
from loading import IDS, through_transformers

import bitline
from bitline.linear import QuantLinear
from thinning import thinned
from tiny import compressed, llama

ATTACKS = Path(__file__).parents[1] / "attacks"
sys.path.append(str(ATTACKS))

import bases  # noqa: E402  # needs the path
import bases_gguf  # noqa: E402
import bases_more  # noqa: E402, F401  # adds to bases.FAMILIES
import bases_variants  # noqa: E402, F401
from whole_models import CHECKPOINTS, FIXTURES, complete  # noqa: E402

HOST = pytest.mark.parametrize("host", HOSTS)
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16", "W3A16", "W8A8", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4A16")


def tensors(weight):
    return {name: tensor for name, tensor in weight._fields().items() if tensor is not None}


def read(path):
    """(spec, tensors) of each layer, and the unquantized tensors."""
    checkpoint = bitline.open_checkpoint(path)
    layers = {}
    for record in checkpoint.layers():
        weight = record.weight()
        assert record.spec == weight.spec or record.spec.n == weight.spec.n
        layers[record.name] = weight.spec, tensors(weight)
    return layers, {name: checkpoint.read(name) for name in checkpoint.dense_names()}


def same(a, b):
    """Equal bits, dtypes and devices, NaN included."""
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


def assert_read_the_same(path, host):
    layers, plain = read(path)
    with HOSTS[host]():
        found_layers, found_plain = read(path)
        checked = {name: record.spec for name, record in ((r.name, r) for r in bitline.open_checkpoint(path).layers())}
    assert layers and layers.keys() == found_layers.keys() == checked.keys() and plain.keys() == found_plain.keys()
    for name, (spec, fields) in layers.items():
        assert found_layers[name][0] == spec and found_layers[name][1].keys() == fields.keys()
        assert all(same(tensor, found_layers[name][1][field]) for field, tensor in fields.items()), name
    assert all(same(tensor, found_plain[name]) for name, tensor in plain.items())


@HOST
@pytest.mark.parametrize("fixture", thinned(FIXTURES, 6))
def test_readers_on_fixtures(fixture, host):
    assert_read_the_same(CHECKPOINTS / fixture, host)


@HOST
@pytest.mark.parametrize("family", thinned(sorted(bases.FAMILIES), 6))
def test_readers_on_small_files(family, host, tmp_path):
    assert_read_the_same(bases.write(tmp_path, *bases.FAMILIES[family]()), host)


@HOST
@pytest.mark.parametrize("kind", thinned(sorted(bases_gguf.TYPES), 6))
def test_reader_of_gguf(kind, host, tmp_path):
    (tmp_path / "model.gguf").write_bytes(bases_gguf.file(kind)[0])
    assert_read_the_same(tmp_path / "model.gguf", host)


@HOST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels(scheme, dtype, host):
    torch.manual_seed(0)
    weight, x = bitline.quantize(torch.randn(48, 256), scheme), torch.randn(5, 256).to(dtype)
    candidates = bitline.choose(weight.with_act_dtype(dtype).spec, bitline.Platform.detect("cpu")).candidates
    names = [candidate.name for candidate in candidates if candidate.verdict.ok]
    assert "ReferenceLinearKernel" in names and len(names) > 2
    for name in names:
        with torch.no_grad():
            expected = QuantLinear(weight, act_dtype=dtype, kernel=name)(x)
        with HOSTS[host]():
            layer = QuantLinear(weight, act_dtype=dtype, device="cpu", kernel=name)
            y = layer(x)
        assert same(expected, y), name
        assert not any(b.is_meta for b in layer.buffers())


@HOST
@pytest.mark.parametrize("scheme", ["W4A16", "FP8_BLOCK", "NVFP4"])
def test_quantization_and_shards(scheme, host):
    torch.manual_seed(0)
    w = torch.randn(64, 256)
    expected = bitline.quantize(w, scheme)
    with HOSTS[host]():
        found = bitline.quantize(w, scheme)
        rows, values = found.take_rows(torch.arange(64, device="cpu").flip(0)), found.dequantize(torch.bfloat16)
        shard = found.shard(1, rank=1, world=2)
    assert all(same(tensor, tensors(found)[name]) for name, tensor in tensors(expected).items())
    assert same(expected.dequantize(torch.bfloat16), values)
    assert same(expected.take_rows(torch.arange(64).flip(0)).codes, rows.codes)
    assert same(expected.shard(1, rank=1, world=2).scale, shard.scale)


@HOST
@pytest.mark.parametrize("load", [bitline.load_model, through_transformers])
@pytest.mark.parametrize("fixture", [None, "bnb_nf4", "gq_w3g32_asym_descact_v1"])
def test_models(fixture, load, host, tmp_path):
    folder = compressed(tmp_path, llama())[0] if fixture is None else complete(fixture, tmp_path)
    with torch.no_grad():
        expected = bitline.load_model(folder, dtype=torch.bfloat16)(IDS).logits
    with HOSTS[host]():
        options = {} if load is bitline.load_model else {"device_map": "cpu"}
        model = load(folder, dtype=torch.bfloat16, **options)
    with torch.no_grad():
        assert same(expected, model(IDS).logits)
