"""Loads the experts of mixture-of-experts layers: quantized ones as QuantExperts, others into transformers' own parameters."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitline.errors import CheckpointError
from bitline.expert_gate import recognize
from bitline.experts import ExpertStack, Part, QuantExperts, stack_experts
from bitline.formats.base import LayerRecord
from bitline.model.cut_weights import merged
from bitline.model.expert_names import DOWN_NAME, UP_NAMES, ExpertPlace
from bitline.model.merge_weights import merge_key
from bitline.model.tensor_parallel import ParallelPlan
from bitline.types import LinearSpec
from bitline.weight import QuantizedWeight

Matrices = dict[tuple[int, int], LayerRecord]  # by expert and part


class _ApartError(Exception):
    """Gate and up of an expert cannot be one layer of the first expert's scheme."""


class ExpertRecords:
    """The quantized matrices of one experts module."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.parameters: dict[str, Matrices] = defaultdict(dict)
        self.parts: dict[str, int] = {}

    def add(self, place: ExpertPlace, record: LayerRecord, file: Any) -> None:
        """Note a matrix. Two for one place are a CheckpointError."""
        assert place.expert is not None
        key = (place.expert, place.part)
        if key in self.parameters[place.parameter] or self.parts.get(place.parameter, place.parts) != place.parts:
            raise CheckpointError(
                "two tensors hold one expert's weight", file=file, tensor=record.name,
                found=f"expert {place.expert} of {self.module}.{place.parameter}", expected="one of them",
            )  # fmt: skip
        self.parameters[place.parameter][key] = record
        self.parts[place.parameter] = place.parts

    def records(self, experts: range | None = None) -> Iterator[LayerRecord]:
        """All of them, or those of the experts of these numbers."""
        for matrices in self.parameters.values():
            yield from (record for (expert, _), record in matrices.items() if experts is None or expert in experts)


class ExpertLoader:
    """Builds the QuantExperts of one module.

    Args:
        shell: transformers' experts module, whose parameters are on the meta device or unquantized.
        found: Its quantized matrices.
        dtype: The model's.
        device: Where to run.
        policy: For the kernels.
        top_k: Experts of a token.
        file: The file of a record, for errors.
        parallel: Cuts each expert's intermediate channels over ranks, or gives each rank whole experts; None for one rank.

    Attributes:
        reads: Functions that read the canonical weight of a single expert's layer, or of a stack's first expert; of another one
            with `expert=e`, counted from this rank's first.
    """

    def __init__(
        self, shell: Any, found: ExpertRecords, dtype: torch.dtype, device: torch.device, policy: Any, top_k: int,
        file: Callable[[LayerRecord], Any], parallel: ParallelPlan | None = None,
    ) -> None:  # fmt: skip
        self.own = None if parallel is None else parallel.whole_experts.get(found.module)
        self.parallel = parallel if self.own is None else None  # whole experts are read and packed as on one rank
        self.shell, self.found, self.dtype, self.device, self.policy = shell, found, dtype, device, policy
        self.top_k, self.file = top_k, file
        self.reads: dict[nn.Module, Callable[..., QuantizedWeight]] = {}
        self.one_call: tuple[LinearSpec, ...] = ()
        self.up_name = next((name for name in UP_NAMES if name in shell._parameters), UP_NAMES[0])
        self.transposed = bool(getattr(shell, "is_transposed", False))

    def load(self) -> QuantExperts:
        """Read and pack all experts. A missing, surplus or misshapen one is a CheckpointError."""
        unknown = set(self.found.parameters) - {self.up_name, DOWN_NAME}
        if unknown:
            raise self._error("the experts module has no such parameter", next(self.found.records()), found=sorted(unknown))
        gate = recognize(self.shell)
        norm = self.shell.post_expert_norm if getattr(self.shell, "has_post_expert_norm", False) else None
        self.one_call = self._layers_of_one_call() if gate is not None and norm is None else ()
        interleaved = gate is not None and gate[1] and self.found.parts.get(self.up_name, 1) == 1
        up, down = self._projection(self.up_name, interleaved), self._projection(DOWN_NAME, False)
        function: Any = gate[0] if gate else self.shell._apply_gate if self._has_gate else self.shell.act_fn
        if self.parallel is not None:
            down_records = [record for _, record in sorted(self.found.parameters.get(DOWN_NAME, {}).items(), key=lambda m: m[0])]
            function = self.parallel.expert_gate(self.found.module, function, down_records)
        return QuantExperts(up, down[0], function, norm)

    def _layers_of_one_call(self) -> tuple[LinearSpec, ...]:
        """This rank's layers of an expert, where a kernel may run all experts in one call; else none."""
        layers: list[LinearSpec] = []
        for name in (self.up_name, DOWN_NAME):
            matrices = self.found.parameters.get(name, {})
            specs = {record.spec for (e, _), record in matrices.items() if e in self._numbers}
            keys = {merge_key(spec) for spec in specs}
            if len(keys) != 1 or (None in keys and len(specs) > 1):
                return ()
            spec = next(iter(specs))
            if self.parallel is not None and name == self.up_name:
                cut = self.parallel.expert_cut(self.found.module, spec.n, down=False, interleaved=self.found.parts[name] == 1)
                spec = spec.replace(n=sum(stop - start for start, stop in cut.ranges))
            layers.append(spec.replace(act_dtype=self.dtype))
        return tuple(layers)

    @property
    def _has_gate(self) -> bool:
        return bool(getattr(self.shell, "has_gate", True))

    @property
    def _experts(self) -> int:
        """Experts of the module, on all ranks."""
        return int(self.shell._parameters[DOWN_NAME].shape[0])

    @property
    def _numbers(self) -> range:
        """Numbers of the experts of this rank."""
        return range(self._experts) if self.own is None else self.own.numbers()

    def _projection(self, name: str, interleaved: bool) -> list[Part]:
        """The layers of one projection: one part, or gate and up apart."""
        matrices = self.found.parameters.get(name)
        bias = self.shell._parameters.get(f"{name}_bias")
        if matrices is None:
            return [self._unquantized(name, bias, interleaved)]
        self._check(name, matrices)
        parts = self.found.parts[name]
        specs = {part: {matrices[e, part].spec for e in self._numbers} for part in range(parts)}
        whole = self._whole(name, matrices, parts, bias, interleaved)
        if whole is not None:
            return [whole]
        return [self._stack_of_part(name, matrices, part, bias, len(specs[part]) == 1) for part in range(parts)]

    def _whole(self, name: str, matrices: Matrices, parts: int, bias: Tensor | None, interleaved: bool) -> Part | None:
        """All parts as one layer for each expert; None where some expert's cannot be, or not in one scheme with the others'."""
        one_spec = all(len({matrices[e, part].spec for e in self._numbers}) == 1 for part in range(parts))
        keys = {merge_key(matrices[e, part].spec) for e in self._numbers for part in range(parts)}
        if parts > 1 and (len(keys) > 1 or None in keys):
            return None
        first: list[QuantizedWeight] = []

        def read(expert: int) -> QuantizedWeight:
            weights = [self._read(name, matrices[expert, part], expert, part, bias, interleaved) for part in range(parts)]
            whole = weights[0] if parts == 1 else merged(weights)
            if whole is None or (parts > 1 and first and whole.spec != first[0].spec):
                raise _ApartError
            first[:] = [whole]
            return whole

        try:
            return self._stack(read, one_spec, name, matrices[self._numbers[0], 0], self.one_call)
        except _ApartError:
            return None

    def _stack_of_part(self, name: str, matrices: Matrices, part: int, bias: Tensor | None, one_spec: bool) -> Part:
        """Gate or up alone."""

        def read(expert: int) -> QuantizedWeight:
            return self._read(name, matrices[expert, part], expert, part, bias, False)

        return self._stack(read, one_spec, name, matrices[self._numbers[0], part])

    def _stack(
        self, read: Callable[[int], QuantizedWeight], one_spec: bool, name: str, record: LayerRecord,
        one_call: Sequence[LinearSpec] = (),
    ) -> Part:  # fmt: skip
        """A layer for each expert of this rank. read: takes an expert's number. one_call: see `_layers_of_one_call`."""
        numbers = self._numbers

        def read_own(expert: int) -> QuantizedWeight:
            return read(numbers[expert])

        if self.parallel is not None and name == DOWN_NAME and record.spec.act_order:
            one_spec = False  # which groups a rank has columns of differs between experts
        part = stack_experts(
            read_own, len(numbers), one_spec, self.dtype, self.device, self.policy, self.top_k, self._experts, one_call
        )  # fmt: skip
        layers = [part] if isinstance(part, ExpertStack) else part
        self.reads |= {layer: functools.partial(read_own, expert=e) for e, layer in enumerate(layers)}
        source = (f"{self.found.module}.{name}", record.format)
        for module in (part, *(part if isinstance(part, nn.ModuleList) else ())):
            module.source = source
        return part

    def _check(self, name: str, matrices: Matrices) -> None:
        """Every expert is there once, with the parameter's shape."""
        parameter = self.shell._parameters[name]
        experts, parts = parameter.shape[0], self.found.parts[name]
        n, k = parameter.shape[:0:-1] if self.transposed else parameter.shape[1:]
        if missing := {(e, p) for e in range(experts) for p in range(parts)} - set(matrices):
            expert, part = min(missing)
            raise self._error(
                "an expert is missing", next(iter(matrices.values())), found=f"no part {part} of expert {expert} of {name}",
                expected=f"{experts} experts with {parts} parts", fix="a shard may be missing, or the config is another model's",
            )  # fmt: skip
        for (expert, _part), record in matrices.items():
            if expert >= experts:
                raise self._error("an expert that the configuration does not have", record, found=f"expert {expert}",
                                  expected=f"{experts} experts", fix="the config is another model's")  # fmt: skip
            if (record.spec.n * parts, record.spec.k) != (n, k):
                raise self._error(
                    f"the model's {name} has a different shape", record, found=[record.spec.n, record.spec.k],
                    expected=[n // parts, k], fix="the config does not belong to these tensors",
                )  # fmt: skip

    def _read(
        self, name: str, record: LayerRecord, expert: int, part: int, bias: Tensor | None, interleaved: bool
    ) -> QuantizedWeight:  # fmt: skip
        """This rank's rows or columns of a matrix, with the module's bias where it has none of its own, gate rows above up rows.

        part: its place among the projection's matrices.
        """
        down, first = name == DOWN_NAME, part * record.spec.n
        if self.parallel is None:
            weight, rows, has_bias = record.weight(), [(0, record.spec.n)], True
        else:
            module = self.found.module
            weight = self.parallel.read_expert(module, record, down=down, interleaved=interleaved)
            cut = self.parallel.expert_cut(module, record.spec.n, down=down, interleaved=interleaved)
            rows, has_bias = [(0, record.spec.n)] if down else list(cut.ranges), not down or self.parallel.tp.rank == 0
        if not record.spec.bias and bias is not None and has_bias:
            if bias.is_meta:
                raise self._error("the bias of experts is missing", record, found="none", expected=f"{list(bias.shape)}")
            own = [bias.detach()[expert, first + start : first + stop] for start, stop in rows]
            weight = weight.with_bias(own[0] if len(own) == 1 else torch.cat(own))
        weight = weight.with_act_dtype(self.dtype)
        return weight.take_rows(gate_first(weight.spec.n)) if interleaved else weight

    def _unquantized(self, name: str, bias: Tensor | None, interleaved: bool) -> Part:
        """A projection that the checkpoint stores unquantized, as linear layers of transformers' parameter."""
        stacked = self.shell._parameters[name].detach()
        if self.own is not None:  # copies, which do not keep the other ranks' experts in memory
            own = slice(self.own.start, self.own.stop, self.own.step)
            stacked = stacked[own].clone()
            bias = None if bias is None else bias.detach()[own].clone()
        layers = nn.ModuleList()
        for e in range(stacked.shape[0]):
            weight = stacked[e].t() if self.transposed else stacked[e]
            order = gate_first(weight.shape[0]) if interleaved else slice(None)
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=stacked.dtype)
            layer.weight = nn.Parameter(weight[order], requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias.detach()[e][order], requires_grad=False)
            if self.parallel is not None:
                self.parallel.cut_expert_layer(self.found.module, layer, down=name == DOWN_NAME)
            layers.append(layer)
        return layers

    def _error(self, what: str, record: LayerRecord, **facts: Any) -> CheckpointError:
        return CheckpointError(what, file=self.file(record), tensor=record.name, **facts)


def gate_first(n: int) -> Tensor:
    """Rows g0, u0, g1, u1, … in the order g0, g1, …, u0, u1, …"""
    return torch.cat((torch.arange(0, n, 2), torch.arange(1, n, 2)))


class UnquantizedExperts:
    """Fills fused expert parameters from tensors of single experts, or of all of them."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.filled: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self.wanted: dict[str, tuple[int, int]] = {}

    def put(self, module: nn.Module, place: ExpertPlace, tensor: Tensor, name: str, device: torch.device) -> str:
        """Copy a tensor into its place. Returns the parameter's name; a wrong shape, or a second one, is a CheckpointError."""
        target = f"{place.module}.{place.parameter}"
        parameter = module._parameters[place.parameter]
        assert parameter is not None
        experts = parameter.shape[0]
        self.wanted[target] = (experts, place.parts)
        numbers: Sequence[int] = range(experts) if place.expert is None else (place.expert,)
        data = tensor if place.expert is None else tensor.unsqueeze(0)
        if not set(numbers) <= set(range(experts)) or self.filled[target] & {(e, place.part) for e in numbers}:
            raise CheckpointError("an expert that the configuration does not have, or that is there twice", file=self.path,
                                  tensor=name, found=f"expert {place.expert}", expected=f"{experts} experts")  # fmt: skip
        transposed = getattr(module, "is_transposed", False) and place.expert is not None
        rows = parameter.detach()
        rows = rows.transpose(1, 2) if transposed else rows
        size = rows.shape[1] // place.parts
        if len(data) != len(numbers) or data.shape[1:] != (size, rows.shape[2]):
            raise CheckpointError(
                f"the model's {target} has a different shape", file=self.path, tensor=name, found=list(tensor.shape),
                expected=[size, rows.shape[2]], fix="the config does not belong to these tensors",
            )  # fmt: skip
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(
                f"the model's {target} is an unquantized tensor", file=self.path, tensor=name, found=tensor.dtype,
                expected=parameter.dtype, fix="the quantization config does not describe this tensor",
            )  # fmt: skip
        if parameter.is_meta:
            parameter = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # see WeightLoader
            module._parameters[place.parameter] = parameter
            rows = parameter.detach()
            rows = rows.transpose(1, 2) if transposed else rows
        for e, values in zip(numbers, data, strict=True):
            rows[e, place.part * size : (place.part + 1) * size].copy_(values)
            self.filled[target].add((e, place.part))
        return target

    def check(self) -> None:
        """Refuse a parameter of which some experts are missing."""
        for target, (experts, parts) in self.wanted.items():
            missing = {(e, p) for e in range(experts) for p in range(parts)} - self.filled[target]
            if missing:
                expert, part = min(missing)
                raise CheckpointError(
                    "an expert is missing", file=self.path, tensor=target, found=f"no part {part} of expert {expert}",
                    expected=f"{experts} experts with {parts} parts", fix="a shard may be missing",
                )  # fmt: skip
