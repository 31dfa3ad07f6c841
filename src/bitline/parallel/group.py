"""The ranks of a tensor-parallel group, and what they exchange. Sums are in the order of ranks, in float32, rounded once."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitline import env
from bitline.errors import BitlineError, InputError
from bitline.parallel.cuts import ExpertRange, expert_range
from bitline.parallel.one_shot import OneShotSum, open_one_shot
from bitline.parallel.shared_memory import SharedGather, open_shared_gather

ONE_SHOT_BYTES = 1 << 18  # a rank's part of a sum up to which every rank reads all parts
TIMEOUT = datetime.timedelta(seconds=120)  # of a process group that `resolve` makes; a lost rank ends the others after it


class TensorParallel:
    """A process group over which layers are cut.

    Every rank gets the same bits, and a row's sum does not depend on how many rows there are.

    Args:
        group: A process group of torch.distributed, or a DeviceMesh of one dimension; the default group for None.
        exact_activation_scales: Whether ranks exchange the ranges of activations that a scheme quantizes with one scale per
            token, so that a cut layer quantizes as a whole one does. False saves an exchange and changes results by as much as
            the quantization itself does.
        expert_parallel: Whether each rank has whole experts of a mixture of experts, instead of a part of each one's channels.

    Attributes:
        rank: This process's number in the group.
        world: Ranks.
        one_shot: Sums small tensors on a GPU in one launch, after `prepare`; None where NCCL does.
        shared: Gathers and sums small tensors of processes of one machine on CPUs, after `prepare`; None where gloo does.
    """

    one_shot: OneShotSum | None = None
    shared: SharedGather | None = None

    def __init__(
        self, group: Any = None, *, exact_activation_scales: bool = True, expert_parallel: bool = False
    ) -> None:  # fmt: skip
        if not dist.is_available() or not dist.is_initialized():
            raise InputError("tensor parallelism needs a process group", found="torch.distributed is not initialized",
                             fix="torchrun --nproc-per-node N, or torch.distributed.init_process_group")  # fmt: skip
        if hasattr(group, "get_group"):
            if group.ndim != 1:
                raise InputError("a tensor-parallel mesh has one dimension", found=f"{group.ndim} dimensions",
                                 fix='pass mesh["tp"]')  # fmt: skip
            group = group.get_group()
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.exact_activation_scales, self.expert_parallel = exact_activation_scales, expert_parallel

    @classmethod
    def resolve(cls, tp: Any, device: torch.device, *, expert_parallel: bool = False) -> TensorParallel | None:
        """The group that an argument `tp` means; None for one rank.

        Args:
            tp: None, a TensorParallel, a process group, a DeviceMesh, or "auto": the ranks that torchrun started, of which this
                call makes a process group where there is none (NCCL for a model on GPUs, each rank on its own; gloo elsewhere).
            device: Where the model is to run.
            expert_parallel: Of a group that this call makes. A TensorParallel keeps its own.
        """
        if tp is None:
            return None
        if isinstance(tp, str):
            if tp != "auto":
                raise InputError("unknown tp", found=repr(tp), expected='None, "auto", a process group or a DeviceMesh')
            if env.launched_ranks() == 1 and not (dist.is_available() and dist.is_initialized()):
                return None
            _initialize(device)
            tp = None
        group = tp if isinstance(tp, TensorParallel) else cls(tp, expert_parallel=expert_parallel)
        return group if group.world > 1 else None

    def expert_range(self, total: int) -> ExpertRange:
        """This rank's experts of a module of so many; an InputError for more ranks than experts."""
        return expert_range(total, self.rank, self.world)

    def prepare(self, device: torch.device) -> None:
        """Share memory between ranks where they can. All ranks call it, before they capture a CUDA graph."""
        if device.type == "cpu" and dist.get_backend(self.group) == "gloo" and self.shared is None:
            with _failures():
                self.shared = open_shared_gather(self.group, ONE_SHOT_BYTES)
        if device.type == "cuda" and dist.get_backend(self.group) == "nccl" and self.one_shot is None:
            index = torch.cuda.current_device() if device.index is None else device.index
            with _failures():
                self.one_shot = open_one_shot(self.group, torch.device("cuda", index), ONE_SHOT_BYTES)

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of all ranks' x, of one shape, in `dtype` (x's by default)."""
        dtype = dtype or x.dtype
        flat = x.contiguous().view(-1)
        if flat.numel() == 0:
            return x.to(dtype)
        if self.one_shot is not None and x.is_cuda and self.one_shot.fits(flat):
            return self.one_shot(flat, dtype).view(x.shape)
        if flat.nbytes <= ONE_SHOT_BYTES:
            total = None if self.shared is None or x.is_cuda else self.shared.sum(flat, dtype)
            return (_ordered_sum(self._gather_flat(flat), dtype) if total is None else total).view(x.shape)
        return self._sum_in_parts(flat, dtype).view(x.shape)

    def _sum_in_parts(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Each rank sums its part of the elements, and all get all parts."""
        size = -(-flat.numel() // self.world)
        padded = torch.nn.functional.pad(flat, (0, size * self.world - flat.numel()))
        mine = torch.empty_like(padded)
        with _failures():
            dist.all_to_all_single(mine, padded, group=self.group)
        summed = _ordered_sum(mine.view(self.world, size), dtype)
        return self._gather_flat(summed).view(-1)[: flat.numel()]

    def max(self, x: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' x."""
        return self._gather_flat(x.contiguous().view(-1)).amax(0).view(x.shape)

    def concatenate(self, x: Tensor, sizes: list[int]) -> Tensor:
        """All ranks' x [..., sizes[rank]] along the last dimension."""
        missing = max(sizes) - x.shape[-1]
        padded = (torch.nn.functional.pad(x, (0, missing)) if missing else x).contiguous()
        parts = self._gather_flat(padded.view(-1)).view(self.world, *padded.shape)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def best(self, x: Tensor, start: int) -> Tensor:
        """The largest of all ranks' x [n] and its number, the first one's of equals. NaN where any rank has one.

        Args:
            x: On this rank the numbers from `start` on.

        Returns:
            float64 [2]: the value, and the number, which is exact below 2^53.
        """
        own = x.max(0)
        by_rank = self._gather_flat(torch.stack((own.values.double(), (own.indices + start).double())))
        return by_rank[by_rank[:, 0].max(0).indices]

    def _gather_flat(self, flat: Tensor) -> Tensor:
        """[world, numel]."""
        if self.shared is not None and flat.device.type == "cpu" and flat.nbytes <= ONE_SHOT_BYTES:
            return self.shared(flat)
        out = flat.new_empty(self.world, flat.numel())
        with _failures():
            if flat.is_cuda:
                dist.all_gather_into_tensor(out, flat, group=self.group)
            else:
                dist.all_gather(list(out), flat, group=self.group)
        return out

    @contextlib.contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """Work without exchanges that all ranks do, or none: where one rank fails the others raise too, without waiting for it.

        Raises:
            BitlineError: On the ranks that did not fail, with the number of one that did.
        """
        try:
            yield
        except BaseException:
            with contextlib.suppress(BitlineError):
                self._gather_flat(torch.ones(1, device=device))
            self._before_an_error(device)
            raise
        failed = self._gather_flat(torch.zeros(1, device=device)).view(-1).nonzero().view(-1).tolist()
        if failed:
            self._before_an_error(device)
            raise BitlineError("another rank of the tensor-parallel group failed", found=f"ranks {failed}",
                               fix="its own error says why")  # fmt: skip

    def _before_an_error(self, device: torch.device) -> None:
        """Wait for all ranks: one that ends at once may end the exchange that tells the others why."""
        with contextlib.suppress(BitlineError):
            self._gather_flat(torch.zeros(1, device=device))

    def check_same(self, facts: Mapping[str, Any], device: torch.device) -> None:
        """Compare facts that all ranks must agree on.

        Raises:
            BitlineError: On every rank, with the name of the first fact that differs and the ranks that differ from rank 0.
        """
        digests = [hashlib.sha256(str(value).encode()).digest() for value in facts.values()]
        mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(device)
        by_rank = self._gather_flat(mine).view(self.world, len(facts), -1).cpu()
        for i, (name, value) in enumerate(facts.items()):
            others = [r for r in range(self.world) if not torch.equal(by_rank[r, i], by_rank[0, i])]
            if others:
                self._before_an_error(device)
                raise BitlineError(f"ranks of a tensor-parallel group differ in {name}", found=f"rank {self.rank} has {value}",
                                   expected=f"the same everywhere; ranks {others} differ from rank 0",
                                   fix="start all ranks with one checkpoint, version and arguments")  # fmt: skip


def _ordered_sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[world, n] -> [n]: float32, one rank after the other, rounded once."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


class _failures:  # a context manager
    """Turns an error of torch.distributed into one that says what it means."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, _trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, BitlineError):
            raise BitlineError("a rank of the tensor-parallel group has failed or ended", found=str(error).splitlines()[0][:200],
                               fix="the first rank that failed printed why")  # fmt: skip


def _initialize(device: torch.device) -> None:
    if dist.is_initialized():
        return
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if env.local_ranks() > gpus:
            raise InputError("each rank of a tensor-parallel group has a GPU of its own", found=f"{env.local_ranks()} ranks and "
                             f"{gpus} GPUs on this machine", fix="start as many ranks as GPUs, or pass --device cpu")  # fmt: skip
        torch.cuda.set_device(env.local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    if device.type != "cuda":
        atexit.register(leave)  # gloo's threads must not outlive the interpreter: that aborts the process now and then


def leave() -> None:
    """End this process's part in the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
