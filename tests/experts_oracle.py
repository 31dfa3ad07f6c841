"""Random and lossless mixture-of-experts layers, their exact results, and what error a kernel may have."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitline.expert_gate import ExpertGate
from bitline.experts import QuantExperts, loop_over_experts, stack_experts
from bitline.select import Policy
from bitline.testing.generators import lossless_weight, random_weight
from bitline.testing.tolerance import FACTOR, reference64, torch_linear
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

SILU = ExpertGate("silu")
SWIGLU = ExpertGate("silu", True, 1.702, 1.5)  # gpt-oss's, with a limit that values reach


def specs_of(down: LinearSpec, gate: ExpertGate, k: int) -> tuple[LinearSpec, LinearSpec]:
    """The specs of both projections, K -> `down`'s K -> its N, of one scheme."""
    return down.replace(n=2 * down.k if gate.gated else down.k, k=k), down


@dataclass
class Experts:
    """The canonical weights of all experts."""

    up: list[QuantizedWeight]
    down: list[QuantizedWeight]
    gate: ExpertGate

    @staticmethod
    def make(up: LinearSpec, down: LinearSpec, gate: ExpertGate, count: int, *, lossless: bool = False) -> "Experts":
        make = lossless_weight if lossless else random_weight
        return Experts([make(up, e) for e in range(count)], [make(down, 100 + e) for e in range(count)], gate)

    def on(self, kernel: str, device: torch.device | str = "cpu") -> QuantExperts:
        """The layer on the kernel of that name."""
        up, down = (
            stack_experts(w.__getitem__, len(w), True, w[0].spec.act_dtype, device, Policy(kernel=kernel), 2)
            for w in (self.up, self.down)
        )
        return QuantExperts([up], down, self.gate)

    def exact(self, x: Tensor, index: Tensor, weights: Tensor, *, rounded: bool = False, each: bool = False) -> Tensor:
        """float64 [T, N].

        rounded: the second projection's input is rounded to x's dtype, as all kernels do. each: its results are rounded too,
        before they are weighted.
        """
        out = torch.zeros(x.shape[0], self.down[0].spec.n, dtype=torch.float64)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, slots = (index == e).nonzero(as_tuple=True)
            h = self.gate(reference64(x[rows], up))
            y = reference64(h.to(x.dtype) if rounded else h, down)
            y = y.to(x.dtype).double() if each else y
            out.index_add_(0, rows, weights[rows, slots].double().unsqueeze(1) * y)
        return out

    def baseline(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The loop over experts with torch's linear of dequantized weights, in x's dtype."""

        def expert(e: int, rows: Tensor) -> Tensor:
            return torch_linear(self.gate(torch_linear(rows, self.up[e])), self.down[e])

        return loop_over_experts(x, index, weights, len(self.up), expert)

    def check(self, out: Tensor, x: Tensor, index: Tensor, weights: Tensor) -> None:
        """Assert that `out` is as close to the exact result as kernels of plain layers have to be."""
        assert out.shape == (x.shape[0], self.down[0].spec.n) and out.dtype == x.dtype
        exact = self.exact(x, index, weights)
        error = float((self.baseline(x, index, weights).double() - exact).abs().max())
        allowed = FACTOR * error + torch.finfo(x.dtype).eps * float(exact.abs().max())
        worst = (out.double() - exact).abs().max()
        assert worst <= allowed, f"off by {float(worst):.3g}, allowed {allowed:.3g}; T={x.shape[0]}, {self.up[0].spec}"

    def check_exact(self, out: Tensor, x: Tensor, index: Tensor, weights: Tensor, *, each: bool = False) -> None:
        """Assert that `out` has the bits of the exact sum, rounded once. each: see `exact`."""
        exact = self.exact(x, index, weights, rounded=True, each=each).to(x.dtype)
        wrong = out != exact
        assert not wrong.any(), f"{int(wrong.sum())} of {out.numel()} differ; T={x.shape[0]}, {self.up[0].spec}"


def routing(tokens: int, top_k: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(index int64 [T, k] of distinct experts per token, weights float32 [T, k])."""
    g = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts, generator=g).topk(top_k, 1).indices
    return index, torch.rand(tokens, top_k, generator=g)
