"""Every fixture into every format: exact where expected.LOSSLESS says so, refused with a reason everywhere else."""

import bases
import bases_more  # noqa: F401  # adds to bases.FAMILIES
import bases_variants  # noqa: F401
import pytest
import torch
from expected import FIXTURES, LLAMA, LOSSLESS, fixture_with_config

import bitline
from bitline.conversion import TARGETS
from bitline.errors import ConversionError


def dequantized_bits(weight):
    values = weight.dequantize()
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)


def assert_equal(a, b):
    """Two layers have the same dequantized weight, bias and activation quantization."""
    one, other = a.weight(), b.weight()
    assert torch.equal(dequantized_bits(one), dequantized_bits(other)), a.name
    assert one.spec.act == other.spec.act
    for part in ("bias", "input_scale", "input_zero", "input_multiplier"):
        x, y = getattr(one, part), getattr(other, part)
        if part.startswith("input_") and one.spec.act is None and part != "input_multiplier":
            continue
        assert (x is None) == (y is None), part
        assert x is None or torch.equal(x.float().flatten(), y.float().flatten()), part


def exact_targets(source, folder, expected=None):
    """Convert into every format. -> those that are exact. expected: the formats that must be, and no others."""
    exact = set()
    for to in TARGETS:
        result = folder / to / ("model.gguf" if to == "gguf" else "model")
        try:
            report = bitline.convert(source, result, to=to)
        except ConversionError as error:
            assert expected is None or to not in expected, f"{to}: {error}"
            assert error.layers and all(error.layers.values()), error
            assert not (folder / to).exists() or not list((folder / to).iterdir())
            continue
        assert report.exact and report.to == to
        exact.add(to)
        assert expected is None or to in expected, f"{to} is exact, which the table does not say"
        if to != "gguf":  # names and rows differ there: see test_convert_gguf
            before, after = bitline.open_checkpoint(source), bitline.open_checkpoint(result)
            assert after.format == to and not [o for r in after.layers() for o in r.oddities]
            assert {r.name for r in before.layers()} == {r.name for r in after.layers()}
            for record in before.layers():
                assert_equal(record, after.layer(record.name))
            assert set(before.dense_names()) == set(after.dense_names())
    return exact


@pytest.mark.parametrize("name", FIXTURES)
def test_fixtures(name, tmp_path):
    expected = LOSSLESS.get(name)
    source = fixture_with_config(name, tmp_path / "source")
    exact = exact_targets(source, tmp_path / "out", None if expected is None else set(expected.split()))
    assert expected is None or exact == set(expected.split())


def test_the_table_has_existing_fixtures_only():
    assert set(LOSSLESS) <= set(FIXTURES)


@pytest.mark.parametrize("family", bases.FAMILIES)
def test_families(family, tmp_path):
    """Random codes and scales of every family: exact or refused."""
    tensors, config = bases.FAMILIES[family]()
    (tmp_path / "source").mkdir()
    source = bases.write(tmp_path / "source", tensors, config=LLAMA | {"quantization_config": config})
    exact = exact_targets(source, tmp_path / "out")
    always = {"gptq": "gptq", "awq": "awq", "packed": "compressed-tensors", "int8": "compressed-tensors",
              "fp8": "compressed-tensors", "nvfp4": "compressed-tensors", "mxfp4": "compressed-tensors"}  # fmt: skip
    assert family not in always or always[family] in exact


@pytest.mark.parametrize("to", [t for t in TARGETS if t != "gguf"])
def test_round_trip(to, tmp_path):
    """Converting there and back restores every tensor."""
    start = {"fp8": "ct_fp8_block", "modelopt": "ct_fp8_static"}.get(to, "ct_w4a16_g128_sym")
    source, first, second = fixture_with_config(start, tmp_path / "s"), tmp_path / "a", tmp_path / "b"
    bitline.convert(source, first, to=to)
    bitline.convert(first, second, to="compressed-tensors")
    before, after = bitline.open_checkpoint(source).source, bitline.open_checkpoint(second).source
    for name, info in before.tensors.items():
        assert torch.equal(before.read(name).float(), after.read(name).float()), name
        assert info.shape == after.tensors[name].shape or info.shape in ((), (1,))
