"""The experts of a loaded model on every kernel of this machine, within twice the error of torch's arithmetic."""

import pytest
import torch
from forms import FORMS
from torch.nn.functional import silu

import bitline
from bitline import NoKernelError, Policy
from bitline.experts import ExpertStack, QuantExperts
from bitline.kernels import registry
from bitline.platform import Platform
from bitline.testing.poison import poison
from thinning import thinned

FORM = "qwen3 experts only"
TOKENS = (0, 1, 2, 3, 7, 17, 65)
HIDDEN, EXPERTS, TOP_K = 128, 6, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, oracle = FORMS[FORM](tmp_path_factory.mktemp("experts"))
    return folder, next(m for m in oracle.modules() if "gate_up_proj" in m._parameters)


def chain(x, index, weights, exact_weights, matmul, dtype):
    """All experts one after the other in a dtype: products, gate, and the weighted sum in float32 at least."""
    x, wide = x.to(dtype), torch.promote_types(dtype, torch.float32)
    out = torch.zeros(x.shape[0], HIDDEN, dtype=wide)
    for e in index.unique().tolist():
        token, k = torch.where(index == e)
        gate_up, down = (w[e].detach().to(dtype) for w in exact_weights)
        gate, up = matmul(x[token], gate_up).chunk(2, -1)
        y = matmul(silu(gate) * up, down)
        out.index_add_(0, token, y.to(wide) * weights[token, k, None].to(wide))
    return out.to(dtype)


def plain(x, w):
    return x @ w.T


def in_order(x, w):
    """x @ w.T with one accumulator for each output, in the order of K."""
    out = x.new_zeros(x.shape[0], w.shape[0])
    for column, values in zip(x.T, w.T, strict=True):
        out += torch.outer(column, values)
    return out


def check(experts, parameters, dtype, tokens):
    """The output for random inputs against float64."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g).to(dtype)
    index = torch.rand(tokens, EXPERTS, generator=g).topk(TOP_K).indices
    weights = torch.rand(tokens, TOP_K, generator=g).to(dtype)
    with torch.inference_mode(), poison():
        y = experts(x, index, weights)
    assert y.shape == (tokens, HIDDEN) and y.dtype == dtype
    if tokens:
        exact = chain(x, index, weights, parameters, plain, torch.float64)
        matmuls = (plain, in_order) if dtype == torch.float32 else (plain,)
        torch_error = max(
            float((chain(x, index, weights, parameters, m, dtype).double() - exact).abs().max()) for m in matmuls
        )  # fmt: skip
        allowed = 2 * torch_error + torch.finfo(dtype).eps * float(exact.abs().max())
        assert float((y.double() - exact).abs().max()) <= allowed  # false for NaN


@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16, torch.float32], 3), ids=str)
def test_every_kernel_of_this_machine(checkpoint, dtype):
    folder, module = checkpoint
    parameters, ran = (module.gate_up_proj, module.down_proj), []
    platform = Platform.detect(torch.device("cpu"))
    for entry in registry.entries():
        if not entry.kernel.is_supported(platform).ok:
            continue
        try:
            model = bitline.load_model(folder, dtype=dtype, policy=Policy(kernel=entry.name, strict=True), native_step=False)
        except NoKernelError:
            continue
        experts = next(m for m in model.modules() if isinstance(m, QuantExperts))
        assert all(isinstance(s, ExpertStack) and s.choice.best.name == entry.name for s in (*experts.up, experts.down))
        for tokens in TOKENS:
            check(experts, parameters, dtype, tokens)
        ran.append(entry.name)
    assert "ReferenceLinearKernel" in ran and len(ran) >= 2, ran


def test_the_default_kernels(checkpoint):
    folder, module = checkpoint
    model = bitline.load_model(folder, dtype=torch.bfloat16)
    experts = next(m for m in model.modules() if isinstance(m, QuantExperts))
    for tokens in TOKENS:
        check(experts, (module.gate_up_proj, module.down_proj), torch.bfloat16, tokens)
