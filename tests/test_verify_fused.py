"""bitline verify of what a model runs as one call: experts, and the native decode step; planted faults are found."""

import ctypes
import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import bitline
from bitline import native
from bitline.cli.main import app
from bitline.experts import ExpertStack
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.kernels.registry import unregister_kernel
from bitline.model.decoder_layer import LayerFields
from bitline.model.verify_fused import DECODE_STEP
from command import bitline as command
from decoding import FAMILIES, write_family
from tiny import SETTINGS, compressed, llama, rewrite

pytest.importorskip("transformers")
needs_core = pytest.mark.skipif(native.core() is None, reason="needs the native core")
LAYERS = [f"model.layers.{i}" for i in range(2)]
EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(2)]
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}  # heads of 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return compressed(tmp_path_factory.mktemp("tiny"), llama(**WIDE))[0]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A Qwen3-MoE of six experts a layer, as compressed-tensors W4A16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder, original = tmp_path_factory.mktemp("moe"), tmp_path_factory.mktemp("original")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SETTINGS, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(original)
    from bitline.conversion import quantize_checkpoint

    quantize_checkpoint(original, folder / "quantized", scheme="W4A16", group_size=32)
    return folder / "quantized"


def verify(*words, code=0, dtype="bfloat16"):
    """The command's report, in this process; its exit status must be `code`."""
    done = CliRunner().invoke(app, ["verify", *map(str, words), "--device", "cpu", "--dtype", dtype, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


# ---- the native decode step ----------------------------------------------------------------------------------------------


@needs_core
@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_layer(tmp_path, family):
    path = write_family(tmp_path, family)
    report = verify(path, "--m", 1)
    assert report["ok"] and {c["layer"] for c in report["fused"]} == {*LAYERS} and report["skipped"] == []
    assert all(c["kernel"] == DECODE_STEP and c["m"] == 1 and 0 < c["error"] <= c["allowed"] for c in report["fused"])
    assert all(c["cosine"] > 0.999 for c in report["fused"])


@needs_core
def test_the_table(folder):
    done = command("verify", folder, "--device", "cpu", "--dtype", "bfloat16", "--m", 1)
    assert done.returncode == 0 and "every layer is within the tolerance, and so are 2 fused calls" in " ".join(
        done.stdout.split()
    )
    assert "decode step" in " ".join(done.stdout.split()) and "model.layers" in done.stdout


@needs_core
@pytest.mark.parametrize(
    "options",
    [("--dtype", "float32"), ("--kernel", "ReferenceLinearKernel"), ("--tp", 2)],
)
def test_not_where_the_model_would_run_its_modules(folder, options):
    words = [w for w in options if w not in ("--dtype", "float32")]
    report = verify(folder, "--m", 1, *words, dtype="float32" if "float32" in options else "bfloat16")
    assert report["ok"] and report["fused"] == []


@needs_core
def test_not_without_the_native_step(folder, monkeypatch):
    monkeypatch.setenv("BITLINE_NO_STEP", "1")
    assert verify(folder, "--m", 1)["fused"] == []


def with_changed_arguments(monkeypatch, change):
    """Plant a fault in the native step: its description of a layer is changed on the way."""
    core = native.core()
    original = core.decode_layer

    def wrong(address, *scalars):
        described = LayerFields.from_address(address)
        changed = LayerFields(*described)
        return original(ctypes.addressof(changed), *(change(changed, *scalars) or scalars))

    monkeypatch.setattr(core, "decode_layer", wrong)


X, Y, NORM_1, NORM_2, COS, SIN, KEYS, VALUES, Q, K_WEIGHT, V_WEIGHT, LENGTH = 0, 1, 2, 3, 6, 7, 8, 9, 10, 12, 14, 29


def swap(a, b):
    def change(layer, *_scalars):
        layer[a], layer[b] = layer[b], layer[a]

    return change


def one_position_less(layer, *_scalars):
    layer[LENGTH] -= 1


FAULTS = {
    "cosine for sine": swap(COS, SIN), "keys for values": swap(KEYS, VALUES), "the weight of k for v": swap(K_WEIGHT, V_WEIGHT),
    "a stale position": one_position_less, "the scale of attention": lambda layer, scale, *rest: (2 * scale, *rest),
    "the wrong norm": swap(NORM_1, NORM_2),
}  # fmt: skip


@needs_core
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_native_step(tmp_path, fault, monkeypatch):
    model = llama(**WIDE)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data = torch.rand(64) + 0.5
        layer.post_attention_layernorm.weight.data = torch.rand(64) + 0.5
    path, _ = compressed(tmp_path, model)
    assert verify(path, "--m", 1)["ok"]
    with_changed_arguments(monkeypatch, FAULTS[fault])
    report = verify(path, "--m", 1, code=1)
    assert sorted(report["failed"]) == LAYERS and not report["ok"]
    assert all(c["ok"] for c in report["checks"]) and not any(c["ok"] for c in report["fused"])
    done = CliRunner().invoke(app, ["verify", str(path), "--device", "cpu", "--dtype", "bfloat16", "--m", "1"])
    assert done.exit_code == 1 and "0 of 14 layers, 2 of 2 fused calls failed" in " ".join(done.stdout.split())


# ---- experts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_layer_of_experts(moe, dtype):
    report = verify(moe, "--m", "1,5", dtype=dtype)
    assert report["ok"] and report["skipped"] == []
    assert {(c["layer"], c["m"]) for c in report["fused"]} == {(name, m) for name in EXPERTS for m in (1, 5)}
    assert all(0 < c["error"] <= c["allowed"] and c["nmse"] < 1e-3 for c in report["fused"])


@needs_core
def test_a_fault_of_the_one_call_of_a_kernel(moe, monkeypatch):
    from bitline.kernels.registry import kernel_by_name

    report = verify(moe, "--m", 4)
    kernel = kernel_by_name(report["fused"][0]["kernel"])
    original = kernel.apply_experts.__func__

    def without_weights(cls, x, index, weights, *rest):
        return original(cls, x, index, torch.ones_like(weights), *rest)

    monkeypatch.setattr(kernel, "apply_experts", classmethod(without_weights))
    found = verify(moe, "--m", 4, code=1)
    assert sorted(found["failed"]) == EXPERTS and all(c["ok"] for c in found["checks"])


@pytest.fixture
def experts_kernel():
    """A kernel whose one call of experts sends every token to the next expert."""

    class NextExpertKernel(ReferenceLinearKernel):
        @classmethod
        def can_experts(cls, up, down, gate):
            return True

        @classmethod
        def apply_experts(cls, x, index, weights, up, up_bias, down, down_bias, up_spec, down_spec, gate):
            from bitline.experts import loop_over_experts

            count = up[0].shape[0]
            layer = lambda packed, e, spec: lambda v: cls.apply(v, [t[(e + 1) % count] for t in packed], None, spec)
            run = lambda e, rows: layer(down, e, down_spec)(gate(layer(up, e, up_spec)(rows)))
            return loop_over_experts(x, index, weights, count, run)

    bitline.register_kernel(NextExpertKernel)
    yield "NextExpertKernel"
    unregister_kernel("NextExpertKernel")


def test_a_call_that_takes_other_experts(moe, experts_kernel):
    report = verify(moe, "--m", 2, "--kernel", experts_kernel, code=1)
    assert sorted(report["failed"]) == EXPERTS and all(c["ok"] for c in report["checks"])
    assert all(c["kernel"] == experts_kernel for c in report["fused"])


def test_the_experts_of_each_rank(moe, experts_kernel):
    ok = verify(moe, "--m", 2, "--tp", 2, "--expert-parallel")
    assert ok["ok"] and {(c["layer"], c["rank"]) for c in ok["fused"]} == {(name, rank) for name in EXPERTS for rank in (0, 1)}
    found = verify(moe, "--m", 2, "--tp", 2, "--expert-parallel", "--kernel", experts_kernel, code=1)
    assert {(c["layer"], c["rank"]) for c in found["fused"] if not c["ok"]} == {(c["layer"], c["rank"]) for c in ok["fused"]}
    assert verify(moe, "--m", 2, "--tp", 2)["fused"] == []


def test_experts_of_a_rank_that_failed_are_skipped_on_that_rank_alone(moe, tmp_path):
    path = tmp_path / "moe"
    shutil.copytree(moe, path)
    layer = f"{EXPERTS[1]}.5.up_proj"
    rewrite(path, lambda tensors: tensors[f"{layer}.weight_scale"].__setitem__((0, 0), torch.nan))
    report = verify(path, "--m", 1, "--tp", 2, "--expert-parallel", code=1)
    assert report["failed"] == [layer] and report["skipped"] == [{"layer": EXPERTS[1], "reason": f"{layer} in it failed"}]
    assert {(c["layer"], c["rank"]) for c in report["fused"]} == {(EXPERTS[0], 0), (EXPERTS[0], 1), (EXPERTS[1], 0)}


def test_a_call_that_raises(moe, monkeypatch):
    from bitline.experts import QuantExperts

    monkeypatch.setattr(QuantExperts, "forward", lambda *_: 1 / 0)
    report = verify(moe, "--m", 2, code=1)
    assert all("division by zero" in c["fault"] for c in report["fused"]) and len(report["failed"]) == 2


# ---- bitline.verify of a loaded model ------------------------------------------------------------------------------------


@needs_core
def test_a_loaded_model_with_its_native_step(folder, monkeypatch):
    model = bitline.load_model(folder, dtype=torch.bfloat16)
    before = {name: (id(part), {k: id(v) for k, v in part.__dict__.items()}) for name, part in model.named_modules()}
    steps = [c for c in bitline.verify(model) if c.kernel == DECODE_STEP]
    assert sorted(c.layer for c in steps) == LAYERS and all(0 < c.error <= c.allowed for c in steps)
    assert before == {name: (id(part), {k: id(v) for k, v in part.__dict__.items()}) for name, part in model.named_modules()}
    assert not [c for c in bitline.verify(bitline.load_model(folder, native_step=False)) if c.kernel == DECODE_STEP]
    with_changed_arguments(monkeypatch, one_position_less)
    with pytest.raises(bitline.VerificationError) as caught:
        bitline.verify(model)
    assert (
        caught.value.tensor in LAYERS
        and "native_step=False" in caught.value.fix
        and "1 other layers are off too" in caught.value.found
    )
    with pytest.raises(bitline.VerificationError):
        bitline.load_model(folder, dtype=torch.bfloat16, verify=True)


@needs_core
def test_loaded_experts(moe, monkeypatch):
    model = bitline.load_model(moe, dtype=torch.bfloat16)
    found = [c for c in bitline.verify(model) if c.layer in EXPERTS]
    assert {(c.layer, c.m) for c in found} == {(name, m) for name in EXPERTS for m in (1, 17)}
    from bitline.kernels.registry import kernel_by_name

    kernel = kernel_by_name(found[0].kernel)
    original = kernel.apply_experts.__func__
    monkeypatch.setattr(kernel, "apply_experts", classmethod(lambda cls, x, *rest: original(cls, x.roll(1, -1), *rest)))
    with pytest.raises(bitline.VerificationError) as caught:
        bitline.verify(model)
    assert caught.value.tensor in EXPERTS and kernel.__name__ in caught.value.found


# ---- what is chosen, and what cannot be checked --------------------------------------------------------------------------


@needs_core
def test_eight_of_many_equal_layers_and_fewer_of_a_sample(tmp_path):
    path, _ = compressed(tmp_path, llama(num_hidden_layers=20, **WIDE))
    found = {c["layer"] for c in verify(path, "--m", 1)["fused"]}
    assert len(found) == 8 and {"model.layers.0", "model.layers.19"} <= found
    assert len(verify(path, "--m", 1, "--sample", 3)["fused"]) == 3


@needs_core
def test_parts_of_layers_that_failed_are_named_and_not_checked(tmp_path):
    path, _ = compressed(tmp_path, llama(**WIDE))
    rewrite(path, lambda tensors: tensors[f"{LAYERS[1]}.mlp.up_proj.weight_scale"].__setitem__((0, 0), torch.nan))
    report = verify(path, "--m", 1, code=1)
    assert report["failed"] == [f"{LAYERS[1]}.mlp.up_proj"] and [c["layer"] for c in report["fused"]] == LAYERS[:1]
    assert report["skipped"] == [{"layer": LAYERS[1], "reason": f"{LAYERS[1]}.mlp.up_proj in it failed"}]


def test_a_checkpoint_of_no_model_that_transformers_has(tmp_path):
    path, _ = compressed(tmp_path, llama(**WIDE), config={"model_type": "forecaster"})
    report = verify(path, "--m", 1)
    assert report["ok"] and len(report["checks"]) == 14 and report["fused"] == []
    assert "forecaster" in report["skipped"][0]["reason"] and report["skipped"][0]["layer"] == ""


def test_memory_is_that_of_one_part(moe, monkeypatch):
    """When the second layer's experts are packed, the first layer's are gone."""
    import gc
    import weakref

    stacks, alive = [], []
    original = ExpertStack.__init__

    def noted(self, *args):
        gc.collect()
        alive.append(sum(ref() is not None for ref in stacks))
        original(self, *args)
        stacks.append(weakref.ref(self))

    monkeypatch.setattr(ExpertStack, "__init__", noted)
    verify(moe, "--m", 1)
    assert len(stacks) == 4 and max(alive) == 1
