"""Every valid checkpoint matches exactly one built-in reader, and an unsupported one is refused as such.

If two readers matched a checkpoint, its weights would depend on which is asked first.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import pkgutil
from pathlib import Path

import bases_gguf
import bases_more  # noqa: F401  (its families are among the bases once it is imported)
import corpus_float  # noqa: F401
import pytest
import torch
from bases import FAMILIES, LAYER, write
from safetensors.torch import save_file

from bitline import CheckpointError, formats, open_checkpoint
from bitline.checkpoint import UNSUPPORTED_METHODS
from bitline.formats.io.safetensors_source import SafetensorsSource

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
CASES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())


@functools.cache
def readers():
    """Every built-in reader."""
    modules = map(importlib.import_module, (m.name for m in pkgutil.walk_packages(formats.__path__, "bitline.formats.")))
    found = [module.READER for module in modules if hasattr(module, "READER")]
    names = [reader.name for reader in found]
    assert len(set(names)) == len(names) >= 11
    return found


def matching(source):
    """The names of the readers that match a checkpoint."""
    return [reader.name for reader in readers() if reader.matches(source)]


def one(path):
    checkpoint = open_checkpoint(path)
    assert matching(checkpoint.source) == [checkpoint.format] and checkpoint.layers()
    return checkpoint.format


@pytest.mark.parametrize("base", FAMILIES)
def test_a_base_of_the_attacks(base, tmp_path):
    one(write(tmp_path, *FAMILIES[base]()))


@pytest.mark.parametrize("case", CASES)
def test_a_fixture(case):
    one(CHECKPOINTS / case)


@pytest.mark.parametrize("kind", bases_gguf.TYPES)
def test_a_gguf_file(kind, tmp_path):
    (tmp_path / "model.gguf").write_bytes(bases_gguf.file(kind)[0])
    assert one(tmp_path / "model.gguf") == "gguf"


def test_every_reader_has_a_base(tmp_path):
    found = {"gguf"}
    for i, base in enumerate(FAMILIES):
        (tmp_path / str(i)).mkdir()
        found.add(open_checkpoint(write(tmp_path / str(i), *FAMILIES[base]())).format)
    assert found == {reader.name for reader in readers()}


def test_a_gguf_file_beside_the_config_of_another_checkpoint(tmp_path):
    """The file has its own metadata: a config.json in its folder belongs to another checkpoint."""
    write(tmp_path, *FAMILIES["gptq"]())
    (tmp_path / "model.gguf").write_bytes(bases_gguf.file("Q4_0")[0])
    assert one(tmp_path / "model.gguf") == "gguf" and one(tmp_path / "model.safetensors") == "gptq"


METHODS = (
    "gptq", "awq", "auto-round", "intel/auto-round", "inc", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp8", "mxfp4",
    "modelopt", "modelopt_fp4", "bitsandbytes", "quark", "hqq", "torchao", "gguf",
)  # fmt: skip
PACKINGS = (
    None, "auto_round", "auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq", "auto_round:fp8",
    "auto_round:fp8_static", "auto_round:llm_compressor", "auto_round:llm_compressor_nvfp4_e5m3", "auto_round:mx_int4", "int", 7,
)  # fmt: skip
TYPES = (None, "int", "int_sym", "fp", "fp8", "fp8_sym", "mx_fp", "mx_int", "mx_int4", "nv_fp4", 4)


def test_no_config_matches_two_readers(tmp_path):
    """Every method with every packing_format and data_type of AutoRound; unknown names match no reader."""
    save_file({f"{LAYER}.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    found = {}
    for method, packing, kind in itertools.product(METHODS, PACKINGS, TYPES):
        config = {"quant_method": method, "packing_format": packing, "data_type": kind}
        config = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        names = matching(SafetensorsSource(tmp_path))
        assert len(names) <= 1, f"{config}: {names}"
        found[method, packing, kind] = names
    assert found["auto-round", None, "int"] == ["gptq"] and found["auto-round", "auto_round:awq", "int"] == ["awq"]
    assert found["auto-round", "int", "mx_fp"] == found["gguf", None, None] == []


@pytest.mark.parametrize("method", [*UNSUPPORTED_METHODS, "gguf", "made-up", "GPTQ-like", "", "none of these"])
def test_unsupported_methods(method, tmp_path):
    """The error names the method, the file and field, the readers and the fix."""
    config = {"quant_method": method} | (
        {"packing_format": "auto_round:of-tomorrow"} if method.endswith("auto-round") or method == "inc" else {}
    )
    write(tmp_path, {f"{LAYER}.weight": torch.ones(2, 2)}, config)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    error, text = caught.value, str(caught.value)
    assert not matching(SafetensorsSource(tmp_path))
    assert error.file == str(tmp_path / "config.json") and repr(method.lower()) in error.found
    assert error.field == ("packing_format" if "packing_format" in config else "quant_method") and error.found in text
    assert ("not supported yet [" in text) == (method in UNSUPPORTED_METHODS)
    assert all(f" {reader.name}" in error.expected.replace(",", "") for reader in readers())
    assert "register_format" in error.fix


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed", "weight"])
def test_codes_without_a_config(suffix, tmp_path):
    """It matches no reader, and is not an unquantized checkpoint either."""
    save_file({f"{LAYER}.{suffix}": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert not matching(checkpoint.source) and not checkpoint.format
    with pytest.raises(CheckpointError, match="does not account for") as caught:
        checkpoint.layers()
    assert caught.value.tensor == f"{LAYER}.{suffix}" and caught.value.found == "no quantization config"


def test_an_unquantized_checkpoint_matches_no_reader(tmp_path):
    write(tmp_path, {f"{LAYER}.weight": torch.ones(2, 2)}, {})
    assert not matching(SafetensorsSource(tmp_path)) and open_checkpoint(tmp_path).layers() == []
