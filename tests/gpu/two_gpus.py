"""What two ranks check on two GPUs: python two_gpus.py RANK WORLD FOLDER. A failed check ends the process with an error."""

import itertools
import sys

import torch
import torch.distributed as dist
from graphs import captured

import bitline
from bitline.parallel import TensorParallel
from bitline.parallel.group import ONE_SHOT_BYTES, _ordered_sum
from bitline.testing import random_weight
from bitline.types import LinearSpec


def part(rank, n, dtype, seed):
    """A rank's part of a sum: every rank can make all of them."""
    return torch.randn(n, device="cuda", generator=torch.Generator("cuda").manual_seed(97 * seed + rank)).mul(3).to(dtype)


def sums(tp):
    """In one launch and in parts: the bits of the sum in rank order, again and again."""
    assert tp.one_shot is not None, "the GPUs of this machine share no memory"
    for dtype, out in itertools.product((torch.bfloat16, torch.float16, torch.float32), (None, torch.float32)):
        most = ONE_SHOT_BYTES // dtype.itemsize
        for n in (1, 7, 64, 8192, 8193, most, most + 1, 4 * most + 3):
            for seed in range(4):
                y = tp.sum(part(tp.rank, n, dtype, seed), out)
                want = _ordered_sum(torch.stack([part(r, n, dtype, seed) for r in range(tp.world)]), out or dtype)
                assert torch.equal(y, want), (dtype, out, n, seed)


def replays(tp):
    """A graph with an odd number of sums, replayed with other data, between plain calls."""
    x = torch.zeros(8192, device="cuda", dtype=torch.bfloat16)
    tp.sum(x)

    def three_sums():
        y = tp.sum(x)
        for _ in range(2):
            y = tp.sum(y * 0.5)
        return y

    graph, y = captured(three_sums)
    for seed in range(300):
        x.copy_(part(tp.rank, 8192, torch.bfloat16, seed))
        graph.replay()
        once = _ordered_sum(torch.stack([part(r, 8192, torch.bfloat16, seed) for r in range(tp.world)]), torch.bfloat16)
        total = once
        for _ in range(2):
            total = _ordered_sum(torch.stack([total * 0.5] * tp.world), torch.bfloat16)
        assert torch.equal(y, total), seed
        assert seed % 3 or torch.equal(tp.sum(x), once)


def rows_alone(tp):
    """A row of a row-parallel layer alone has the bits that it has in a batch, where the policy asks for it."""
    spec = LinearSpec(1024, 2048, bitline.types.uint4b8, (1, 128), scale_dtype=torch.bfloat16)
    whole = random_weight(spec, 1, "cuda")
    half = spec.k // tp.world
    layer = bitline.QuantLinear(
        whole.narrow(1, tp.rank * half, (tp.rank + 1) * half), policy=bitline.Policy(batch_invariant=True)
    )
    x = torch.randn(64, spec.k, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    mine = x[:, tp.rank * half : (tp.rank + 1) * half].contiguous()
    y = tp.sum(layer(mine))
    for row in (0, 17, 63):
        assert torch.equal(tp.sum(layer(mine[row : row + 1])), y[row : row + 1])
    error = (y.float() - x.float() @ whole.dequantize(torch.float32).T).abs().max()
    assert error < 0.02 * y.float().abs().max()


def main(rank, world, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    tp = TensorParallel()
    tp.prepare(torch.device("cuda"))
    for check in (sums, replays, rows_alone):
        check(tp)
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
