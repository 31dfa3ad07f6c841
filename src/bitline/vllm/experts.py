"""vLLM's method for the routed experts of a mixture-of-experts layer: Bitline's experts, called with vLLM's routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, FusedMoEQuantConfig
from vllm.platforms import current_platform

from bitline.engines.expert_weights import ExpertWeights
from bitline.engines.model_weights import ModelWeights
from bitline.errors import BitlineError, InputError
from bitline.expert_gate import ExpertGate
from bitline.experts import QuantExperts
from bitline.model.rank_slices import OneRank
from bitline.parallel.cuts import ExpertRange

_LIBRARY = torch.library.Library("bitline", "FRAGMENT")
_LIBRARY.define("vllm_experts(Tensor x, Tensor index, Tensor weights, str layer) -> Tensor")


class BitlineExpertsMethod(FusedMoEMethodBase):
    """The routed experts of a layer, some of whose matrices are quantized. Routing and shared experts are vLLM's.

    weights: the checkpoint. layer: of vLLM's model. name: of the layer.
    """

    def __init__(self, weights: ModelWeights, layer: Any, name: str) -> None:
        super().__init__(layer.moe_config)
        self.weights, self.name, self.device = weights, name, torch.get_default_device()
        self.own = experts_of_map(layer.expert_map_manager.expert_map) if self.moe.use_ep else None

    def _experts(self, weights: ModelWeights) -> ExpertWeights:
        """A checkpoint's experts on this rank."""
        if self.own is not None:
            ranks = OneRank(self.moe.ep_rank, self.moe.ep_size, expert_parallel=True, experts=self.own)
        else:  # each rank quantizes its own part
            ranks = OneRank(self.moe.tp_rank, self.moe.tp_size, exact_activation_scales=False)
        return weights.experts(self.moe.in_dtype, self.device, ranks)

    def layers(self) -> list[str]:
        """vLLM's names of the quantized matrices; none where all experts are unquantized."""
        return self._experts(self.weights).layers_of(self.name)

    def tensors(self, weights: ModelWeights) -> set[str]:
        """The files' names of the unquantized tensors that belong to these experts. weights: the checkpoint, or a later one."""
        return self._experts(weights).tensors_of(self.name)

    def create_weights(self, layer: Any, **_attributes: Any) -> None:
        """Refuse what vLLM can ask of experts and Bitline's do not have. There are no parameters for vLLM to load."""
        where: dict[str, Any] = {"file": self.weights.path, "tensor": self.name}
        if self.own is not None and not self.own:
            raise InputError(
                "more ranks than experts", found=f"{self.moe.ep_size} ranks", expected=f"at most {self.own.total}", **where,
                fix="leave enable_expert_parallel out: ranks then cut every expert",
            )  # fmt: skip
        parallel = self.moe.moe_parallel_config
        # vLLM gathers the tokens of all ranks before the experts, with operations that its communicator on CPUs does not have.
        if parallel.use_all2all_kernels or (current_platform.is_cpu() and parallel.dp_size > 1):
            raise InputError(
                "quantization='bitline' does not exchange tokens between ranks", expected="the same tokens on every rank",
                found=f"data parallelism of {parallel.dp_size}, context parallelism of {parallel.pcp_size}",
                fix="leave data and context parallelism out", **where,
            )  # fmt: skip
        if layer.apply_router_weight_on_input:
            raise BitlineError(
                "experts whose input is multiplied by the router's weight do not run on Bitline", **where,
                fix="leave quantization out, so that vLLM's own methods run the model",
            )  # fmt: skip

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """That of unquantized experts: Bitline quantizes activations itself."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the experts, cut this rank's part, and pack it; in place where they were packed before."""
        experts = self._experts(self.weights).load(self.name)
        self._check_same(layer, experts)
        old: tuple[QuantExperts, ...] = getattr(layer, "bitline_experts", ())
        if old:
            old[0].load_state_dict(experts.state_dict())  # captured graphs hold the addresses
        else:
            layer.bitline_experts = (experts,)  # in a tuple, so that vLLM neither moves nor reloads them
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any, shared_experts_input: Any
    ) -> Tensor:  # fmt: skip
        """x [T, K], topk_weights and topk_ids [T, k] -> y [T, K], this rank's part of the sum."""
        experts: QuantExperts = layer.bitline_experts[0]
        if self.own is not None:
            local = layer.expert_map[topk_ids.long()]
            topk_ids = torch.where(local < 0, len(self.own), local)  # which stands for no expert
        if experts.is_one_call or not torch.compiler.is_compiling():
            return experts(x, topk_ids, topk_weights)
        return _OP(x, topk_ids, topk_weights, layer.layer_name)

    def _check_same(self, layer: Any, experts: QuantExperts) -> None:
        """Refuse experts that compute something else in transformers' model, by which they were read, than in vLLM's."""
        activation = layer.activation.value.removesuffix("_no_mul")
        clamped = activation.startswith("swigluoai") or layer.swiglu_limit is not None
        gate, same_gate = experts.gate, True
        if isinstance(gate, ExpertGate):
            same_gate = gate.gated == layer.activation.is_gated and clamped == (gate.limit > 0)
            same_gate &= clamped or gate.activation == activation
        if same_gate and experts.num_experts == layer.local_num_experts:
            return
        raise BitlineError(
            "vLLM's experts are not those of transformers' model", file=self.weights.path, tensor=self.name,
            found=f"{layer.local_num_experts} experts with {layer.activation.value}, swiglu_limit={layer.swiglu_limit}",
            expected=f"{experts.num_experts} experts with {gate}", fix="leave quantization out, or use bitline.load_model",
        )  # fmt: skip


def experts_of_map(numbers: Tensor) -> ExpertRange:
    """This rank's experts by vLLM's map: int [E], an expert's number on this rank, -1 for the others'.

    Raises:
        InputError: For experts that are not numbered in steps of one size.
    """
    own = (numbers >= 0).nonzero().view(-1).tolist()
    step = own[1] - own[0] if len(own) > 1 else 1
    found = ExpertRange(own[0], own[-1] + 1, len(numbers), step) if own else ExpertRange(0, 0, len(numbers))
    if [*found.numbers()] != own or numbers[own].tolist() != [*range(len(own))]:
        raise InputError("vLLM places experts in another order than Bitline reads them", found=f"experts {own} on a rank",
                         fix="expert_placement_strategy='linear', without load balancing")  # fmt: skip
    return found


def _experts_impl(x: Tensor, index: Tensor, weights: Tensor, layer: str) -> Tensor:
    """Experts that run one by one, which a compiler must not look into. layer: vLLM's name of it."""
    runner: Any = get_forward_context().no_compile_layers[layer]
    experts: QuantExperts = runner.routed_experts.bitline_experts[0]
    return experts(x, index, weights)


def _experts_fake(x: Tensor, index: Tensor, weights: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


_LIBRARY.impl("vllm_experts", _experts_impl, "CompositeExplicitAutograd")
torch.library.register_fake("bitline::vllm_experts", _experts_fake, lib=_LIBRARY)
_OP = torch.ops.bitline.vllm_experts.default
