"""`bitline explain` and `doctor`: their text at several widths, and their JSON against the documented keys."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import typer

import bitline
from bitline import InputError, types
from bitline.cli import (
    candidate_status,
    console,
    doctor,
    doctor_text,
    explain,
    explain_table,
    explain_text,
    main,
    render,
)
from bitline.kernels import registry
from bitline.model.plan import plan as plan_of
from bitline.platform import PACKAGES, Platform
from bitline.select import Policy, choose
from tiny import compressed, llama

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"
MACHINES = [
    "cuda:sm75", "cuda:sm90", "cuda:sm100", "cuda:sm120,flashinfer", "rocm:gfx942", "rocm:gfx1100", "xpu", "cpu:avx2",
    "cpu:avx512,amx", "cpu:avx2,no_native", "cpu:aarch64,dotprod",
]  # fmt: skip
MIXED = "ct_mixed_w4a16_fp8"


def report(name, platform, policy=None, tp=1, **more):
    return explain.explain_report(FIXTURES / name, Platform.parse(platform), policy or Policy(m=(1, 16, 512)), tp=tp, **more)


def text(made, width=80, show=explain_text.show, **more):
    said, before = io.StringIO(), console.out._width
    console.out._width = width
    try:
        with contextlib.redirect_stdout(said):
            show(made, **more)
    finally:
        console.out._width = before
    return said.getvalue()


@pytest.mark.parametrize("name", [MIXED, "ct_fp8_block", "ct_nvfp4", "gq_w3g32_asym_descact_v1", "ct_smol2L_fp8_block"])
@pytest.mark.parametrize("tp", [1, 4])
def test_every_platform_at_every_width(name, tp):
    for platform in MACHINES:
        made = report(name, platform, tp=tp)
        for width in (80, 120):
            for everything in (False, True):
                lines = text(made, width, everything=everything).splitlines()
                assert all(line == line.rstrip() for line in lines)
                assert all(len(line) <= width for line in lines[1:]), max(lines[1:], key=len)  # the first is the path
        kernels = {render_name(p["kernel"]) for p in made["plans"]}
        assert all(kernel in "\n".join(lines) for kernel in kernels)


def render_name(kernel):
    return kernel.removesuffix("Kernel").removesuffix("Linear").removesuffix("MM")


def documented(section):
    page = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text()
    part = page.split(f"## `bitline {section}`")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w.\[\]]+)` \|", part, re.MULTILINE))


MAPS = (
    "separate_seconds", "cost_seconds", "estimated_seconds", "measured_seconds", "totals", "now", "versions", "compilers",
    "plugin_failures", "best_seconds", "sustained_seconds", "calls", "read_seconds", "compute_seconds", "dense_seconds",
    "dense_sustained_seconds",    "matmul_rates",
)  # fmt: skip


def keys(value, prefix=""):
    """Every key, lists as `name[]`; maps with free keys (M, packages) as the name alone."""
    found = set()
    for key, inner in value.items():
        name = f"{prefix}{key}"
        found.add(name)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            found |= set().union(*(keys(i, f"{name}[].") for i in inner))
        elif isinstance(inner, dict) and key not in MAPS:
            found |= keys(inner, f"{name}.")
    return found


def test_the_json_of_explain_has_the_documented_keys():
    made = [report(MIXED, p, tp=tp) for p in ("cuda:sm90", "cpu:zen,avx512_bf16") for tp in (1, 2)]
    made += [report("ct_nvfp4", "cuda:sm100"), report("autoawq_gemm", "cpu:avx2", tp=2)]
    assert set().union(*map(keys, made)) == documented("explain")
    for one in made:
        back = json.loads(json.dumps(main._finite(one), allow_nan=False))
        for plan in back["plans"]:
            numbers = [*plan["cost_seconds"].values(), plan["packed_bytes"], plan["layers"], *plan["shape"], *plan["ranks"]]
            assert all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
            assert {c["kind"] for c in plan["candidates"]} <= {
                "runs",
                "policy",
                "layer",
                "scheme",
                "package",
                "machine",
                "vendor",
            }
            assert all(c["ok"] == (c["kind"] == "runs") and (c["ok"] or c["reason"]) for c in plan["candidates"])


def test_the_json_of_doctor_has_the_documented_keys():
    made = doctor.doctor_report()
    assert keys(made) - {f"native.{k}" for k in made["native"]} == documented("doctor")
    assert json.loads(json.dumps(main._finite(made), allow_nan=False))["devices"][0]["memory"] > 1 << 28
    assert {p["package"] for p in made["packages"]} == {p.distribution for p in PACKAGES.values()}


def test_totals_are_the_sum_of_the_layers(tmp_path):
    made = report(MIXED, "cuda:sm90")
    assert made["layers"] == 4 == sum(p["layers"] for p in made["plans"])
    for m in ("1", "16", "512"):
        assert made["totals"][""]["cost_seconds"][m] == pytest.approx(
            sum(p["layers"] * p["cost_seconds"][m] for p in made["plans"])
        )
    assert made["totals"][""]["packed_bytes"] == sum(p["layers"] * p["packed_bytes"] for p in made["plans"])
    for cut, dims in ((report(MIXED, "cuda:sm90", tp=2), {""}), (without_model(MIXED, "cuda:sm90", tmp_path, tp=2), {"N", "K"})):
        assert set(cut["totals"]) == dims
        assert all(t["packed_bytes"] < 0.6 * made["totals"][""]["packed_bytes"] for t in cut["totals"].values())


def without_model(name, platform, folder, **more):
    """The report of a fixture's layers without the configuration of a model."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"quantization_config": config["quantization_config"]}))
    shutil.copy(FIXTURES / name / "model.safetensors", folder)
    return report(folder, platform, **more)


def test_the_plan_of_ranks():
    """Heads, rows and columns of the model, what each rank holds, and what ranks exchange."""
    made = report(MIXED, "cuda:sm90", tp=4)
    assert {(p["names"], p["cut"], tuple(p["shape"])) for p in made["plans"]} == {
        ("1 × down_proj", "K", (256, 128)), ("2 × k_proj, v_proj", "N", (64, 256)), ("1 × q_proj", "N", (64, 256)),
    }  # fmt: skip
    facts = made["tensor_parallel"]
    assert facts["planned"] and [r["query_heads"] for r in facts["ranks"]] == [1] * 4
    assert {(r["kv_heads"], r["kv_heads_on_ranks"]) for r in facts["ranks"]} == {(1, 2)}
    assert {e["what"]: e["count"] for e in facts["exchanges"]} == {"sum": 4, "embedding": 1, "gather": 1}
    shown = text(made, 120)
    assert "K/4" in shown and "1 query, 1 key-value, which 2 ranks have" in shown and "6 collective operations" in shown
    uneven = report("ct_smol2L_fp8_block", "cuda:sm90", tp=2)
    shapes = {(p["example"].rpartition(".")[2], tuple(p["ranks"])): p["shape"] for p in uneven["plans"]}
    assert shapes["q_proj", (0,)] == [192, 576] and shapes["q_proj", (1,)] == [384, 576]
    with pytest.raises(InputError, match=r"cut over 7 ranks.*4 heads.*at most 4 ranks"):
        report(MIXED, "cuda:sm90", tp=7)


def test_ranks_with_different_kernels_are_listed(tmp_path):
    made = without_model(MIXED, "cuda:sm90", tmp_path, tp=3)
    assert not made["tensor_parallel"]["planned"] and "no model to plan for" in " ".join(text(made).split())
    for key in {(p["example"], p["cut"]) for p in made["plans"]}:
        assert sorted(r for p in made["plans"] if (p["example"], p["cut"]) == key for r in p["ranks"]) == [0, 1, 2]
    shown = text(made, 120)
    assert "N/3 " in shown and "K/3 rank 0" in shown and "K/3 ranks 1-2" in shown
    assert re.search(r"faster, but GluonHopper, Machete \(256×171\): scale blocks of 64 columns, offset by 42", shown)
    assert explain_table.rank_spans([0, 2, 3, 4, 7]) == "0, 2-4, 7"


def test_packages_that_would_change_the_plan():
    made = report("ct_nvfp4", "cuda:sm100")
    more = next(p for p in made["if_installed"] if p["package"] == "flashinfer-python")
    assert more["layers"] == 4 and more["install"].startswith("pip install") and more["kernels"]
    assert "with pip install flashinfer-python" in text(made)
    there = report("ct_nvfp4", "cuda:sm100,flashinfer")
    assert {p["kernel"] for p in there["plans"]} == set(more["kernels"])
    assert there["totals"] == more["totals"] and not any(p["package"] == "flashinfer-python" for p in there["if_installed"])


KINDS = {"runs", "policy", "layer", "scheme", "package", "machine", "vendor"}
SPEC = types.LinearSpec(4096, 4096, types.uint4b8, (1, 128))


@pytest.mark.parametrize(
    ("kernel", "platform", "changes", "expected"),
    [
        ("TritonW4A16LinearKernel", "cuda:sm90", {}, "runs"),
        ("TritonW4A16LinearKernel", "cuda:sm90", {"weight": types.float8_e4m3fn}, "scheme"),
        ("TorchInt4PackLinearKernel", "cpu:avx512", {"block": (1, 48)}, "layer"),
        ("TorchInt4PackLinearKernel", "cpu:avx512", {"act_dtype": types.torch.float32}, "layer"),
        ("CPUWNA16LinearKernel", "cuda:sm90", {}, "vendor"),
        ("GluonHopperLinearKernel", "cuda:sm80", {}, "machine"),
        ("ZentorchWNA16LinearKernel", "cpu:zen,avx512_bf16", {}, "package"),
        ("ZentorchWNA16LinearKernel", "cpu:avx512_bf16,zentorch", {}, "machine"),
        ("TritonW4A16LinearKernel", "cpu", {}, "machine"),
        ("ReferenceLinearKernel", "xpu", {}, "policy"),
    ],
)
def test_status_of_a_refused_candidate(kernel, platform, changes, expected):
    choice = choose(SPEC.replace(**changes), platform, Policy(disabled={"ReferenceLinearKernel"}))
    candidate = next(c for c in choice.candidates if c.name == kernel)
    assert candidate_status.status(candidate, choice) == expected
    if expected == "package":
        assert candidate_status.missing_package(candidate, choice.platform) == "zentorch"


def test_hardware_reasons_precede_missing_packages():
    made = report("ct_w4a16_g128_sym", "cpu:avx2")
    triton = next(c for c in made["plans"][0]["candidates"] if c["kernel"] == "TritonW4A16LinearKernel")
    assert triton["kind"] == "machine" and "no compiler for CPUs" in triton["reason"]


def test_policies_are_shown_and_obeyed():
    policy = Policy(m=(1, 512), batch_invariant=True, backend="triton", disabled={"TritonW4A16LinearKernel"}, strict=False)
    made = report("ct_w4a16_g128_sym", "cuda:sm90", policy)
    assert made["policy"]["batch_invariant"] and made["policy"]["disabled"] == ["TritonW4A16LinearKernel"]
    said = " ".join(text(made, 120).split())
    assert "asked for: backend triton, batch invariant, without TritonW4A16" in said and "batch invariance overrules it" in said
    assert {p["kernel"] for p in made["plans"]} == {"BatchInvariantLinearKernel"}


def test_all_shows_every_reason():
    made = report("ct_w4a16_g128_sym", "cuda:sm90")
    said, short = " ".join(text(made, 120, everything=True).split()), text(made, 120)
    for c in made["plans"][0]["candidates"]:
        assert c["kind"] in ("runs", "vendor") or (c["reason"] in said and render_name(c["kernel"]) in said), c
    assert "--all lists them" in short and len(short) < len(said)


def test_a_checkpoint_without_quantized_layers(tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    made = explain.explain_report(tmp_path, Platform.parse("cuda:sm90"), Policy())
    assert made["plans"] == [] and made["totals"] == {} and "no quantized linear layer" in text(made)


def test_every_package_has_a_description_and_instructions():
    assert all(p.distribution and p.adds and p.install for p in PACKAGES.values())


@pytest.mark.parametrize("width", [80, 120])
def test_doctor_at_every_width_with_failures(width, monkeypatch):
    made = doctor.doctor_report()
    broken = {"device": "cuda:0", "error": "RuntimeError: no driver"}
    failed = next(k for k in made["kernels"] if k["ran"]) | {"ok": False, "detail": "worst element [0, 3]"}
    made |= {"devices": [*made["devices"], broken], "plugin_failures": {"shop": "ImportError: no shop"},
             "kernels": [*made["kernels"], failed], "native": {"available": False, "reason": "not built"},
             "compilers": dict.fromkeys(made["compilers"])}  # fmt: skip
    said = text(made, width, show=doctor_text.show)
    flat = " ".join(said.split())
    for words in ("no driver", "no shop", "FAILED", "worst element [0, 3]", "not built. There is no C++ compiler", "would add"):
        assert words in flat, words
    assert all(len(line) <= width and line == line.rstrip() for line in said.splitlines()[1:])


def test_doctor_tests_every_kernel_that_runs_here():
    made, here = doctor.doctor_report(), Platform.detect("cpu")
    able = {e.name for e in registry.entries() if "cpu" in e.platforms and e.kernel.is_supported(here)}
    assert {k["kernel"] for k in made["kernels"] if k["ran"] and k["device"] == "cpu"} == able
    assert all(k["ok"] and k["error"] <= k["allowed"] for k in made["kernels"] if k["ran"])


def test_at_commas_and_rate():
    assert render.at_commas("cpu:" + ",".join(["abcdefgh"] * 6), 30).splitlines() == [
        "cpu:abcdefgh,abcdefgh,", "abcdefgh,abcdefgh,abcdefgh,", "abcdefgh"
    ]  # fmt: skip
    assert [render.rate(v, "op/s") for v in (790e12, 1.5e15, 3.45e10, 12.0)] == [
        "790 Top/s",
        "1.5 Pop/s",
        "34.5 Gop/s",
        "12 op/s",
    ]


def test_merged_layers_are_named_with_their_time(tmp_path):
    folder, _ = compressed(tmp_path, llama())
    made = explain.explain_report(folder, Platform.parse("cuda:sm90"), Policy())
    assert sorted((m["names"], m["layers"], m["shape"]) for m in made["merged"]) == [
        (["gate_proj", "up_proj"], 2, [320, 64]), (["q_proj", "k_proj", "v_proj"], 2, [128, 64]),
    ]  # fmt: skip
    for merged in made["merged"]:
        assert all(0 < merged["cost_seconds"][m] <= merged["separate_seconds"][m] for m in ("1", "256"))
    said = text(made, 120)
    assert "load_model packs gate_proj, up_proj as one layer 320×64, 2 times" in " ".join(said.split())
    assert not explain.explain_report(folder, Platform.parse("cpu:zen"), Policy())["merged"]
    assert not explain.explain_report(folder, Platform.parse("cuda:sm90"), Policy(), tp=2)["merged"]


def test_bytes_of_layers_include_their_biases(tmp_path):
    """As `bitline run` counts them, which has the tensors; float32 is the input dtype of a CPU without features."""
    folder = compressed(tmp_path, llama(attention_bias=True))[0]
    made = report(folder, "cpu", policy=Policy(kernel="ReferenceLinearKernel"))
    model = bitline.load_model(folder, dtype=torch.float32, policy=Policy(kernel="ReferenceLinearKernel"))
    assert model.model.layers[0].self_attn.q_proj.bias.nbytes == 4 * 64
    assert made["totals"][""]["packed_bytes"] == sum(row.packed_bytes for row in plan_of(model))


@pytest.mark.parametrize("m", ["1,,2", "0", "-1", "9" * 5000, "4..1", "x", ""])
def test_batch_sizes_that_are_none(m):
    with pytest.raises(typer.BadParameter, match="from 1 to 65536"):
        main.parse_batch_sizes(m)


def test_batch_sizes_are_those_of_bench():
    assert main.parse_batch_sizes("1, 16,300") == (1, 16, 300) and main.parse_batch_sizes("1..8") == (1, 2, 4, 8)
