"""Models over ranks of gloo: the logits of one rank, the same bits on every rank, and each rank holds its part alone."""

import json
import os
import re
import subprocess
import sys

import pytest
import ranks
import torch
from forms import FORMS
from safetensors.torch import load_file, save_file
from whole_models import FIXTURES, complete

import bitline
from bitline import native
from bitline.model.rank_plan import RankPlan
from test_architectures import ARCHITECTURES, SETTINGS
from tiny import compressed, llama, random_model

pytestmark = pytest.mark.xdist_group("parallel")  # one process writes the models and starts the ranks

# Of each kind; `make test-all` runs all the others.
FORMATS = ("ar_mxfp4_autoround", "ct_fp8_block", "ct_fp8_dynamic", "ct_w4a8_int", "gq_w3g32_asym_descact_v1", "hqq_4bit")
OWN_SCALES = "qwen3 modelopt nvfp4 input scales of gate and up"  # three ranks cut the experts' groups of 16 channels
GPT_OSS, ONE_EXPERT = "gpt-oss mxfp4", "qwen3 one expert"
BY_EXPERT = ("qwen3 gptq act-order", "qwen3 int8", "qwen3 gguf mixed", GPT_OSS, OWN_SCALES, "qwen3 layer unquantized",
             "qwen3 up unquantized")  # fmt: skip
MOE = (*BY_EXPERT, ONE_EXPERT)
ARCHS = ("Qwen3", "Phi3", "Olmo2")
MORE = {"Glm4": (0, {"head_dim": 16})}
# Relative to the largest logit. Codes of quantized activations may flip where a sum's order differs: see `sensitivity`.
BOUND, FLIPS = 3e-6, 2e-3


def architecture(name, folder):
    return compressed(folder, random_model(name, SETTINGS | (ARCHITECTURES | MORE)[name][1]))[0]


def sizes(folder, **changes):
    return compressed(folder, llama(**changes))[0]


PLAIN = {
    "even": {}, "tied": {"tie_word_embeddings": True}, "bias": {"attention_bias": True, "mlp_bias": True},
    "nine heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
    "one kv head": {"num_key_value_heads": 1}, "odd channels": {"intermediate_size": 224},
}  # fmt: skip


def makers(everything):
    """Name -> a function that writes the model into a folder."""
    made = {name: lambda folder, c=changes: sizes(folder, **c) for name, changes in PLAIN.items()}
    archs = set(ARCHITECTURES | MORE) if everything else ARCHS
    formats = set(FIXTURES) if everything else FORMATS
    made |= {name: lambda folder, n=name: architecture(n, folder) for name in sorted(archs)}
    made |= {name: lambda folder, n=name: complete(n, folder) for name in sorted(formats)}
    made |= {name: lambda folder, n=name: FORMS[n](folder)[0] for name in (FORMS if everything else MOE)}
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes models once: {name: path}."""
    root, paths = tmp_path_factory.mktemp("models"), {}

    def write(everything):
        for name, make in makers(everything).items():
            if name not in paths:
                folder = root / name.replace(" ", "_")
                folder.mkdir()
                paths[name] = make(folder)
        return {name: paths[name] for name in makers(everything)}

    return write


@pytest.fixture(scope="module")
def alone():
    """Logits of one rank, and its model's bytes, computed once."""
    found = {}

    def of(path, dtype="float32", kernel="ReferenceLinearKernel"):
        key = str(path), dtype, kernel
        if key not in found:
            y, model = ranks.logits(str(path), None, getattr(torch, dtype), kernel)
            found[key] = y, ranks.held(model), model
        return found[key]

    return of


def case(path, **changes):
    return {"path": str(path), "dtype": "float32", "kernel": "ReferenceLinearKernel"} | changes


def quantizes(path):
    return any(record.spec.act is not None for record in bitline.open_checkpoint(path).layers())


def check(found, name, path, alone):
    """Bits equal on all ranks, close to one rank's."""
    want, nbytes, model = alone(path)
    outputs = [tensors[name] for tensors, _ in found if name in tensors]
    assert len(outputs) == len(found), [said[name] for _, said in found]
    assert all(torch.equal(y, outputs[0]) for y in outputs), name
    errors = distances(outputs[0], want)
    if not quantizes(path):
        assert float(errors.max()) <= BOUND, (name, errors)
    elif float(errors.max()) > FLIPS:  # a flipped code changes a token and those after it, the more where it changes the routing
        assert float(errors.max()) <= 2 * sensitivity(model, want), (name, errors)
    return nbytes


def distances(y, want):
    """The largest error of each token, relative to the largest logit."""
    return (y - want).abs().amax(-1) / want.abs().max()


def sensitivity(model, want, size=1e-6, tries=24):
    """The largest change of one rank's logits when its embeddings change by as much as a sum's order changes them."""
    largest = 0.0
    for seed in range(tries):
        generator = torch.Generator().manual_seed(seed)
        shake = lambda _module, _args, y, g=generator: y * (1 + size * torch.randn(y.shape, generator=g).to(y.device, y.dtype))
        hook = model.get_input_embeddings().register_forward_hook(shake)
        with torch.inference_mode():
            largest = max(largest, float(distances(ranks.forward(model), want).max()))
        hook.remove()
    return largest


def with_heads(paths, world):
    """Models with at least one attention head for each rank."""
    return {n: p for n, p in paths.items() if bitline.open_checkpoint(p).config.get("num_attention_heads", world) >= world}


@pytest.fixture(scope="module")
def two_ranks(written, tmp_path_factory):
    """What two ranks find, of all cases of the tests below in one start."""
    paths = written(False)
    cases = {name: case(path) for name, path in paths.items()}
    cases["alone"] = case(paths["ct_fp8_dynamic"], exact=False)
    for name in IN_BFLOAT16:
        cases[f"{name} bfloat16"] = case(paths[name], dtype="bfloat16", kernel="auto")
        cases[f"{name} merged"] = case(paths[name], dtype="bfloat16", kernel="auto", merge=True)
    cases |= {f"{name} by expert": case(paths[name], expert_parallel=[0, 1]) for name in MOE}
    cases["by expert bfloat16"] = case(paths["qwen3 int8"], dtype="bfloat16", kernel="auto", expert_parallel=[0, 1])
    cases |= {f"{name} decode": case(paths[name], decode=True) for name in DECODED}
    cases["by expert on rank 1"] = case(paths["qwen3 int8"], expert_parallel=[1])
    return ranks.run(tmp_path_factory.mktemp("run") / "two", 2, cases)


DECODED = (*PLAIN, "Qwen3", "ct_fp8_dynamic")
IN_BFLOAT16 = ("even", "bias", "ct_w4a8_int", "qwen3 int8")


@pytest.mark.parametrize("name", makers(False))
def test_every_kind_of_model(name, two_ranks, written, alone):
    check(two_ranks, name, written(False)[name], alone)
    if name in ("even", "tied", "Qwen3", "ct_fp8_block", "qwen3 gguf mixed"):
        assert {"RowParallel", "VocabParallelEmbedding"} <= set(two_ranks[0][1][name]["modules"])


@pytest.mark.parametrize("name", makers(False))
def test_the_plan_without_ranks_is_what_they_do(name, two_ranks, written):
    """Shapes, bytes and collective operations, as `bitline explain --tp` shows them."""
    check_plan(RankPlan(bitline.open_checkpoint(written(False)[name]), torch.float32, 2), two_ranks, name)


def check_plan(plan, found, name):
    planned = {layer.module: [[s.n, s.k] for s in layer.specs] for layer in plan.layers() if ".experts" not in layer.module}
    for rank, (_, said) in enumerate(found):
        shapes = said[name]["shapes"]
        assert {module: of_rank[rank] for module, of_rank in planned.items() if module in shapes} == shapes
        assert plan.unquantized_bytes(rank) == said[name]["unquantized"]
        exchanges = plan.exchanges()
        assert [sum(e.count for e in exchanges), sum(e.nbytes for e in exchanges)] == said[name]["exchanged"]


@pytest.mark.parametrize(("name", "most"), [("even", 4), ("nine heads", 9)])
def test_more_ranks_than_the_model_has_parts(name, most, written):
    checkpoint = bitline.open_checkpoint(written(False)[name])
    assert len(RankPlan(checkpoint, torch.float32, most).ranks) == most
    for world in (most + 1, 1000):
        with pytest.raises(bitline.InputError, match=rf"cut over {world} ranks.*at most {most} ranks"):
            RankPlan(checkpoint, torch.float32, world)


@pytest.mark.parametrize("name", BY_EXPERT)
def test_whole_experts_on_each_rank(name, two_ranks, written, alone):
    """With expert parallelism: logits, the plan without ranks, and that ranks share no expert."""
    path, case_name = written(False)[name], f"{name} by expert"
    check(two_ranks, case_name, path, alone)
    plan = RankPlan(bitline.open_checkpoint(path), torch.float32, 2, expert_parallel=True)
    check_plan(plan, two_ranks, case_name)
    for rank, (_, said) in enumerate(two_ranks):
        packed = sum(packed_bytes(layer.specs[rank]) for layer in plan.layers() if layer.on(rank))
        # Kernels' sizes leave out global scales, and count an order of columns once for each of gate and up.
        allowed = 0.01 if name in (OWN_SCALES, "qwen3 gptq act-order") else 0
        assert packed + plan.unquantized_bytes(rank) == pytest.approx(said[case_name]["bytes"], rel=allowed)
    model = alone(path)[2]
    for module, own in plan.ranks[0].whole_experts.items():
        held = [said[case_name]["experts"][module] for _, said in two_ranks]
        assert [h["experts"] for h in held] == [own.total // 2] * 2
        assert sum(h["bytes"] for h in held) == ranks.held(model.get_submodule(module))


def packed_bytes(spec):
    policy = bitline.Policy(kernel="ReferenceLinearKernel", strict=False)
    return bitline.choose(spec, bitline.Platform.detect("cpu"), policy).packed_bytes()


@pytest.mark.parametrize("name", ["qwen3 int8", OWN_SCALES])
def test_a_rank_reads_its_experts_alone(name, two_ranks):
    for rank, (_, said) in enumerate(two_ranks):
        numbers = [int(found[1]) for tensor in said[f"{name} by expert"]["read"] if (found := re.search(EXPERT, tensor))]
        assert set(numbers) == set(range(3 * rank, 3 * rank + 3))


EXPERT = r"experts\.(\d+)\."


def test_scales_of_whole_experts_are_not_exchanged(written):
    """Each sees the whole row of its input: the exchanges that are left are those of attention."""
    checkpoint = bitline.open_checkpoint(written(False)["qwen3 int8"])
    of_scales = lambda **how: {e.module for e in RankPlan(checkpoint, torch.float32, 2, **how).exchanges() if e.what == "scales"}
    cut, whole = of_scales(), of_scales(expert_parallel=True)
    assert whole == {module for module in cut if "experts" not in module} < cut


def test_more_ranks_than_experts(two_ranks, written):
    for _, said in two_ranks:
        assert "more ranks than experts: found 2 ranks, expected at most 1" in said[f"{ONE_EXPERT} by expert"]
    with pytest.raises(bitline.InputError, match=r"cut over 5 ranks: more ranks than experts.*at most 4 ranks"):
        RankPlan(bitline.open_checkpoint(written(False)[GPT_OSS]), torch.float32, 5, expert_parallel=True)


def test_ranks_that_differ_in_expert_parallelism_end_with_one_error(two_ranks):
    for _, said in two_ranks:
        assert "ranks of a tensor-parallel group differ in expert_parallel" in said["by expert on rank 1"]


@pytest.mark.skipif(native.core() is None, reason="needs the native core")
def test_the_chosen_kernels_run_whole_experts(two_ranks, written, alone):
    want = alone(written(False)["qwen3 int8"], "bfloat16", "auto")[0]
    outputs = [tensors["by expert bfloat16"] for tensors, _ in two_ranks]
    assert torch.equal(outputs[0], outputs[1]) and float(distances(outputs[0], want).max()) <= 0.06


@pytest.mark.parametrize("name", ["even", "one kv head"])
def test_ranks_hold_their_parts_alone(name, two_ranks, written, alone):
    """Norms are on both, and the key-value head that both need; all else is on one."""
    _, nbytes, model = alone(written(False)[name])
    norms = sum(p.nbytes for n, p in model.named_parameters() if "norm" in n)
    shared = sum(m.packed_bytes() for n, m in model.named_modules() if n.endswith(("k_proj", "v_proj")))
    held = sum(said[name]["bytes"] for _, said in two_ranks)
    assert held == nbytes + norms + (shared if name == "one kv head" else 0)


@pytest.mark.skipif(native.core() is None, reason="needs the native core")
@pytest.mark.parametrize("how", ["bfloat16", "merged"])
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_the_chosen_kernels_in_bfloat16(name, how, two_ranks, written, alone):
    want = alone(written(False)[name], "bfloat16", "auto")[0]
    outputs = [tensors[f"{name} {how}"] for tensors, _ in two_ranks]
    assert torch.equal(outputs[0], outputs[1])
    assert float((outputs[0] - want).abs().max() / want.abs().max()) <= 0.06


@pytest.mark.skipif(native.core() is None, reason="needs the native core")
@pytest.mark.parametrize("name", DECODED)
def test_native_steps(name, two_ranks, written):
    """The same bits on all ranks, no farther from float32 on one rank than the modules' own."""
    check_native_steps(name, two_ranks, written(False)[name])


def check_native_steps(name, found, path):
    model = bitline.load_model(path, dtype=torch.float32)
    exact, layers = ranks.decoded(model)[0], model.config.num_hidden_layers
    outputs = {how: [tensors[f"{name} decode {how}"] for tensors, _ in found] for how in ("native", "modules")}
    for of_ranks in outputs.values():
        assert all(torch.equal(y, of_ranks[0]) for y in of_ranks)
    error, allowed = ((outputs[how][0] - exact).abs() for how in ("native", "modules"))
    assert error.mean() <= 1.5 * allowed.mean() and error.max() <= 2 * allowed.max()
    # Ranks quantize activations together in the modules.
    calls = 0 if name == "ct_fp8_dynamic" else layers * (len(exact) - 1)
    for _, said in found:
        assert said[f"{name} decode native"] == {"calls": calls, "checked": layers if calls else 0}
        assert said[f"{name} decode modules"] == {"calls": 0, "checked": 0}


def test_scales_that_each_rank_computes_alone_change_the_result(two_ranks, written, alone):
    want = alone(written(False)["ct_fp8_dynamic"])[0]
    errors = [float((two_ranks[0][0][n] - want).abs().max() / want.abs().max()) for n in ("ct_fp8_dynamic", "alone")]
    assert errors[0] <= FLIPS and errors[1] > 2 * errors[0]


def test_three_ranks_generate_with_both_caches(written, alone, tmp_path):
    paths = {name: written(False)[name] for name in PLAIN}
    cases = {name: case(path, tokens=12) for name, path in paths.items()} | {OWN_SCALES: case(written(False)[OWN_SCALES])}
    cases |= {GPT_OSS: case(written(False)[GPT_OSS], expert_parallel=[0, 1, 2])}
    cases |= {f"{name} decode": case(paths[name], decode=True) for name in ("nine heads", "one kv head") if native.core()}
    cases |= {"one token": case(written(False)[GPT_OSS], expert_parallel=[0, 1, 2], ids=[[5]])}
    found = ranks.run(tmp_path / "run", 3, cases)
    check(found, OWN_SCALES, written(False)[OWN_SCALES], alone)
    check_uneven_experts(found, written(False)[GPT_OSS], alone)
    for name in ("nine heads", "one kv head") if native.core() else ():
        check_native_steps(name, found, paths[name])
    for name, path in paths.items():
        check(found, name, path, alone)
        want = ranks.greedy(alone(path)[2], 12)
        for _, said in found:
            assert said[name]["tokens"] == said[name]["static"] == want


def check_uneven_experts(found, path, alone):
    """Four experts of which each token has two: a rank has two, and of one token some rank gets nothing."""
    check(found, GPT_OSS, path, alone)
    want = ranks.forward(alone(path)[2], [[5]])
    outputs = [tensors["one token"] for tensors, _ in found]
    assert all(torch.equal(y, outputs[0]) for y in outputs) and float(distances(outputs[0], want).max()) <= BOUND
    for module in found[0][1][GPT_OSS]["experts"]:
        of_ranks = [said["one token"]["experts"][module] for _, said in found]
        assert [of_rank["experts"] for of_rank in of_ranks] == [1, 1, 2]
        assert sum(of_rank["pairs"] for of_rank in of_ranks) == 2 and min(of_rank["pairs"] for of_rank in of_ranks) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3])
def test_all_forms_of_experts(world, written, alone, tmp_path):
    """With expert parallelism."""
    paths = {name: path for name, path in written(True).items() if name in FORMS and name != ONE_EXPERT}
    cases = {name: case(path, expert_parallel=list(range(world))) for name, path in paths.items()}
    found = ranks.run(tmp_path / "run", world, cases)
    for name, path in paths.items():
        check(found, name, path, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_models(world, written, alone, tmp_path):
    paths = with_heads(written(True), world)
    assert len(paths) >= 60
    found = ranks.run(tmp_path / "run", world, {name: case(path) for name, path in paths.items()})
    for name, path in paths.items():
        check(found, name, path, alone)


# ---- ranks that differ or fail -----------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist, bitline
rank, folder, paths, kill = int(sys.argv[1]), sys.argv[2], sys.argv[3:5], sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
torch.set_num_threads(1)
try:
    model = bitline.load_model(paths[rank], dtype=torch.float32, tp="auto")
    if kill == "kill" and rank == 1:
        import os
        os._exit(3)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
finally:  # threads of gloo that outlive the interpreter abort the process now and then
    dist.destroy_process_group()
"""


def two(tmp_path, first, second, kill=""):
    """Both ranks: (exit code, stderr)."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [str(tmp_path), str(first), str(second), kill]
    started = [
        subprocess.Popen([sys.executable, str(script), str(r), *command], stderr=subprocess.PIPE, text=True,
                         env=os.environ | {"WORLD_SIZE": "2", "RANK": str(r)})
        for r in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1] for process in started]
    return [(process.returncode, error) for process, error in zip(started, errors, strict=True)]


def test_ranks_with_different_checkpoints_end_with_one_error(written, tmp_path):
    paths = written(False)
    for code, error in two(tmp_path, paths["even"], paths["tied"]):
        assert (code, "ranks of a tensor-parallel group differ in the checkpoint's tensors" in error) == (1, True), error


def test_a_rank_that_cannot_load_ends_the_others(written, tmp_path):
    good = written(False)["even"]
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in good.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    tensors = load_file(bad / "model.safetensors")
    name = next(n for n in tensors if n.endswith("weight_scale"))
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    (first, first_error), (second, second_error) = two(tmp_path, good, bad)
    assert first == second == 1, first_error + second_error
    assert (
        "another rank of the tensor-parallel group failed: found ranks [1]" in first_error and "CheckpointError" in second_error
    )


def test_a_rank_that_dies_ends_the_others(written, tmp_path):
    path = written(False)["even"]
    (first, error), (second, _) = two(tmp_path, path, path, "kill")
    assert second == 3 and first == 1 and "a rank of the tensor-parallel group has failed or ended" in error, error


def test_without_ranks_there_is_nothing_to_cut(written, monkeypatch):
    model = bitline.load_model(written(False)["even"], tp="auto")
    assert "RowParallel" not in {type(m).__name__ for m in model.modules()}
    with pytest.raises(bitline.InputError, match="unknown tp"):
        bitline.load_model(written(False)["even"], tp="both")
    from bitline.parallel import TensorParallel

    with pytest.raises(bitline.InputError, match="needs a process group"):
        TensorParallel()


def test_the_command_under_torchrun(written, tmp_path):
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "bitline", "run"]
    command = ["smollm2", "-n", "8", "--dtype", "float32", "--json"]
    done = subprocess.run([*run, *command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    single = subprocess.run([sys.executable, "-m", "bitline", "run", *command], capture_output=True, text=True, check=True)
    one = json.loads(single.stdout)
    assert report["text"] == one["text"] and report["tp"] == 2 and one["tp"] == 1
    assert report["memory_bytes"]["held"] < 0.55 * one["memory_bytes"]["held"] and all(c["ok"] for c in report["checks"])
