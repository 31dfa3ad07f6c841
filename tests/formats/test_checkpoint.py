"""open_checkpoint: paths, readers, and errors that are always CheckpointErrors."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_packers import CHECKPOINTS, gptq, random_layer, write
from safetensors.torch import save_file

import bitline.checkpoint
from bitline import CheckpointError, LinearSpec, QuantizedWeight, open_checkpoint, register_format
from bitline.formats import discovery
from bitline.formats.base import LayerRecord
from bitline.formats.quant_config import quantization_config
from bitline.types import int8

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


@pytest.fixture
def readers():
    """Restores the registered readers after the test."""
    before = list(discovery.registered)
    yield
    discovery.registered[:] = before


def dense(folder, config=None):
    folder.mkdir(exist_ok=True)
    save_file({"m.weight": torch.zeros(2, 2), "norm.weight": torch.ones(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def layer():
    return gptq(*random_layer(64, 32, 2, 4), 4)


def test_a_quantized_folder(tmp_path):
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    config = {"quantization_config": GPTQ, "model_type": "llama"}
    save_file({f"m.q.{k}": v for k, v in layer().items()}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.path, checkpoint.config, checkpoint.format, checkpoint.is_gguf) == (tmp_path, config, "gptq", False)
    (record,) = checkpoint.layers()
    assert checkpoint.layers()[0] is record and checkpoint.layer("m.q") is record
    assert checkpoint.dense_names() == ["norm.weight"]
    assert checkpoint.read("norm.weight").tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"no such quantized layer.*m\.k.*perhaps m\.q"):
        checkpoint.layer("m.k")
    with pytest.raises(CheckpointError, match="no such tensor"):
        checkpoint.read("m.q.weight")


def test_one_file_uses_the_config_beside_it(tmp_path):
    write(tmp_path, GPTQ, {"m.q": layer()})
    assert [r.name for r in open_checkpoint(tmp_path / "model.safetensors").layers()] == ["m.q"]


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}], ids=repr)
def test_an_unquantized_checkpoint(config, tmp_path):
    checkpoint = open_checkpoint(dense(tmp_path / "c", config))
    assert (checkpoint.layers(), checkpoint.format, len(checkpoint.dense_names())) == ([], "", 2)


def test_a_gguf_file_and_a_folder_that_holds_one(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("a.weight", torch.ones(2, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path in (tmp_path, tmp_path / "model.gguf"):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.path, checkpoint.format, checkpoint.is_gguf) == (tmp_path / "model.gguf", "gguf", True)
        assert checkpoint.layers() == [] and checkpoint.metadata["general.architecture"] == "llama"
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files.*model\.gguf, other\.gguf"):
        open_checkpoint(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).format == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nothing", "no such file or folder"),
        (lambda p: p, "an empty folder"),
        (lambda p: (p / "README.md").write_text("x") and p, "no weights.*README.md"),
        (lambda p: (p / "x.bin").write_bytes(b"x") and p / "x.bin", "pickle is never loaded"),
        (lambda p: (p / "config.json").write_text("{}") and p / "config.json", "name the folder"),
        (lambda p: (p / "model").write_text("x") and p / "model", "no suffix"),
        (lambda p: (p / "model.safetensors").mkdir() or p, "no weights"),
        (lambda p: "a\0b", "ValueError|no such file"),
        (lambda p: p / ("x" * 5000), "cannot be read|no such file"),
        (lambda p: (p / "x.gguf").write_bytes(b"GGUF") and p / "x.gguf", "too short"),
    ],
    ids=["missing", "empty", "other files", "pickle", "config", "no suffix", "folder", "null", "long", "gguf"],
)  # fmt: skip
def test_paths_without_a_checkpoint(make, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(make(tmp_path))


@pytest.mark.parametrize(
    ("method", "message"),
    [("quip", "not supported yet"), ("vptq", "not supported yet"), ("AQLM", "'aqlm' is not supported yet"),
     ("nonsense", "'nonsense' is not known.*bitsandbytes, compressed-tensors.*awq, gptq.*torchao.*register_format")],
)  # fmt: skip
def test_methods_without_a_reader(method, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(dense(tmp_path / "c", {"quantization_config": {"quant_method": method}}))


def test_auto_round_in_a_layout_without_a_reader(tmp_path):
    config = {"quant_method": "auto-round", "packing_format": "auto_round:new", "bits": 4}
    with pytest.raises(CheckpointError, match=r"not supported yet.*packing_format 'auto_round:new'"):
        open_checkpoint(dense(tmp_path / "c", {"quantization_config": config}))


@pytest.mark.parametrize("value", [[], "gptq", 3, {"quant_method": 3}, {"bits": 4}], ids=repr)
def test_quantization_configs_that_name_no_method(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"not an object|names no method"):
        open_checkpoint(dense(tmp_path / "c", {"quantization_config": value}))


@pytest.mark.parametrize(
    ("where", "content", "method"),
    [
        ("config.json", {"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "GPTQ"}}}, "gptq"),
        ("config.json", {"quantization_config": {"config_groups": {}}}, "compressed-tensors"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ("quantize_config.json", {"w_bit": 4}, "awq"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "awq"),
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ("quantization_config.json", {"autoround_version": "0.1", "bits": 4}, "auto-round"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_where_the_quantization_config_is_found(where, content, method, tmp_path):
    folder = dense(tmp_path / "c")
    (folder / where).write_text(json.dumps(content))
    source = bitline.checkpoint.SafetensorsSource(folder)
    assert quantization_config(source)["quant_method"] == method
    if method == "modelopt":
        assert quantization_config(source)["quant_algo"] == "FP8"


def test_quantized_tensors_without_a_config(tmp_path):
    checkpoint = write(tmp_path, None, {"m.q": layer()})
    with pytest.raises(CheckpointError, match=r"m\.q\.qweight.*no quantization config.*quantize_config\.json"):
        checkpoint.layers()


class ToyReader:
    name = "toy"

    def matches(self, source):
        return quantization_config(source).get("quant_method") == "toy"

    def layers(self, source):
        spec = LinearSpec(2, 4, int8, (2, 4))
        read = lambda: QuantizedWeight(spec, torch.zeros(2, 4, dtype=torch.uint8), torch.ones(1, 1))
        yield LayerRecord("m", "toy", spec, ("m.weight",), read)


class FailingReader(ToyReader):
    error: Exception = KeyError("shape")
    at = "layers"

    def layers(self, source):
        if self.at == "layers":
            raise self.error

        def read():
            raise self.error

        yield LayerRecord("m", "toy", LinearSpec(2, 4, int8, (2, 4)), ("m.weight",), read)


def test_a_registered_reader(tmp_path, readers):
    folder = dense(tmp_path / "c", {"quantization_config": {"quant_method": "toy"}})
    with pytest.raises(CheckpointError, match="'toy' is not known"):
        open_checkpoint(folder)
    register_format(ToyReader)
    register_format(ToyReader())
    assert [r.name for r in discovery.registered] == ["toy"]
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "toy" and checkpoint.layers()[0].weight().shape == (2, 4)
    assert checkpoint.dense_names() == ["norm.weight"]
    with pytest.raises(TypeError, match="lacks name, matches, layers"):
        register_format(object())


def test_an_entry_point(tmp_path, monkeypatch, caplog):
    class Point:
        name, value = "toy", "toy_package:ToyReader"

        def __init__(self, load):
            self.load = load

    folder = dense(tmp_path / "c", {"quantization_config": {"quant_method": "toy"}})
    monkeypatch.setattr(discovery, "entry_points", lambda group: [Point(lambda: ToyReader)])
    assert open_checkpoint(folder).format == "toy"
    monkeypatch.setattr(discovery, "entry_points", lambda group: [Point(lambda: 1 / 0)])
    with caplog.at_level("WARNING", "bitline"), pytest.raises(CheckpointError, match="'toy' is not known"):
        open_checkpoint(folder)
    assert "format plug-in toy (toy_package:ToyReader) failed to load: ZeroDivisionError" in caplog.text
    assert open_checkpoint(dense(tmp_path / "plain", {})).layers() == []  # other checkpoints still open


@pytest.mark.parametrize("at", ["layers", "weight"])
@pytest.mark.parametrize(
    "error",
    [KeyError("x"), TypeError("x"), OverflowError("x"), RecursionError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x"),
     OSError("x"), IndexError("x"), ZeroDivisionError("x"), RuntimeError("x")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_an_exception_in_a_reader_is_a_checkpoint_error(error, at, tmp_path, readers):
    reader = FailingReader()
    reader.error, reader.at = error, at
    register_format(reader)
    checkpoint = open_checkpoint(dense(tmp_path / "c", {"quantization_config": {"quant_method": "toy"}}))
    with pytest.raises(CheckpointError, match=f"{type(error).__name__}"):
        checkpoint.layers()[0].weight()


def test_out_of_memory_is_not_a_checkpoint_error(tmp_path, readers):
    reader = FailingReader()
    reader.error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    register_format(reader)
    with pytest.raises(MemoryError, match="no memory"):
        open_checkpoint(dense(tmp_path / "c", {"quantization_config": {"quant_method": "toy"}})).layers()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(["gptq", "int32", "(", "awq", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["bits", "m.q", "-:x"]), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([
    "bits", "group_size", "sym", "desc_act", "dynamic", "checkpoint_format", "format", "pack_dtype", "zero_point", "version",
    "extra_config", "packing_format", "data_type", "act_bits", "quant_method", "w_bit", "is_marlin_format", "config_groups",
])  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["gptq", "awq", "auto-round"]), st.dictionaries(KEYS, JSON, min_size=1, max_size=3))
def test_any_config_is_read_or_refused(tmp_path, method, change):
    if not (tmp_path / "model.safetensors").exists():
        write(tmp_path, GPTQ, {"m.q": layer()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**GPTQ, "quant_method": method, **change}}))
    try:
        for record in open_checkpoint(tmp_path).layers():
            record.weight()
    except CheckpointError as error:
        assert "cannot be read as what it says it is" not in str(error)  # a reader's own refusal, not the guard's


def test_every_fixture_opens(tmp_path):
    for folder in sorted(CHECKPOINTS.iterdir()):
        if folder.is_dir():
            assert open_checkpoint(folder).layers()


@pytest.mark.parametrize("path", [["text_config"], ["thinker_config", "text_config"], ["language_config"], ["talker_config"]])
def test_nested_configs(path, tmp_path):
    folder = tmp_path / "c"
    write(folder, GPTQ, {"language_model.m.proj": layer()})
    config = {"quantization_config": GPTQ}
    for key in reversed(path):
        config = {key: config}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": {}, **config}))
    assert [r.name for r in open_checkpoint(folder).layers()] == ["language_model.m.proj"]
