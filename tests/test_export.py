"""torch.export and AOTInductor of a model with each kind of layer, loaded in a process that has packed nothing."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from bitline import QuantLinear, native, quantize
from bitline.expert_gate import ExpertGate
from bitline.experts import QuantExperts, stack_experts
from bitline.kernels.torch.int4_cpu import TorchInt4PackLinearKernel
from bitline.model.embedding import QuantEmbedding
from bitline.platform import Platform

KERNELS = ["ReferenceLinearKernel", "CPUWNA16LinearKernel", "TorchInt4PackLinearKernel"]


class EachKind(nn.Module):
    """A quantized table, layers weight-only and with quantized activations, and experts."""

    def __init__(self, kernel):
        super().__init__()
        torch.manual_seed(0)
        weight = lambda n, k, scheme="W4A16": quantize((torch.randn(n, k) * 0.1).bfloat16(), scheme, group_size=32)
        self.table = QuantEmbedding(weight(50, 64), torch.bfloat16, "cpu")
        self.weight_only = QuantLinear(weight(128, 64), torch.randn(128), kernel=kernel)
        w8a8 = quantize((torch.randn(64, 128) * 0.1).bfloat16(), "W8A8")
        self.quantized = QuantLinear(w8a8, kernel="CPUWNA16LinearKernel" if kernel.startswith("CPU") else "ReferenceLinearKernel")
        up, down = [weight(64, 64) for _ in range(4)], [weight(64, 32) for _ in range(4)]
        policy = None if kernel.startswith("CPU") else "deterministic"
        stacks = (stack_experts(w.__getitem__, 4, True, torch.bfloat16, "cpu", policy, 2) for w in (up, down))
        up_stack, down_stack = stacks
        self.experts = QuantExperts([up_stack], down_stack, ExpertGate("silu"))

    def forward(self, ids, index, weights):
        x = self.quantized(nn.functional.silu(self.weight_only(self.table(ids))))
        return self.experts(x, index, weights)


def made(kernel):
    if kernel.startswith("CPU") and native.core() is None:
        pytest.skip("needs the native core")
    if kernel.startswith("TorchInt4") and not TorchInt4PackLinearKernel.is_supported(Platform.detect("cpu")):
        pytest.skip("needs AVX2")
    return EachKind(kernel).eval()


def arguments(tokens):
    g = torch.Generator().manual_seed(tokens)
    index = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(tokens)])
    return torch.randint(0, 50, (tokens,), generator=g), index, torch.rand(tokens, 2, generator=g)


def exported(model):
    tokens = torch.export.Dim("tokens", min=2, max=512)
    with torch.no_grad():
        return torch.export.export(model, arguments(5), dynamic_shapes=({0: tokens},) * 3)


def in_a_fresh_process(load, path, folder, model):
    """Check that a process that registers the operators alone gets the model's bits for other numbers of tokens."""
    cases = {str(m): (arguments(m), model(*arguments(m))) for m in (2, 17)}
    for m, (given, want) in cases.items():
        torch.save((given, want), folder / f"{m}.pt")
    script = f"""
import sys, torch, bitline
bitline.register_operators()
run = {load}
for m in (2, 17):
    given, want = torch.load(f"{folder}/{{m}}.pt")
    with torch.no_grad():
        assert torch.equal(run(*given), want), m
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kernel", KERNELS)
def test_export(kernel, tmp_path):
    model = made(kernel)
    torch.export.save(exported(model), tmp_path / "model.pt2")
    in_a_fresh_process("torch.export.load(sys.argv[1]).module()", tmp_path / "model.pt2", tmp_path, model)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize("kernel", KERNELS)
def test_ahead_of_time_compilation(kernel, tmp_path):
    model = made(kernel)
    path = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(tmp_path / "model.pt2"))
    in_a_fresh_process("torch._inductor.aoti_load_package(sys.argv[1])", path, tmp_path, model)
