"""Mixture-of-experts models by quantization="bitline" in vLLM: load_model's tokens, on one rank and two, eager and compiled."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.engine.arg_utils")

import torch
import vllm_moe_models
from engine import (
    check_bfloat16,
    check_reload,
    check_tokens,
    check_two_ranks,
    engine,
    expected,
    generate,
    rewritten,
    served,
)
from vllm.model_executor.layers.fused_moe import MoEActivation

from bitline.errors import BitlineError, CheckpointError, InputError
from bitline.expert_gate import ExpertGate
from bitline.experts import ExpertStack
from bitline.parallel.cuts import ExpertRange
from bitline.vllm.experts import BitlineExpertsMethod, experts_of_map


@pytest.fixture(scope="module", autouse=True)
def groups():
    """vLLM makes the group of a mixture of experts only where no other engine was before in the process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def verified(monkeypatch):
    monkeypatch.setenv("BITLINE_VERIFY", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Tiny checkpoints by their names in `vllm_moe_models`, made on first use."""
    root = tmp_path_factory.mktemp("moe")
    return functools.cache(lambda name: vllm_moe_models.make(name, root))


@pytest.mark.parametrize("name", vllm_moe_models.BY_NAME)
def test_a_form_gives_the_tokens_of_load_model(name, checkpoint):
    check_tokens(checkpoint(name))


@pytest.mark.parametrize("name", [
    "mixtral pack-quantized", "qwen3 gptq act-order of gate and up", "deepseek gptq", "deepseek gptq q_lora",
])  # fmt: skip
def test_a_compiled_model_gives_the_same_tokens(name, checkpoint):
    """The first one's experts are one operator; those of the second have gate and up apart, and run one by one.

    DeepSeek's router is unquantized, and an operator of vLLM writes its scores: see test_vllm_inductor.py.
    """
    check_tokens(checkpoint(name), enforce_eager=False)


@pytest.mark.parametrize("name", ["qwen3 gptq act-order", "gpt-oss mxfp4"])
def test_two_ranks_give_the_same_tokens(name, checkpoint, monkeypatch):
    """Channels of act-order experts are cut, and biases and rows of gate and up that alternate."""
    check_two_ranks(checkpoint(name), monkeypatch)


def test_bfloat16_gives_greedy_tokens(checkpoint):
    check_bfloat16(checkpoint("mixtral gptq"))


def test_experts_are_reloaded_in_place(checkpoint, tmp_path):
    vllm_moe_models.write_noisy(tmp_path / "other")
    check_reload(checkpoint("qwen3 gptq"), tmp_path / "other", packed_addresses)


def packed_addresses(worker):
    """Where the packed tensors of all experts are: captured graphs hold these addresses."""
    layers = (m for m in worker.model_runner.model.modules() if hasattr(m, "bitline_experts"))
    return [t.data_ptr() for layer in layers for t in layer.bitline_experts[0].buffers()]


def test_layers_for_prediction_are_left_out(checkpoint, tmp_path):
    """DeepSeek's files have decoder layers for multi-token prediction after the model's own."""
    path = checkpoint("deepseek gptq")

    def add(tensors, _settings):
        tensors |= {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}

    assert served(rewritten(path, tmp_path / "x", add), quantization="bitline") == expected(path)


def test_a_missing_expert_is_an_error(checkpoint, tmp_path):
    def drop(tensors, _settings):
        for name in [n for n in tensors if "layers.0.mlp.experts.3.up_proj." in n]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"an expert is missing.*no part 1 of expert 3"):
        served(rewritten(checkpoint("qwen3 gptq"), tmp_path / "x", drop), quantization="bitline")


def test_experts_of_a_layer_that_the_model_does_not_have_are_an_error(checkpoint, tmp_path):
    def add(tensors, _settings):
        tensors |= {n.replace("layers.1.", "layers.7."): t.clone() for n, t in tensors.items() if "layers.1.mlp.experts." in n}

    with pytest.raises(CheckpointError, match=r"no modules for 18 of 62 quantized layers.*model\.layers\.7\.mlp\.experts"):
        served(rewritten(checkpoint("qwen3 gptq"), tmp_path / "x", add), quantization="bitline")


# Experts in one operator, one by one, with biases, with shared ones.
@pytest.mark.parametrize("name", ["qwen3 gptq", "qwen3 gptq act-order of gate and up", "gpt-oss mxfp4", "deepseek gptq"])
def test_two_ranks_with_whole_experts_give_the_same_tokens(name, checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    path = checkpoint(name)
    with engine(path, quantization="bitline", **BY_EXPERT) as llm:
        assert generate(llm) == expected(path)
        held = llm.collective_rpc(own_experts)
    total = len(held[0][0]) + len(held[1][0])
    assert held[0] and all(a == [*range(total // 2)] and b == [*range(total // 2, total)] for a, b in zip(*held, strict=True))


@pytest.mark.parametrize("name", ["mixtral pack-quantized", "qwen3 gptq act-order of gate and up"])
def test_a_compiled_model_with_whole_experts_gives_the_same_tokens(name, checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    path = checkpoint(name)
    assert served(path, quantization="bitline", enforce_eager=False, **BY_EXPERT) == expected(path)


def test_whole_experts_that_are_placed_in_turn(checkpoint, monkeypatch):
    """DeepSeek has groups of experts, without which vLLM does not place them so."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    path = checkpoint("deepseek gptq")
    with engine(path, quantization="bitline", expert_placement_strategy="round_robin", **BY_EXPERT) as llm:
        assert generate(llm) == expected(path)
        first, second = llm.collective_rpc(own_experts)
    assert first and all(a == [*range(0, 8, 2)] and b == [*range(1, 8, 2)] for a, b in zip(first, second, strict=True))


BY_EXPERT = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_expert_parallel": True}


def own_experts(worker):
    """The numbers of this rank's experts in each layer, of which it has packed as many."""
    layers = [m for m in worker.model_runner.model.modules() if hasattr(m, "bitline_experts")]
    found = [(m.expert_map >= 0).nonzero().view(-1).tolist() for m in layers]
    assert [m.bitline_experts[0].num_experts for m in layers] == [len(numbers) for numbers in found]
    return found


@pytest.mark.parametrize(("numbers", "found"), [
    ([0, 1, -1, -1, -1], range(2)), ([-1, -1, 0, 1, 2], range(2, 5)), ([-1, 0, -1, 1, -1], range(1, 5, 2)),
    ([-1, -1, 0], range(2, 3)), ([-1, -1], range(0)),
])  # fmt: skip
def test_experts_by_vllms_map(numbers, found):
    own = experts_of_map(torch.tensor(numbers, dtype=torch.int32))
    assert [*own.numbers()] == [*found] and (len(own), own.total) == (len(found), len(numbers))


@pytest.mark.parametrize("numbers", [[0, 1, -1, 2], [1, 0, -1]])
def test_experts_in_another_order_are_refused(numbers):
    with pytest.raises(InputError, match="places experts in another order"):
        experts_of_map(torch.tensor(numbers, dtype=torch.int32))


@pytest.mark.parametrize(("own", "dp_size", "all2all", "found"), [
    (ExpertRange(0, 0, 3), 1, False, "more ranks than experts.*at most 3"),
    (ExpertRange(0, 2, 4), 2, True, "does not exchange tokens between ranks.*data parallelism of 2"),
    (None, 2, False, "does not exchange tokens between ranks.*data parallelism of 2"),  # vLLM alone fails at the first token
])  # fmt: skip
def test_parallelism_that_is_refused(own, dp_size, all2all, found, tmp_path):
    method = BitlineExpertsMethod.__new__(BitlineExpertsMethod)
    method.weights, method.name, method.own = SimpleNamespace(path=tmp_path), "model.layers.0.mlp.experts", own
    parallel = SimpleNamespace(use_all2all_kernels=all2all, dp_size=dp_size, pcp_size=1)
    method.moe = SimpleNamespace(ep_size=4, moe_parallel_config=parallel)
    with pytest.raises(InputError, match=found):
        method.create_weights(SimpleNamespace(apply_router_weight_on_input=False))


@pytest.mark.parametrize("change, found", [
    ({"activation": MoEActivation.GELU}, "6 experts with gelu"), ({"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
    ({"local_num_experts": 8}, "8 experts with silu"),
])  # fmt: skip
def test_experts_that_differ_from_vllms_are_refused(change, found, tmp_path):
    method = BitlineExpertsMethod.__new__(BitlineExpertsMethod)
    method.weights, method.name = SimpleNamespace(path=tmp_path), "model.layers.0.mlp.experts"
    experts = SimpleNamespace(num_experts=6, gate=ExpertGate("silu"))
    layer = SimpleNamespace(activation=MoEActivation.SILU, swiglu_limit=None, local_num_experts=6)
    method._check_same(layer, experts)
    with pytest.raises(BitlineError, match=f"{found}.*model.layers.0.mlp.experts|model.layers.0.mlp.experts.*{found}"):
        method._check_same(SimpleNamespace(**(vars(layer) | change)), experts)


def test_verification_names_the_experts_that_are_off(checkpoint, monkeypatch):
    put = ExpertStack.put

    def broken(self, expert, weight):
        put(self, expert, dataclasses.replace(weight, scale=weight.scale * 1.5) if weight.spec.k == 64 else weight)

    monkeypatch.setattr(ExpertStack, "put", broken)
    with pytest.raises(BitlineError, match=r"model\.layers\.0\.mlp\.experts\.down differs from the reference"):
        served(checkpoint("qwen3 gptq"), quantization="bitline")
