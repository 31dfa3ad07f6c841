"""Files that a conversion writes, and what it refuses: existing outputs, full disks, interrupts, unusual names, shards."""

import json
import os
import shutil
import subprocess
import sys

import bases
import pytest
import torch
from expected import CHECKPOINTS, LLAMA
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bitline
from bitline.conversion import TARGETS, readback
from bitline.errors import ConversionError, InputError

GPTQ = CHECKPOINTS / "gq_w4g128_sym_v1"
LAYER = bases.LAYER


def source(folder, tensors, config, **more):
    """A checkpoint of these tensors with a Llama's config."""
    folder.mkdir(parents=True, exist_ok=True)
    return bases.write(folder, tensors, config=LLAMA | {"quantization_config": config} | more)


def packed(module, symmetric=True):
    """A compressed-tensors layer of this name."""
    tensors, config = bases.packed()
    config["config_groups"]["group_0"]["weights"]["symmetric"] = symmetric
    return {name.replace(LAYER, module): t for name, t in tensors.items() if symmetric <= ("zero_point" not in name)}, config


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- output paths --------------------------------------------------------------------------------------------------------


def test_nonempty_folder_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        bitline.convert(GPTQ, tmp_path / "out", to="awq")
    assert entries(tmp_path / "out") == ["mine.txt"]


@pytest.mark.parametrize("to", ["awq", "gguf"])
def test_existing_file_is_refused(to, tmp_path):
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    with pytest.raises(InputError):
        bitline.convert(GPTQ, out, to=to)
    out.unlink()
    out.symlink_to("nowhere.gguf")
    with pytest.raises(InputError):
        bitline.convert(GPTQ, out, to=to)
    assert out.is_symlink() and entries(tmp_path) == ["out.gguf"]


@pytest.mark.parametrize("onto", ["its own path", "a link to it"])
def test_source_is_never_overwritten(onto, tmp_path):
    folder = shutil.copytree(GPTQ, tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    before = {name: (folder / name).read_bytes() for name in entries(folder)}
    with pytest.raises(InputError, match="not empty"):
        bitline.convert(folder, folder if onto == "its own path" else tmp_path / "link", to="awq")
    assert before == {name: (folder / name).read_bytes() for name in entries(folder)}


def test_empty_folder_and_missing_parents(tmp_path):
    (tmp_path / "empty").mkdir()
    bitline.convert(GPTQ, tmp_path / "empty", to="awq")
    bitline.convert(GPTQ, tmp_path / "a" / "b" / "c", to="awq")
    assert entries(tmp_path / "empty") == entries(tmp_path / "a" / "b" / "c") and entries(tmp_path) == ["a", "empty"]


@pytest.mark.parametrize(
    ("to", "name", "message"),
    [("exl2", "o", "unknown format"), ("gguf", "folder", "is a file named"), ("gptq", "model.gguf", "is a folder"),
     ("gptq", "x.safetensors", "is a folder")],
)  # fmt: skip
def test_wrong_arguments(to, name, message, tmp_path):
    with pytest.raises(InputError, match=message):
        bitline.convert(GPTQ, tmp_path / name, to=to)
    assert not entries(tmp_path)


def test_unquantized_checkpoint_is_refused(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    with pytest.raises(ConversionError, match="no layer of this checkpoint is quantized"):
        bitline.convert(folder, tmp_path / "out", to="gptq")


# ---- no partial results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["gptq", "gguf"])
@pytest.mark.parametrize("when", ["write", "prove"])
def test_an_interrupt_leaves_nothing(to, when, tmp_path):
    def stop(what, done, total):
        if what == when and done == total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bitline.convert(GPTQ, tmp_path / f"out.{to}", to=to, progress=stop)
    assert not entries(tmp_path)


@pytest.mark.parametrize("to", ["gptq", "gguf"])
def test_a_full_disk_leaves_nothing(to, tmp_path):
    """RLIMIT_FSIZE stands in for a disk that fills up in the middle of the weights."""
    code = (
        "import resource, sys, bitline; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        f"try: bitline.convert({str(GPTQ)!r}, {str(tmp_path / ('out.' + to))!r}, to={to!r})\n"
        "except bitline.ConversionError as error: print(error); sys.exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 7 and "cannot be written, and nothing is left" in done.stdout, done.stderr
    assert not entries(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConversionError, match="cannot be written"):
        bitline.convert(GPTQ, tmp_path / "locked" / "out", to="gptq")


@pytest.mark.parametrize("part", ["code", "scale", "bias", "plain"])
def test_a_result_that_does_not_read_back_is_deleted(part, tmp_path, monkeypatch):
    """Verification finds any difference, whether a bug or the disk caused it."""
    tensors, config = bases.gptq()
    folder = source(tmp_path / "s", tensors | {"model.norm.weight": torch.ones(8)}, config)
    name = {"code": f"{LAYER}.qweight", "scale": f"{LAYER}.scales", "bias": f"{LAYER}.bias", "plain": "model.norm.weight"}[part]
    real = readback.open_checkpoint

    def damaged(path):
        file = path / "model.safetensors"
        with safe_open(file, "pt") as opened:
            assert opened.metadata() is not None and name in opened.keys()  # noqa: SIM118
        raw = bytearray(file.read_bytes())
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        at = 8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0]
        raw[at] ^= 1
        file.write_bytes(raw)
        return real(path)

    monkeypatch.setattr(readback, "open_checkpoint", damaged)
    with pytest.raises(ConversionError, match=r"did not read back.*deleted"):
        bitline.convert(folder, tmp_path / "out", to="gptq")
    assert entries(tmp_path) == ["s"]


def test_refusal_found_while_writing_names_every_layer(tmp_path):
    """Whether scales are exact depends on the data: the first layers are written by then, and removed."""
    good, config = packed("model.layers.0.mlp.up_proj")
    tensors = dict(good)
    for i in range(1, 7):
        more, _ = packed(f"model.layers.{i}.mlp.up_proj")
        scale = f"model.layers.{i}.mlp.up_proj.weight_scale"
        tensors |= more | {scale: more[scale].float() * 1.0001}
    folder = source(tmp_path / "s", tensors, config)
    with pytest.raises(
        ConversionError, match=r"cannot represent 6 of 7 layers.*and 2 more.*not exact in float16 or bfloat16"
    ) as caught:
        bitline.convert(folder, tmp_path / "out", to="gptq")
    assert set(caught.value.layers) == {f"model.layers.{i}.mlp.up_proj" for i in range(1, 7)}
    assert "compressed-tensors" in caught.value.fix and "--lossy" in caught.value.fix
    assert entries(tmp_path) == ["s"]


def test_alternative_formats_are_named_if_every_layer_fits(tmp_path):
    """awq supports neither 8 bits nor FP8; gptq supports the first five layers, of 8 bits, but not the last one."""
    tensors, config = {}, packed("x")[1]
    for i in range(6):
        module = f"model.layers.{i}.mlp.up_proj"
        codes = torch.randint(-99, 99, (64, 128), dtype=torch.int8)
        tensors |= {f"{module}.weight": codes if i < 5 else torch.ones(64, 128).to(torch.float8_e4m3fn),
                    f"{module}.weight_scale": torch.ones(64, 1).half()}  # fmt: skip
    groups = {
        kind: {
            "targets": [f"re:.*{layers}.mlp"],
            "weights": {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"},
        }
        for kind, layers in (("int", "[0-4]"), ("float", "5"))
    }
    folder = source(tmp_path / "s", tensors, config | {"format": "mixed-precision", "config_groups": groups})
    with pytest.raises(ConversionError, match=r"cannot represent 6 of 6") as caught:
        bitline.convert(folder, tmp_path / "out", to="awq")
    assert "--to compressed-tensors should represent them exactly" in caught.value.fix
    assert bitline.convert(folder, tmp_path / "out", to="compressed-tensors").exact


# ---- names ---------------------------------------------------------------------------------------------------------------

NAMES = [
    "model.layers.0.mlp.up proj", "model.layers.0.mlp.ü_proj", "model.layers.0.mlp.up[0]", "model.layers.0.mlp.a+b*c?",
    'model.layers.0.mlp."q"', "model.layers.0.mlp.up\\d", "x", "0.1.2", "re:model", "model.layers.0.mlp.(up|down)$", "重み.0.层",
]  # fmt: skip


@pytest.mark.parametrize("to", ["gptq", "awq", "compressed-tensors", "modelopt"])
def test_unusual_names(to, tmp_path):
    """Names with metacharacters of regular expressions, JSON and terminals are preserved."""
    tensors, config = {}, None
    for i, name in enumerate(NAMES):
        more, config = packed(name)
        tensors |= {n: (t if "packed" not in n else t + i) for n, t in more.items()}
    config["config_groups"]["group_0"]["targets"] = ["Linear"]
    report = bitline.convert(source(tmp_path / "s", tensors, config), tmp_path / "out", to=to)
    assert [layer.name for layer in report.layers] == NAMES


def test_overrides_use_as_few_patterns_as_possible(tmp_path):
    """GPTQ's `dynamic` and compressed-tensors' groups: one pattern for names that differ in their index only."""
    tensors, config = {}, None
    for i in range(3):
        for leaf, symmetric in (("up_proj", True), ("down_proj", False)):
            more, one = packed(f"model.layers.{i}.mlp.{leaf}", symmetric)
            tensors |= more
            config = one if symmetric else config
    other = packed("x", False)[1]["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}
    config["config_groups"]["group_1"] = other
    folder = source(tmp_path / "s", tensors | {"model.layers.1.mlp.gate.weight": torch.ones(4, 4)}, config)
    bitline.convert(folder, tmp_path / "gptq", to="gptq")
    written = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert written["checkpoint_format"] == "gptq_v2" and written["sym"] is True
    assert written["dynamic"] == {
        r"-:^model\.layers\.1\.mlp\.gate$": {},
        r"+:^model\.layers\.\d+\.mlp\.down_proj$": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    }
    bitline.convert(folder, tmp_path / "ct", to="compressed-tensors")
    groups = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [g["targets"] for g in groups.values()] == [
        [r"re:^model\.layers\.\d+\.mlp\.up_proj$"], [r"re:^model\.layers\.\d+\.mlp\.down_proj$"]
    ]  # fmt: skip


def test_ambiguous_ignored_modules_are_refused(tmp_path):
    """AWQ's readers would match mlp.gate in mlp.gate_proj, and ignore both."""
    tensors, config = packed("model.layers.0.mlp.gate_proj")
    folder = source(tmp_path / "s", tensors | {"model.layers.0.mlp.gate.weight": torch.ones(4, 64)}, config)
    with pytest.raises(ConversionError, match=r"by substring.*gate_proj"):
        bitline.convert(folder, tmp_path / "out", to="awq")
    assert entries(tmp_path) == ["s"] and bitline.convert(folder, tmp_path / "out", to="gptq").exact


def test_unquantized_tensor_with_the_name_of_a_new_one_is_refused(tmp_path):
    tensors, config = packed(LAYER)
    folder = source(tmp_path / "s", tensors | {f"{LAYER}.scales": torch.ones(2)}, config)
    with pytest.raises(bitline.CheckpointError, match=rf"nothing uses.*{LAYER}\.scales"):
        bitline.convert(folder, tmp_path / "out", to="gptq")
    assert entries(tmp_path) == ["s"]


# ---- beside the layers ---------------------------------------------------------------------------------------------------


def test_shards_are_bounded_valid_and_aligned(tmp_path):
    """safetensors reads every shard, and tensors of odd size leave no other unaligned."""
    tensors, config = {}, None
    for i in range(5):
        more, config = packed(f"model.layers.{i}.mlp.up_proj")
        tensors |= more | {f"model.layers.{i}.odd": torch.arange(i + 1, dtype=torch.uint8)}
    tensors |= {"model.embed_tokens.weight": torch.randn(7, 3).bfloat16(), "scalar": torch.tensor(3, dtype=torch.int64)}
    folder = source(tmp_path / "s", tensors, config)
    bitline.convert(folder, tmp_path / "out", to="gptq", shard_bytes=3000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    found = {}
    for name in names:
        file = tmp_path / "out" / name
        length = int.from_bytes(file.read_bytes()[:8], "little")
        header = json.loads(file.read_bytes()[8 : 8 + length])
        assert (8 + length) % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        found |= load_file(file)
        for entry in header.values():
            size = {"U8": 1, "BF16": 2, "F16": 2, "I64": 8}.get(entry["dtype"], 4)
            assert entry["data_offsets"][0] % size == 0
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    for name in ("model.embed_tokens.weight", "scalar", "model.layers.4.odd"):
        assert torch.equal(found[name], tensors[name])


def test_other_files_are_copied_but_not_weights(tmp_path):
    folder = shutil.copytree(GPTQ, tmp_path / "s")
    for name in ("tokenizer.json", "generation_config.json", "modeling_own.py", "LICENSE", "chat_template.jinja"):
        (folder / name).write_text("{}")
    for name in ("pytorch_model.bin", "quantize_config.json", "photo.png"):
        (folder / name).write_text("{}")
    (folder / "original").mkdir()
    (folder / "blob").write_text("linked")
    (folder / "vocab.json").symlink_to("blob")
    config = json.loads((folder / "config.json").read_text())
    (folder / "quantize_config.json").write_text(json.dumps(config["quantization_config"]))
    config["text_config"] = {"quantization_config": config["quantization_config"], "hidden_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    report = bitline.convert(folder, tmp_path / "out", to="awq")
    out = tmp_path / "out"
    copied = ["LICENSE", "chat_template.jinja", "generation_config.json", "modeling_own.py", "tokenizer.json", "vocab.json"]
    assert set(copied) <= set(report.copied) and {"pytorch_model.bin", "photo.png", "original", "blob"} <= set(report.left)
    assert set(copied) | {"config.json", "model.safetensors"} <= set(entries(out))
    assert not {"pytorch_model.bin", "quantize_config.json", "photo.png"} & set(entries(out))
    assert (out / "vocab.json").read_text() == "linked" and not (out / "vocab.json").is_symlink()
    after = json.loads((out / "config.json").read_text())
    assert after["text_config"] == {"hidden_size": 4} and after["quantization_config"]["quant_method"] == "awq"
    assert {k: v for k, v in after.items() if k not in ("quantization_config", "text_config")} == {
        k: v for k, v in config.items() if k not in ("quantization_config", "text_config")
    }


def test_a_single_file(tmp_path):
    """A .safetensors file with its config beside it is a checkpoint too."""
    folder = shutil.copytree(GPTQ, tmp_path / "s")
    report = bitline.convert(folder / "model.safetensors", tmp_path / "out", to="awq")
    assert report.exact and "config.json" in entries(tmp_path / "out")


def test_embeddings_and_heads_are_dequantized_where_a_format_lacks_them(tmp_path):
    """Exact, as tools expect, and reported."""
    tensors, config = packed("model.layers.0.mlp.up_proj")
    embedding, _ = packed("model.embed_tokens")
    config["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    folder = source(tmp_path / "s", tensors | embedding, config)
    report = bitline.convert(folder, tmp_path / "out", to="awq")
    plain = next(layer for layer in report.layers if layer.name == "model.embed_tokens")
    assert plain.after == "plain" and plain.exact and plain.changes == ("dequantized to float32",)
    table = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(table.float(), bitline.open_checkpoint(folder).layer("model.embed_tokens").weight().dequantize())


# ---- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["gptq", "awq", "compressed-tensors", "gguf", "modelopt"])
def test_activation_quantization_is_not_dropped_by_default(to, tmp_path):
    folder = CHECKPOINTS / "ct_w8a8_int8_dynamic"
    if to == "compressed-tensors":
        assert bitline.convert(folder, tmp_path / "kept", to=to).exact
    else:
        with pytest.raises(ConversionError):
            bitline.convert(folder, tmp_path / f"out.{to}", to=to)
    if to in ("gptq", "compressed-tensors", "gguf"):
        report = bitline.convert(folder, tmp_path / f"out.{to}", to=to, weights_only=True)
        assert report.exact and all("instead of int8" in str(layer.changes) for layer in report.layers)
        opened = bitline.open_checkpoint(tmp_path / f"out.{to}")
        assert all(record.spec.act is None for record in opened.layers())


@pytest.mark.parametrize(("name", "to"), [
    ("bnb_nf4", "gptq"), ("bnb_fp4", "awq"), ("hqq_4bit", "compressed-tensors"), ("mo_w4a16_awq", "gptq"),
    ("gq_w4g32_sym_descact_v1", "gguf"), ("ct_mxfp4a16", "gptq"), ("gq_w4g32_sym_descact_v1", "compressed-tensors"),
    ("ar_w8g128_sym_autogptq", "awq"), ("ar_w4g32_mixed_autoround", "awq"), ("bnb_nf4_nested", "compressed-tensors"),
])  # fmt: skip
def test_lossy_reports_the_rounding_error(name, to, tmp_path):
    folder = CHECKPOINTS / name
    with pytest.raises(ConversionError, match="--lossy"):
        bitline.convert(folder, tmp_path / f"out.{to}", to=to)
    report = bitline.convert(folder, tmp_path / f"out.{to}", to=to, lossy=True)
    before, after = bitline.open_checkpoint(folder), bitline.open_checkpoint(tmp_path / f"out.{to}")
    assert not report.exact
    for layer in report.layers:
        if layer.exact:
            assert layer.max_error == layer.rms_error == 0 and "rounded" not in str(layer.changes)
            continue
        weight = before.layer(layer.name).weight()
        exact = weight.dequantize() * (1 if weight.input_multiplier is None else weight.input_multiplier.float())
        assert 0 < layer.max_error < 0.2 and 0 < layer.rms_error < 0.2
        if to != "gguf":
            error = after.layer(layer.name).weight().dequantize() - exact
            assert layer.max_error == pytest.approx(float(error.abs().max() / exact.abs().max()), rel=1e-4)
            assert layer.rms_error == pytest.approx(float(error.norm() / exact.norm()), rel=1e-3)


def test_lossy_rounds_only_what_is_not_exact(tmp_path):
    """ar_w4g32_mixed has one layer of 8 bits: for AWQ it alone is rounded."""
    report = bitline.convert(CHECKPOINTS / "ar_w4g32_mixed_autoround", tmp_path / "out", to="awq", lossy=True)
    assert [layer.name for layer in report.layers if not layer.exact] == ["model.layers.0.mlp.down_proj"]
    report = bitline.convert(CHECKPOINTS / "gq_w4g128_sym_v1", tmp_path / "same", to="awq", lossy=True)
    assert report.exact


def test_a_stack_of_experts(tmp_path):
    """gpt-oss: each expert becomes a module of its own, with its bias."""
    blocks = torch.randint(0, 256, (3, 32, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 130, (3, 32, 2), dtype=torch.uint8)
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{stack}_blocks": blocks, f"{stack}_scales": scales, f"{stack}_bias": torch.randn(3, 32).bfloat16()}
    folder = source(tmp_path / "s", tensors, {"quant_method": "mxfp4"})
    report = bitline.convert(folder, tmp_path / "out", to="compressed-tensors")
    assert [layer.name for layer in report.layers] == [f"{stack}.{i}" for i in range(3)] and report.exact
    assert any("expert" in note for note in report.notes)


def test_conversion_is_deterministic(tmp_path):
    for name in ("a", "b"):
        bitline.convert(GPTQ, tmp_path / name, to="compressed-tensors")
    for name in entries(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_peak_memory_is_a_layer(tmp_path):
    """Converting a model of 200 layers takes the memory of a few of them."""
    tensors, config = {}, None
    for i in range(200):
        tensors |= {
            f"model.layers.{i}.mlp.up_proj.weight_packed": torch.randint(-(1 << 31), 1 << 31, (512, 128)).int(),
            f"model.layers.{i}.mlp.up_proj.weight_scale": torch.ones(512, 32).half(),
            f"model.layers.{i}.mlp.up_proj.weight_shape": torch.tensor([512, 1024]),
        }
        config = packed("x")[1]
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors")
    code = (
        "import resource, sys, bitline\n"
        f"bitline.convert({str(CHECKPOINTS / 'gq_w4g128_sym_v1')!r}, {str(tmp_path / 'warm')!r}, to='gptq')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"bitline.convert({str(folder)!r}, {str(tmp_path / 'out')!r}, to='gptq')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    size = (folder / "model.safetensors").stat().st_size
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < size / 2, f"{int(done.stdout) >> 10} MiB more for {size >> 20} MiB"


def test_target_names():
    assert set(TARGETS) == {"compressed-tensors", "gptq", "awq", "gguf", "fp8", "modelopt"}
    assert all(kind.name == to for to, kind in TARGETS.items())
