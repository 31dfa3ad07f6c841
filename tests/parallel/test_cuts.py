"""Where weights are cut: every row, column and head belongs to some rank, at whole groups where there are enough."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from bitline import InputError, quantize
from bitline.model.cut_weights import cut_weight
from bitline.model.expert_parallel import check_divisible, local_numbers
from bitline.model.tensor_parallel import ParallelPlan
from bitline.parallel.cuts import Cut, ExpertRange, boundaries, expert_range, head_cut


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 100, 128, 1536, 4097])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("align", [1, 32, 64, 192])
def test_boundaries(size, world, align):
    if size < world:
        with pytest.raises(InputError, match="more ranks"):
            boundaries(size, world, align)
        return
    at = boundaries(size, world, align)
    assert (at[0], at[-1], len(at)) == (0, size, world + 1) and all(a < b for a, b in itertools.pairwise(at))
    if size // align >= world:
        assert all(a % align == 0 for a in at[:-1])
        widths = [b - a for a, b in itertools.pairwise(at)]
        assert max(widths) - min(widths) < 2 * align


@pytest.mark.parametrize("total", [1, 2, 6, 7, 128])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_whole_experts(total, world):
    if total < world:
        with pytest.raises(InputError, match=rf"more ranks than experts: found {world} ranks, expected at most {total}"):
            expert_range(total, 0, world)
        return
    of_ranks = [expert_range(total, rank, world) for rank in range(world)]
    assert [number for own in of_ranks for number in own.numbers()] == list(range(total))
    assert max(map(len, of_ranks)) - min(map(len, of_ranks)) <= 1


def test_numbers_of_other_ranks_experts_mean_no_expert():
    index = torch.tensor([[0, 2], [3, 4], [5, 6]])
    assert local_numbers(index, ExpertRange(2, 5, 6)).tolist() == [[3, 0], [1, 2], [3, 3]]


def test_experts_that_are_called_in_another_way():
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    config = Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=2, num_attention_heads=2, head_dim=4)
    with pytest.raises(InputError, match=r"cannot be divided.*experts.*Llama4TextExperts"):
        check_divisible(Llama4TextExperts(config), "experts")


@pytest.mark.parametrize(("heads", "kv"), [(8, 8), (9, 3), (32, 8), (8, 1), (6, 2), (12, 4), (4, 2)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_heads(heads, kv, world):
    group = heads // kv
    cuts = [head_cut(heads, kv, rank, world) for rank in range(world)]
    assert [q for c in cuts for q in range(*c.query)] == list(range(heads))
    for c in cuts:
        query, own = list(range(*c.query)), list(range(*c.kv))
        assert query and own and len(query) == len(own) * c.group
        assert [q // group for q in query] == [own[i // c.group] for i in range(len(query))]


def test_heads_that_cannot_be_cut():
    for heads, kv, world in ((2, 1, 3), (9, 2, 1)):
        with pytest.raises(InputError, match="attention heads cannot be cut"):
            head_cut(heads, kv, 0, world)


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_BLOCK", "NVFP4A16"])
def test_ranges_of_a_fused_projection(scheme):
    weight = quantize(torch.randn(768, 256, generator=torch.Generator().manual_seed(0)), scheme)
    cut = Cut(0, ((128, 256), (512, 640)), 768, ())
    part = cut_weight(weight, cut)
    dense = weight.dequantize()
    assert torch.equal(part.dequantize(), torch.cat((dense[128:256], dense[512:640])))


def test_groups_that_a_boundary_splits():
    assert Cut(1, (), 256, (100, 156)).splits_groups(32) and not Cut(1, (), 256, (96, 160)).splits_groups(32)
    assert not Cut(1, (), 100, (64, 36)).splits_groups(32)


def test_experts_with_a_norm_after_each_are_not_cut_by_channels():
    module = SimpleNamespace(_parameters={"down_proj": torch.empty(4, 8, 16)}, has_post_expert_norm=True)
    plan = SimpleNamespace(tp=SimpleNamespace(expert_parallel=False))
    with pytest.raises(InputError, match=r"norm after each.*expert_parallel=True"):
        ParallelPlan._plan_experts(plan, "mlp.experts", module)
