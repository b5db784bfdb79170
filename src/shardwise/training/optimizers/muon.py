"""Muon: momentum of hidden matrices, orthogonalized by Newton-Schulz iterations, as torch.optim.Muon defines it.

Momentum is kept in slices, like weights. What is orthogonalized is always a whole matrix: each projection of a fused
weight and each expert of a stack is one. The plan says of each parameter whether one rank gathers its matrices, every
rank does, or slices share sums (`plan/orthogonalization.py`). The iterations run in bf16, as torch's do, in jobs that
compute in 16 bits, and in the job's own dtype in others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.collectives.tensor import sum_together
from shardwise.job.axes import Axis, data_axes, state_axes
from shardwise.kernels.newton_schulz import newton_schulz, newton_schulz_of_blocks
from shardwise.kernels.precision import torch_dtype
from shardwise.model.matrices import Matrix, Place, matrices_of
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry, Region
from shardwise.plan.orthogonalization import BLOCKS, EVERY_RANK
from shardwise.training.optimizers.checks import check_rates
from shardwise.training.optimizers.matrix_exchange import MatrixExchange, Task
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch's
ADJUSTMENTS = ("original", "match_rms_adamw")
MOST_STEPS = 99
SIXTEEN = ("bf16", "fp16")
UNIT = "squares of matrices"


class Muon(SliceOptimizer):
    """torch.optim.Muon, over slices of matrices and of stacks of them; arguments are torch's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        check_rates(lr, weight_decay, eps)
        check_iterations(momentum, ns_coefficients, ns_steps, adjust_lr_fn)
        options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "eps": eps, "ns_steps": ns_steps}
        options |= {"ns_coefficients": tuple(ns_coefficients), "adjust_lr_fn": adjust_lr_fn}
        self.dtype = torch.bfloat16  # of the iterations
        self._exchange: MatrixExchange | None = None
        self._blocks: list[tuple[dist.ProcessGroup, list[Task]]] = []  # whose slices share sums, by the ranks
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    def place(self, entries: Mapping[nn.Parameter, ParameterEntry], model: ParallelModel | None) -> None:
        """Say where each parameter stands, and make the groups over which matrices are made whole. Collective."""
        super().place(entries, model)
        if model is None:
            return
        compute, ways = model.plan.dtypes.compute, model.plan.orthogonalized
        self.dtype = torch.bfloat16 if compute in SIXTEEN else torch_dtype(compute)
        self._stage = model.layout.group(*data_axes(), Axis.TENSOR)
        if BLOCKS in ways.values():
            sharded, split = state_axes(), (Axis.TENSOR,)
            along = {(True, False): sharded, (False, True): split, (True, True): (*sharded, *split)}
            self._groups = {cut: model.layout.group(*axes) for cut, axes in along.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices. Collective over the stage."""
        slices: dict[str, Tensor] = {}
        targets: dict[str, tuple[nn.Parameter, dict[str, Any]]] = {}
        for number, (group, parameter) in enumerate(self._members()):
            name = self.entry(parameter).name or str(number)
            if parameter.grad is None:  # no rank has used it; the others wait for its part all the same
                slices[name] = torch.zeros_like(parameter)
                continue
            targets[name] = parameter, group
            slices[name] = self._moved(group, parameter)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for task, place, result in self._orthogonalized(slices):
            if task.name in targets:
                parameter, group = targets[task.name]
                part = parameter[place.local]
                rate = group["lr"] * adjustment(group["adjust_lr_fn"], task.matrix.shape)
                part.add_(result.reshape(part.shape).to(part.device), alpha=-rate)

    def _members(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        return ((group, p) for group in self.param_groups for p in group["params"] if p.numel())

    def _moved(self, group: Mapping[str, Any], parameter: nn.Parameter) -> Tensor:
        """Move a momentum by a gradient, and return what is orthogonalized."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _orthogonalized(self, slices: Mapping[str, Tensor]) -> Iterator[tuple[Task, Place, Tensor]]:
        """Yield the results of all matrices, each with the place of this rank's part in its slice."""
        group = self.param_groups[0]
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        if self._exchange is None:
            self._exchange = self._make_exchange(slices)
        yield from self._exchange.run(slices, lambda whole: newton_schulz(whole, *settings))
        for ranks, tasks in self._blocks:
            yield from self._in_blocks(ranks, tasks, slices, settings)

    def _make_exchange(self, slices: Mapping[str, Tensor]) -> MatrixExchange:
        """Share the matrices out over the ranks of the stage."""
        model = self.model
        if model is None:
            whole = [
                (name, Matrix((len(value), value.shape[1]), (slice(0, len(value)),))) for name, value in slices.items()
            ]
            tasks = [Task(n, name, matrix, matrix.work, True) for n, (name, matrix) in enumerate(whole)]
            holdings = {task.name: [Region(part, part)] for task in tasks for part in [_all(task.matrix)]}
            return MatrixExchange(None, [holdings], tasks, self.dtype, next(iter(slices.values())).device)
        ways, tensors = model.plan.orthogonalized, model.tensor_map
        # Another Muon, with other options, may have some of the plan's matrices, and other ranks what is not here.
        names = [entry.name for entry in tensors if entry.name in self.names]
        ranks = map(model.layout.seen_from, dist.get_process_group_ranks(self._stage))
        everyone = [{name: tensors[name].regions_at(rank) for name in names} for rank in ranks]
        named = [(name, matrix) for name in names for matrix in matrices_of(model.facts, name)]
        tasks = [Task(n, name, m, m.work, ways[name] == EVERY_RANK) for n, (name, m) in enumerate(named)]
        cuts = {name: (isinstance(tensors[name].parameter, DTensor), tensors[name].split is not None) for name in names}
        shared = [task for task in tasks if ways[task.name] == BLOCKS and any(cuts[task.name])]
        for cut in dict.fromkeys(cuts[task.name] for task in shared):
            self._blocks.append((self._groups[cut], [task for task in shared if cuts[task.name] == cut]))
        whole_tasks = [task for task in tasks if task not in shared]
        return MatrixExchange(self._stage, everyone, whole_tasks, self.dtype, model.device)

    def _in_blocks(
        self, group: dist.ProcessGroup, tasks: Sequence[Task], slices: Mapping[str, Tensor], settings: Any
    ) -> Iterator[tuple[Task, Place, Tensor]]:
        """Orthogonalize matrices whose slices share the larger dim, with sums over `group`. Collective."""
        assert self.model is not None
        regions = {task.number: _ordered(task, self.model.tensor_map[task.name].regions) for task in tasks}
        blocks = [self._block(task, regions[task.number], slices) for task in tasks]
        copies = [entry.split is not None and entry.split.copy > 0 for entry in map(self._entry_of, tasks)]

        def summed(parts: Sequence[Tensor]) -> Sequence[Tensor]:
            own = [torch.zeros_like(part) if copy else part for part, copy in zip(parts, copies, strict=True)]
            sum_together(own, group, self.model.device, UNIT)  # type: ignore[union-attr]
            return own

        for task, block in zip(tasks, newton_schulz_of_blocks(blocks, summed, *settings), strict=True):
            places = regions[task.number]
            sizes = [_lengths(place)[task.matrix.larger] for place in places]
            for place, part in zip(places, block.split(sizes, 1), strict=True):
                yield task, place, part if task.matrix.larger == 1 else part.T

    def _entry_of(self, task: Task) -> ParameterEntry:
        assert self.model is not None
        return self.model.tensor_map[task.name]

    def _block(self, task: Task, places: Sequence[Place], slices: Mapping[str, Tensor]) -> Tensor:
        """Return [smaller dim, this rank's share of the larger one] of a matrix; nothing of the latter may be here."""
        assert self.model is not None
        parts = [slices[task.name][place.local] for place in places]
        parts = [part if task.matrix.larger == 1 else part.T for part in parts]
        whole = torch.cat(parts, 1) if parts else torch.empty(min(task.matrix.shape), 0)
        return whole.to(self.model.device, self.dtype)


def _ordered(task: Task, regions: Sequence[Region]) -> list[Place]:
    """Return the places of a matrix in the regions of a rank, in their order along its larger dim."""
    places = [place for region in regions for place in task.matrix.places(region.logical, region.local)]
    return sorted(places, key=lambda place: place.inside[task.matrix.larger].start)


def _lengths(place: Place) -> tuple[int, int]:
    rows, columns = place.inside
    return rows.stop - rows.start, columns.stop - columns.start


def _all(matrix: Matrix) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in matrix.shape)


def adjustment(kind: str | None, shape: tuple[int, int]) -> float:
    """Return the factor on the learning rate of a matrix, as torch.optim.Muon has it by `adjust_lr_fn`."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def check_iterations(momentum: float, coefficients: Sequence[float], steps: int, adjust: str | None) -> None:
    """Raise ValueError for values that torch.optim.Muon does not take."""
    if not momentum >= 0.0:
        raise ValueError(f"Invalid momentum: {momentum}; it must be at least 0")
    if len(coefficients) != 3:
        raise ValueError(f"Invalid ns_coefficients: {list(coefficients)}; three numbers")
    if not 0 < steps <= MOST_STEPS:
        raise ValueError(f"Invalid ns_steps: {steps}; from 1 to {MOST_STEPS}")
    if adjust not in (None, *ADJUSTMENTS):
        raise ValueError(f"Invalid adjust_lr_fn: {adjust!r}; {' or '.join(ADJUSTMENTS)}")
