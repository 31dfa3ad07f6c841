"""`bitline inspect`: one row per kind of layer, every finding, and no codes read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from safetensors.torch import save_file

from bitline.checkpoint import open_checkpoint
from bitline.cli import inspect, main, scale_checks
from bitline.cli.inspect import inspect_report
from bitline.formats.io.safetensors_source import SafetensorsSource

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"
CHECKPOINTS = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir())
CODES = {"weight", "qweight", "weight_packed", "W_q", "_weight_qdata"}


def text_of(report, width, monkeypatch):
    from rich.console import Console

    console = Console(width=width, force_terminal=False, color_system=None)
    monkeypatch.setattr(inspect, "out", console)
    with console.capture() as captured:
        inspect.show(report)
    return captured.get()


# ---- checkpoints made for a test ---------------------------------------------------------------------------------------


def write(folder, tensors, quantization, **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization, **config}))
    return folder


def gptq_layer(base, k=64, n=64, group=32, zero=7, g_idx=None, scale=None):
    """Symmetric 4 bits; v1 qzeros hold the zero point 8 minus one in every field."""
    packed_zeros = int.from_bytes(bytes([zero | zero << 4] * 4), "little", signed=True)
    return {
        f"{base}.qweight": torch.zeros(k // 8, n, dtype=torch.int32),
        f"{base}.qzeros": torch.full((k // group, n // 8), packed_zeros, dtype=torch.int32),
        f"{base}.scales": torch.full((k // group, n), 0.01, dtype=torch.float16) if scale is None else scale,
        f"{base}.g_idx": torch.arange(k, dtype=torch.int32) // group if g_idx is None else g_idx,
    }


def gptq(folder, layers, **config):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return write(folder, {k: v for layer in layers for k, v in layer.items()}, settings | config)


def fp8(folder, scale, bias=None, **tensors):
    """Layers `a`, `b`, … of 8 × 16 with per-row scales."""
    parts = {f"{base}.weight": torch.ones(8, 16).to(torch.float8_e4m3fn) for base in scale}
    parts |= {f"{base}.weight_scale": s for base, s in scale.items()} | {f"{base}.bias": b for base, b in (bias or {}).items()}
    return write(folder, parts | tensors, {"quant_method": "fp8", "activation_scheme": "dynamic"})


def ct(folder, ignore, modules=("model.layers.0.mlp.up_proj",), extra=None, **config):
    """compressed-tensors W8A16 with per-row scales."""
    tensors = dict(extra or {})
    for base in modules:
        tensors[f"{base}.weight"] = torch.ones(8, 16, dtype=torch.int8)
        tensors[f"{base}.weight_scale"] = torch.full((8, 1), 0.01, dtype=torch.bfloat16)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ignore, "config_groups": groups}
    return write(folder, tensors, settings, **config)


def odd(report):
    return {(o["level"], o["what"]): o for o in report["oddities"]}


def only(report):
    assert len(report["oddities"]) == 1, report["oddities"]
    return report["oddities"][0]


def findings(report):
    assert report["scales"]["checked"]
    return {f["problem"]: (f["values"], f["tensors"], f["example"]) for f in report["scales"]["findings"]}


# ---- every fixture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_checkpoint(name, monkeypatch):
    report = inspect_report(FIXTURES / name)
    records = open_checkpoint(FIXTURES / name).layers()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["layers"] == len(records) == sum(k["layers"] for k in report["kinds"])
    assert report["nbytes"] == sum(r.nbytes for r in records)
    specs = {r.name: r.spec for r in records}
    for kind in report["kinds"]:
        spec = specs[kind["example"]]
        assert kind["shape"] == [spec.n, spec.k] and kind["bits"] == spec.weight.bits and kind["block"] == list(spec.block)
        assert kind["zero"] == spec.zero and kind["act_order"] == spec.act_order == (kind["columns"] == "act-order")
        each = kind["nbytes"] / kind["layers"] / spec.n / spec.k
        assert kind["bytes_per_weight"] == pytest.approx(each) and kind["bits_per_weight"] == pytest.approx(8 * each)
        assert kind["bytes_per_weight"] >= spec.weight.bits / 8
    # AutoRound's symmetric scales have either sign; nothing else is odd about what producers wrote.
    odd_ones = {f["problem"]: f["level"] for f in report["scales"]["findings"]}
    assert report["scales"]["checked"] and odd_ones in ({}, {"negative": "note"} if name.startswith("ar_") else {})
    for width in (60, 80, 120, 200):
        lines = text_of(report, width, monkeypatch).splitlines()
        assert all(cell_len(line) <= width for line in lines[1:]), lines
        assert all(sum(f"{n}×{k}" in line for line in lines) for n, k in (kind["shape"] for kind in report["kinds"]))


def test_wide_terminal(monkeypatch):
    report = inspect_report(FIXTURES / "ct_mixed_w4a16_fp8")
    lines = text_of(report, 120, monkeypatch).splitlines()
    assert lines[1].split("  ")[0] == "layers"
    for word in ("N×K", "layout", "bits", "scale block", "zero", "act-order", "input", "B/weight", "size"):
        assert word in lines[1]
    rows = [" ".join(line.split()) for line in lines[3:6]]
    assert rows[0] == "1 × down_proj 256×512 pack-quantized 4 1×64 - - 16 bit 0.531 69.6 kB"
    assert rows[1] == "2 × k_proj, v_proj 128×256 float-quantized 8 row - - fp8 token 1.008 66.0 kB"


def test_narrow_terminal(monkeypatch):
    report = inspect_report(FIXTURES / "gq_w4g32_sym_descact_v1")
    text = " ".join(text_of(report, 80, monkeypatch).split())
    assert "all layers: layout v1, bits 4, scale block 1×32, zero -, act-order yes, input 16 bit" in text
    narrow = " ".join(text_of(report, 40, monkeypatch).split())
    assert "4 bits (uint4b8), float16 scales per 1×32, act-order, input 16 bit, 0.594 bytes/weight, 77.8 kB" in narrow


def test_gguf(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quants.quantize(np.ones((4, 64), np.float32), kind), raw_dtype=kind)
    writer.add_tensor("norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    report = inspect_report(tmp_path / "m.gguf", True)
    assert [k["layout"] for k in report["kinds"]] == ["Q8_0"] and report["kinds"][0]["bits_per_weight"] == 8.5
    assert report["dense_tensors"] == 1 and report["scales"]["tensors"] == 0 and not report["oddities"]


def test_unquantized_checkpoint(tmp_path, monkeypatch):
    save_file({"a.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    report = inspect_report(tmp_path)
    assert report["layers"] == 0 and report["kinds"] == [] and report["dense_tensors"] == 1 and not report["oddities"]
    assert "not quantized" in text_of(report, 80, monkeypatch)


# ---- headers only ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("scales", [None, True])
def test_no_code_is_read(name, scales, monkeypatch):
    really = SafetensorsSource.read
    seen = []

    def read(self, name, rows=None):
        assert name.rpartition(".")[2] not in CODES, f"{name} was read"
        seen.append(name)
        return really(self, name, rows)

    monkeypatch.setattr(SafetensorsSource, "read", read)
    assert inspect_report(FIXTURES / name, scales)["kinds"]
    assert seen or not scales


def test_codes_may_be_a_hole_of_any_size(tmp_path):
    """A sparse file whose header declares layers of 4 TB each."""
    n = k = 1 << 21
    header, at = {}, 0
    for name, dtype, shape, size in (
        ("a.weight_scale", "F32", [], 4), ("a.weight", "F8_E4M3", [n, k], n * k), ("b.weight", "F8_E4M3", [n, k], n * k),
        ("b.weight_scale", "F32", [n, 1], 4 * n),
    ):  # fmt: skip
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}')
    report = inspect_report(tmp_path)
    assert [kind["scale_block"] for kind in report["kinds"]] == ["row", "tensor"]
    assert report["nbytes"] > 8e12 and findings(report)["zero"][0] == n + 1


# ---- layers and ignored modules ----------------------------------------------------------------------------------------


def test_trivial_and_real_activation_orders(tmp_path):
    shuffled = (torch.arange(64, dtype=torch.int32) // 32)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    uneven = (torch.arange(64, dtype=torch.int32) >= 40).int()
    orders = {"a": None, "b": None, "c": shuffled, "d": uneven}
    report = inspect_report(gptq(tmp_path, [gptq_layer(base, g_idx=g) for base, g in orders.items()], desc_act=True))
    assert {k["columns"]: k["layers"] for k in report["kinds"]} == {"trivial": 2, "act-order": 1, "ragged": 1}
    found = {o["what"].partition(" ")[0] + o["what"][5:14]: (o["level"], o["layers"], o["example"]) for o in report["oddities"]}
    (said,) = [found.pop(name) for name in list(found) if not name.startswith("g_idx")]
    assert said == ("odd", 3, "a")  # the config says desc_act, and the order of three layers is their own
    assert found == {
        "g_idx is trivi": ("note", 2, "a"), "g_idx is an ac": ("note", 1, "c"), "g_idx makes gr": ("note", 1, "d"),
    }  # fmt: skip


def test_act_order_that_the_config_does_not_mention(tmp_path):
    backwards = torch.arange(63, -1, -1, dtype=torch.int32) // 32
    report = inspect_report(gptq(tmp_path, [gptq_layer("a", g_idx=backwards), gptq_layer("b")]))
    (what,) = [o for o in report["oddities"] if o["level"] == "odd"]
    assert "does not mention" in what["what"] and what["layers"] == 1 and what["example"] == "a"
    assert [k["oddities"] for k in report["kinds"] if k["example"] == "a"] == [[what["what"]]]


def test_unexpected_zero_points(tmp_path):
    """Symmetric, labelled v1: 7 belongs to v1, 8 to v2. Warnings that differ in numbers only are one line."""
    layers = [gptq_layer(base, zero=zero) for base, zero in (("a", 7), ("b", 8), ("c", 3), ("d", 4))]
    report = inspect_report(gptq(tmp_path, layers))
    odd_ones = [o for o in report["oddities"] if "qzeros" in o["what"] and "not used" in o["what"]]
    assert [(o["layers"], o["example"]) for o in odd_ones] == [(1, "b"), (2, "c")]
    assert "v2" in odd_ones[0]["what"] and "hold 3" in odd_ones[1]["what"]


def test_ignored_modules_that_the_tensors_contradict(tmp_path):
    report = inspect_report(ct(tmp_path / "ct", ["model.layers.0.mlp.up_proj"]))
    assert "but its tensors are quantized" in only(report)["what"] and only(report)["layers"] == 1
    awq = {
        "model.visual.up.qweight": torch.zeros(32, 2, dtype=torch.int32),
        "model.visual.up.qzeros": torch.zeros(1, 2, dtype=torch.int32),
        "model.visual.up.scales": torch.full((1, 16), 0.01, dtype=torch.float16),
    }  # fmt: skip
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    listed = {"modules_to_not_convert": ["model.visual"]}
    report = inspect_report(write(tmp_path / "awq", awq, settings | listed))
    assert only(report)["example"] == "model.visual.up" and "not quantized" in only(report)["what"]
    assert not inspect_report(write(tmp_path / "awq", awq, settings))["oddities"]


@pytest.mark.parametrize(
    ("entry", "missing"),
    [
        ("model.layers.0.mlp.gate", False), ("model.layers.0", False), ("mlp.gate", False), ("re:.*mlp.gate$", False),
        ("model.layers.*.mlp.gate", False), ("lm_head", False), ("model.layers.1.mlp.gate", True), ("router", True),
        ("re:.*router", True), ("visual.*", True), ("re:(unfinished", None),
    ],
)  # fmt: skip
def test_ignored_modules_that_match_nothing(tmp_path, entry, missing):
    gate = {"model.layers.0.mlp.gate.weight": torch.ones(4, 16)}
    if missing is None:  # the reader refuses it first
        with pytest.raises(ValueError, match="regular expression"):
            inspect_report(ct(tmp_path, [entry], extra=gate))
        return
    report = inspect_report(ct(tmp_path, [entry], extra=gate))
    if missing:
        assert only(report)["what"].startswith("1 entry") and only(report)["what"].endswith(entry)
    else:
        assert not report["oddities"]


def test_untied_head_must_exist(tmp_path):
    assert only(inspect_report(ct(tmp_path, ["lm_head"], tie_word_embeddings=False)))["what"].endswith("lm_head")


def test_long_lists_are_truncated_and_control_characters_escaped(tmp_path, monkeypatch):
    report = inspect_report(ct(tmp_path, [f"no.{i}" for i in range(50)] + ["no\x1b[31m"]))
    assert only(report)["what"].startswith("51 entries") and only(report)["what"].endswith("no.0, no.1, no.2, …")
    report = inspect_report(ct(tmp_path, ["no\x1b[31m", "[red]x"]))
    assert "\x1b" not in text_of(report, 80, monkeypatch) and "[red]x" in text_of(report, 80, monkeypatch)


def test_unquantized_layers_among_quantized_ones(tmp_path):
    modules = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    extra = {"model.layers.3.mlp.down_proj.weight": torch.ones(8, 16).bfloat16(), "model.norm.weight": torch.ones(8)}
    found = only(inspect_report(ct(tmp_path, [], modules, extra)))
    assert found["level"] == "note" and found["example"] == "model.layers.3.mlp.down_proj"
    assert found["what"] == "not quantized, while 3 other down_proj are"


def test_findings_as_text(tmp_path, monkeypatch):
    report = inspect_report(ct(tmp_path, ["re:model.*"], [f"model.layers.{i}.x" for i in range(3)]))
    text = " ".join(text_of(report, 80, monkeypatch).split())
    assert "warning the config's ignore list names this layer" in text and "(3 layers, such as model.layers.0.x)" in text


# ---- scales ------------------------------------------------------------------------------------------------------------

GOOD = torch.full((8, 1), 0.01)


def row(value, dtype=torch.float32):
    """Eight scales, the third of them `value`."""
    scales = GOOD.clone()
    scales[2] = value
    return scales.to(dtype)


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (row(float("nan")), "nan"), (row(float("inf"), torch.bfloat16), "infinite"), (row(1e6, torch.bfloat16), "overflow"),
        (row(65505.0), "overflow"), (row(1000.0), "large"), (row(-0.01, torch.float16), "negative"), (row(0.0), "zero"),
        (row(1e-5, torch.float16), "subnormal"), (row(1e-9), "vanishing"), (row(2.0**-25), "vanishing"),
        (row(1e-40), "vanishing"), (row(2.0**-24), None), (row(146.0), None), (row(2.0**-14, torch.float16), None),
        (GOOD.bfloat16(), None),
    ],
)  # fmt: skip
def test_every_problem_of_a_scale(tmp_path, scale, problem):
    report = inspect_report(fp8(tmp_path, {"a": GOOD, "b": scale.clone(), "c": GOOD.bfloat16()}))
    assert findings(report) == ({} if problem is None else {problem: (1, 1, "b.weight_scale")})


def test_problems_are_counted(tmp_path, monkeypatch):
    bad = torch.tensor([[float("nan")], [0.0], [-1e6], [float("-inf")], [0.01], [0.01], [float("nan")], [0.01]])
    report = inspect_report(fp8(tmp_path, {"a": bad, "b": GOOD, "c": bad.clone()}))
    assert findings(report) == {
        "nan": (4, 2, "a.weight_scale"), "infinite": (2, 2, "a.weight_scale"), "overflow": (2, 2, "a.weight_scale"),
        "negative": (4, 2, "a.weight_scale"), "zero": (2, 2, "a.weight_scale"),
    }  # fmt: skip
    text = " ".join(text_of(report, 80, monkeypatch).split())
    assert "warning NaN: 4 in 2 tensors, such as a.weight_scale" in text
    with pytest.raises(ValueError, match="NaN"):  # and the layer itself is refused
        open_checkpoint(tmp_path).layer("a").weight()


def test_biases_must_be_finite(tmp_path):
    bias = {"a": torch.full((8,), -1e6), "b": torch.tensor([float("nan")] + [0.0] * 7)}
    report = inspect_report(fp8(tmp_path, {"a": GOOD, "b": GOOD.clone()}, bias))
    assert findings(report) == {"nan": (1, 1, "b.bias")}


def test_e8m0_scales(tmp_path):
    """E8M0: 255 is NaN, 2**16 exceeds float16, and a block of zeros has 2**-127."""
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    scales = torch.full((4, 4), 120, dtype=torch.uint8)
    scales[0, 0], scales[1, 1], scales[2, 2] = 255, 127 + 16, 0
    tensors = {"a.weight_packed": codes, "a.weight_scale": scales}
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    settings = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    report = inspect_report(write(tmp_path, tensors, settings))
    assert findings(report) == {"nan": (1, 1, "a.weight_scale"), "overflow": (1, 1, "a.weight_scale")}


def test_large_scales_are_read_only_on_request(tmp_path, monkeypatch):
    fp8(tmp_path, {"a": GOOD, "b": row(0.0)})
    monkeypatch.setattr(scale_checks, "AUTO_BYTES", 63)
    report = inspect_report(tmp_path)
    assert report["scales"] == {"checked": False, "tensors": 2, "nbytes": 64, "findings": []}
    assert "scales (0.1 kB in 2 tensors) were not read: --scales checks them" in text_of(report, 100, monkeypatch)
    assert findings(inspect_report(tmp_path, True)) == {"zero": (1, 1, "b.weight_scale")}
    monkeypatch.undo()
    assert findings(inspect_report(tmp_path)) and not inspect_report(tmp_path, False)["scales"]["checked"]


def test_batch_size_does_not_matter(tmp_path, monkeypatch):
    scales = {f"l{i}": row(0.0 if i % 3 else 0.5) for i in range(20)}
    whole = inspect_report(fp8(tmp_path, scales))["scales"]
    for size in (1, 33, 100):
        monkeypatch.setattr(scale_checks, "_BATCH_BYTES", size)
        assert inspect_report(tmp_path)["scales"] == whole


# ---- the command -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    fp8(tmp_path, {"a": GOOD, "b": row(0.0)})
    for words, checked in ((["--json"], True), (["--json", "--no-scales"], False), (["--json", "--scales"], True)):
        monkeypatch.setattr("sys.argv", ["bitline", "inspect", str(tmp_path), *words])
        with pytest.raises(SystemExit) as ended:
            main.run()
        report = json.loads(capsys.readouterr().out)
        assert ended.value.code == 0 and report["scales"]["checked"] == checked and report["kinds"][0]["layers"] == 2
