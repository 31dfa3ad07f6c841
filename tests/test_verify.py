"""bitline verify: every layer of a checkpoint against the reference; planted faults are found and named."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import bitline
from bitline.cli.main import app
from bitline.kernels.reference import ReferenceLinearKernel
from bitline.kernels.registry import unregister_kernel
from bitline.model import tensor_parallel
from bitline.model.verify_file import sample_layers
from command import bitline as command
from tiny import compressed, llama, rewrite

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return compressed(tmp_path_factory.mktemp("tiny"), llama())[0]


def verify(*words, code=0):
    """The command's report, in this process; its exit status must be `code`."""
    done = CliRunner().invoke(app, ["verify", *map(str, words), "--device", "cpu", "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def garbage():
    """A kernel whose results are wrong for M > 1."""

    class GarbageAboveOneKernel(ReferenceLinearKernel):
        @classmethod
        def apply(cls, x, packed, bias, spec):
            y = super().apply(x, packed, bias, spec)
            return y if x.shape[0] == 1 else torch.roll(y, 1, 0)

    bitline.register_kernel(GarbageAboveOneKernel)
    yield "GarbageAboveOneKernel"
    unregister_kernel("GarbageAboveOneKernel")


# ---- sound checkpoints ---------------------------------------------------------------------------------------------------


def test_every_layer_at_every_m(folder):
    report = verify(folder, "--m", "1,3,40")
    assert report["ok"] and report["failed"] == [] and report["layers"] == report["layers_in_all"] == 14
    assert {(c["layer"], c["m"]) for c in report["checks"]} == {
        (record.name, m) for record in bitline.open_checkpoint(folder).layers() for m in (1, 3, 40)
    }
    assert all(0 < c["error"] <= c["allowed"] and 0 < c["nmse"] < 1e-4 and 0.999 < c["cosine"] <= 1 for c in report["checks"])
    ratios = [c["error"] / c["allowed"] for c in report["checks"]]
    assert ratios == sorted(ratios, reverse=True)


def test_the_table_as_text(folder):
    done = command("verify", folder, "--device", "cpu", "--m", "1,3")
    assert done.returncode == 0, done.stderr
    for word in ("14 layers", "error", "allowed", "NMSE", "cosine", "ok", "every layer is within the tolerance"):
        assert word in done.stdout
    assert "FAILED" not in done.stdout


def test_a_chosen_kernel_and_all_of_them(folder):
    only = verify(folder, "--kernel", "ReferenceLinearKernel", "--sample", 1, "--m", 2)
    assert [c["kernel"] for c in only["checks"]] == ["ReferenceLinearKernel"]
    every = verify(folder, "--all-kernels", "--sample", 1, "--m", "1,3", "--dtype", "float32")
    (record,) = [r for r in bitline.open_checkpoint(folder).layers() if r.name == every["checks"][0]["layer"]]
    choice = bitline.choose(record.spec.replace(act_dtype=torch.float32))
    able = {candidate.name for candidate in choice.candidates if candidate.verdict}
    assert {c["kernel"] for c in every["checks"]} | {r["kernel"] for r in every["refused"]} == able and len(able) > 1


def test_a_sample_is_spread_evenly_and_drawn_by_the_seed():
    names = [str(i) for i in range(100)]
    for seed in range(5):
        found = [int(name) for name in sample_layers(names, 10, seed)]
        assert [number // 10 for number in found] == list(range(10))
        assert found == [int(name) for name in sample_layers(names, 10, seed)]
    assert sample_layers(names, 10, 0) != sample_layers(names, 10, 1)
    assert sample_layers(names, 200, 0) == names


def test_a_wide_layer_is_compared_as_a_whole(tmp_path):
    """Wrong rows in the middle of more than a call compares at large M."""
    (tmp_path / "wide").mkdir()
    folder, _ = compressed(tmp_path / "wide", llama(intermediate_size=4608, num_hidden_layers=1))
    weight = bitline.open_checkpoint(folder).layer("model.layers.0.mlp.up_proj").weight()
    layer = bitline.QuantLinear(weight, kernel="ReferenceLinearKernel")
    layer.get_buffer("packed_scale")[2300] *= 1.5
    from bitline.model.verify import check_layer

    checks = {check.m: check.ok for check in check_layer(layer, weight, "up", (16, 1), every_row=True)}
    assert checks == {1: False, 16: True}


@pytest.mark.parametrize(
    "words",
    [("--kernel", "ReferenceLinearKernel", "--all-kernels"), ("--sample", "0"), ("--tp", "0"), ("--expert-parallel",),
     ("--m", "none"),
     ("--kernel", "NoSuchKernel"), ("--dtype", "int8")],
)  # fmt: skip
def test_a_wrong_command_line(folder, words):
    assert CliRunner().invoke(app, ["verify", str(folder), *words]).exit_code == 2


def test_what_cannot_be_opened_and_what_has_nothing_to_verify(tmp_path, folder):
    assert command("verify", tmp_path / "none", "--device", "cpu").returncode == 1
    dense = tmp_path / "dense"
    dense.mkdir()
    llama().save_pretrained(dense)
    done = command("verify", dense, "--device", "cpu")
    assert done.returncode == 1 and "nothing to verify" in done.stderr


# ---- planted faults ------------------------------------------------------------------------------------------------------


def test_a_kernel_that_is_wrong_above_m_1(folder, garbage):
    report = verify(folder, "--kernel", garbage, code=1)
    assert len(report["failed"]) == 14
    assert all(c["ok"] == (c["m"] == 1) for c in report["checks"])
    assert verify(folder, "--kernel", garbage, "--m", 1)["ok"]
    done = CliRunner().invoke(app, ["verify", str(folder), "--device", "cpu", "--kernel", garbage, "--m", "1,16"])
    assert done.exit_code == 1 and "14 of 14 layers failed" in done.stdout and done.stdout.count("FAILED") == 14


def test_a_kernel_that_raises_is_a_fault_of_its_layers(folder, monkeypatch):
    monkeypatch.setattr(ReferenceLinearKernel, "apply", lambda *_: 1 / 0)
    report = verify(folder, "--kernel", "ReferenceLinearKernel", "--sample", 2, code=1)
    assert len(report["failed"]) == 2 and all("division by zero" in c["fault"] for c in report["checks"])


def test_a_layer_that_cannot_be_read_does_not_end_the_others(tmp_path):
    folder, _ = compressed(tmp_path / "m", llama())
    rewrite(folder, lambda tensors: tensors[f"{DOWN}.weight_scale"].__setitem__((0, 0), torch.nan))
    report = verify(folder, "--m", 1, code=1)
    assert report["failed"] == [DOWN] and report["layers"] == 14 and len(report["checks"]) == 14
    assert f"{DOWN}.weight_scale" in report["checks"][0]["fault"] and "NaN" in report["checks"][0]["fault"]


def test_a_tensor_that_nobody_uses_is_named(tmp_path):
    folder, _ = compressed(tmp_path / "m", llama())
    rewrite(folder, lambda tensors: tensors.update({f"{DOWN}.weight_second_scale": torch.ones(64)}))
    report = verify(folder, "--m", 1, code=1)
    assert report["failed"] == [DOWN] and f"{DOWN}.weight_second_scale" in report["checks"][0]["fault"]
    with pytest.raises(bitline.CheckpointError, match=r"nothing uses.*weight_second_scale"):
        bitline.load_model(folder)


# ---- ranks of tensor parallelism -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_slices_of_every_rank(folder, ranks):
    report = verify(folder, "--tp", ranks, "--m", "1,5")
    assert report["ok"] and report["tp"] == ranks
    assert {(c["layer"], c["rank"]) for c in report["checks"]} == {
        (record.name, rank) for record in bitline.open_checkpoint(folder).layers() for rank in range(ranks)
    }


def test_scales_that_are_not_sharded_along_k(folder, monkeypatch):
    """Every rank gets the scales of the first columns, as many as it has groups."""
    original = tensor_parallel.read_cut

    def first_scales(record, cut, order=None):
        part = original(record, cut, order)
        whole = record.weight().scale
        return part if cut.dim == 0 else dataclasses.replace(part, scale=whole[:, : part.scale.shape[1]].contiguous())

    monkeypatch.setattr(tensor_parallel, "read_cut", first_scales)
    report = verify(folder, "--tp", 2, "--m", 1, code=1)
    rows = [c for c in report["checks"] if not c["ok"]]
    assert {c["rank"] for c in rows} == {1}  # the first rank's are the right ones
    assert {c["layer"].rpartition(".")[2] for c in rows} == {"o_proj", "down_proj"} and len(rows) == 4
    assert all("columns" in c["fault"] and "differs from the whole layer" in c["fault"] for c in rows)


def test_whole_scales_beside_a_slice_of_the_codes_are_refused(folder, monkeypatch):
    original = tensor_parallel.read_cut

    def whole_scales(record, cut, order=None):
        part = original(record, cut, order)
        return part if cut.dim == 0 else dataclasses.replace(part, scale=record.weight().scale)

    monkeypatch.setattr(tensor_parallel, "read_cut", whole_scales)
    report = verify(folder, "--tp", 2, "--m", 1, code=1)
    assert {name.rpartition(".")[2] for name in report["failed"]} == {"o_proj", "down_proj"}
    assert all("scale" in c["fault"] for c in report["checks"] if not c["ok"])


def test_more_ranks_than_heads(folder):
    done = CliRunner().invoke(app, ["verify", str(folder), "--device", "cpu", "--tp", "5"])
    assert done.exit_code == 1 and "heads cannot be cut" in str(done.exception)
