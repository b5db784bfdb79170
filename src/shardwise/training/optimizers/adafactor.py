"""Adafactor (arXiv 1804.04235) over slices: the numbers of torch.optim.Adafactor on every layout.

Of the squares of a matrix's gradient it keeps a mean of each row and of each column. Both, and the sizes of a tensor
and of its update, are sums over elements that may lie on several ranks. Two all-reduces of a stage's ranks carry those
of the tensors that are cut: sums of squares, then the sizes of updates, which are made again once these are known.
Of ranks that hold the same elements one adds them, and a tied parameter takes its sums from the first of its stages, so
that all copies move alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.collectives.names import CollectiveName, group_name
from shardwise.collectives.tensor import sum_together
from shardwise.job.axes import Axis, data_axes
from shardwise.job.devices import widest_float
from shardwise.parallel.logical_state import StateForm, form_of_parameter
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry, Region
from shardwise.training.optimizers.checks import check_rates
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer, chunks_of

SUMS = "Adafactor's sums"


@dataclass
class Sums:
    """Sums over the elements of one tensor, wherever these lie.

    Attributes:
        weight, update: of squares, without dims.
        rows, columns: squares of the gradient in each row [..., n, 1] and column [..., 1, m], where the tensor is cut
            across them.
        row_var: what the optimizer keeps of the rows, before the step, [..., 1, 1]; beside `columns`.
        mean: of the rows that it keeps behind the step, [..., 1, 1] of this rank's matrices.
    """

    weight: Tensor
    update: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    row_var: Tensor | None = None
    mean: Tensor | None = None

    @classmethod
    def of(cls, shape: Sequence[int], across_rows: bool, across_columns: bool, device: torch.device) -> Sums:
        """Return zeros for a tensor, which may be cut across its rows or columns."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=widest_float(device), device=device)

        rows = zeros(*shape[:-1], 1) if across_rows else None
        columns = zeros(*shape[:-2], 1, shape[-1]) if across_columns else None
        return cls(zeros(), zeros(), rows, columns, zeros(*shape[:-2], 1, 1) if across_columns else None)

    def before_update(self) -> list[Tensor]:
        """Return what is known before the update is made."""
        return [self.weight, *(sums for sums in (self.rows, self.columns, self.row_var) if sums is not None)]


class Adafactor(SliceOptimizer):
    """torch's Adafactor: its options, its numbers, over slices."""

    _cut: Sequence[ParameterEntry] = ()  # tensors of this stage that lie on several ranks

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        check_rates(lr, weight_decay)
        if not beta2_decay <= 0.0:
            raise ValueError(f"Invalid beta2_decay: {beta2_decay}; it must be at most 0")
        if len(eps) != 2 or not (eps[0] is None or eps[0] >= 0.0) or not eps[1] >= 0.0:
            raise ValueError(f"Invalid eps: {list(eps)}; two numbers of at least 0, the first may be null")
        if not d >= 1.0:
            raise ValueError(f"Invalid d: {d}; it must be at least 1")
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": tuple(eps), "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def place(self, entries: Mapping[nn.Parameter, ParameterEntry], model: ParallelModel | None) -> None:
        """Say where each parameter stands. Collective: the ranks of a stage get a group."""
        super().place(entries, model)
        self._cut = [] if model is None else [e for e in model.tensor_map if e.name in self.names and _is_cut(e)]
        if model is not None:
            self._ranks = model.layout.group(*data_axes(), Axis.TENSOR)

    def forms(self, parameter: nn.Parameter) -> Mapping[str, StateForm]:
        """Return squares in the slices of a vector, or rows and columns of a matrix; who has its first writes them."""
        entry = self.entry(parameter)
        if len(entry.shape) < 2:
            return {"variance": form_of_parameter(entry, parameter.dtype)}
        return {"row_var": form_without(entry, parameter, -1), "col_var": form_without(entry, parameter, -2)}

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient. Collective where tensors are cut."""
        with torch.no_grad():
            groups = {parameter: group for group, parameter in self.updates()}
            cut = self._sums_of_cut()
            sums = {p: cut.get(self.entry(p).name) or Sums.of(p.shape, False, False, p.device) for p in groups}
            for parameter in groups:
                self.state_of(parameter)["step"] += 1
                self._add_squares(parameter, sums[parameter])
            self._sum_over_ranks(cut, Sums.before_update)
            for parameter, group in groups.items():
                self._move_statistics(group, parameter, sums[parameter])
                self._add_update(group, parameter, sums[parameter])
            self._sum_over_ranks(cut, lambda sums: [sums.update])
            for parameter, group in groups.items():
                self._apply(group, parameter, sums[parameter])

    def _sums_of_cut(self) -> dict[str, Sums]:
        """Return zeros for each tensor of this stage that is cut, in the same order on every rank."""
        sums = {}
        for entry in self._cut:
            dims, of_split = len(entry.shape), None if entry.split is None else entry.split.dim
            across_columns = dims > 1 and (of_split == dims - 2 or (dims == 2 and _shards(entry) > 1))
            sums[entry.name] = Sums.of(entry.shape, dims > 1 and of_split == dims - 1, across_columns, self.device)
        return sums

    def _adds(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank adds its elements: it is the first of those of the stage that hold them."""
        entry = self.entry(parameter)
        if self.model is None or not _is_cut(entry):
            return True
        return entry.replica < max(1, len(self.model.tied.get(entry.name, ())))  # stages count fastest

    def _add_squares(self, parameter: nn.Parameter, sums: Sums) -> None:
        """Add this rank's squares of weights and gradients, and the rows that it keeps."""
        gradient, state, entry = parameter.grad, self.state[parameter], self.entry(parameter)
        assert gradient is not None
        if not self._adds(parameter):
            return
        sums.weight += torch.linalg.vector_norm(parameter).square()
        if sums.rows is not None:
            _add(sums.rows, _squares(gradient, -1), form_without(entry, parameter, -1).regions)
        if sums.columns is not None and sums.row_var is not None:
            _add(sums.columns, _squares(gradient, -2), form_without(entry, parameter, -2).regions)
            for region in form_without(entry, parameter, -1).owned:
                of_matrix = (*region.logical[:-2], slice(0, 1), slice(0, 1))
                sums.row_var[of_matrix] += state["row_var"][region.local].sum(-2, keepdim=True)

    def _sum_over_ranks(self, cut: Mapping[str, Sums], wanted: Callable[[Sums], list[Tensor]]) -> None:
        """Sum what is wanted of each tensor over the stage's ranks. Collective."""
        if not cut or self.model is None:
            return
        sum_together([part for sums in cut.values() for part in wanted(sums)], self._ranks, self.device, SUMS)
        tied = {name: ranks for name, ranks in self.model.tied.items() if name in cut}
        for ranks in dict.fromkeys(tied.values()):
            group = self.model.layout.holders_group(ranks)
            first = dist.get_process_group_ranks(group)[0]
            for part in (part for name in cut if tied.get(name) == ranks for part in wanted(cut[name])):
                with CollectiveName(SUMS, group_name(group), "broadcast"):
                    dist.broadcast(part, first, group=group)

    def _move_statistics(self, group: Mapping[str, Any], parameter: nn.Parameter, sums: Sums) -> None:
        """Move what is kept of the squares towards those of this step's gradient."""
        gradient, state, entry = parameter.grad, self.state[parameter], self.entry(parameter)
        assert gradient is not None
        share = float(state["step"]) ** group["beta2_decay"]
        if "variance" in state:
            _move(state["variance"], gradient.square(), share)
            return
        n, m = entry.shape[-2:]
        for key, whole, dim, count in (("row_var", sums.rows, -1, m), ("col_var", sums.columns, -2, n)):
            form = form_without(entry, parameter, dim)
            squares = _squares(gradient, dim) if whole is None else _part(whole, form).to(gradient)
            _move(state[key], squares / count, share)
        if sums.columns is None or sums.row_var is None:
            sums.mean = state["row_var"].mean(-2, keepdim=True)
        else:  # the mean of what has been moved is what the means are moved to
            mean = sums.row_var / n * (1 - share) + sums.columns.sum(-1, keepdim=True) / (n * m) * share
            sums.mean = _part(mean, form_without(entry, parameter, -1, -2)).to(gradient)

    def _add_update(self, group: Mapping[str, Any], parameter: nn.Parameter, sums: Sums) -> None:
        """Add the squares of this rank's part of the update."""
        if self._adds(parameter):
            for _, update in self._updates(group, parameter, sums):
                sums.update += torch.linalg.vector_norm(update).square()

    def _apply(self, group: Mapping[str, Any], parameter: nn.Parameter, sums: Sums) -> None:
        """Move weights by the update, no further than `d` allows and in proportion to their own size."""
        count, step = math.prod(self.entry(parameter).shape), float(self.state[parameter]["step"])
        size = (sums.weight / count).sqrt_().clamp_(min=group["eps"][1])
        excess = (sums.update / count).sqrt_().div_(group["d"]).clamp_(min=1.0)
        factor = (size * min(group["lr"], step**-0.5) / excess).to(parameter.device)
        for weight, update in self._updates(group, parameter, sums):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(factor))

    def _updates(
        self, group: Mapping[str, Any], parameter: nn.Parameter, sums: Sums
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some rows of the weights at a time, with what they move by before it is scaled."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        least = torch.finfo(parameter.dtype).eps if group["eps"][0] is None else group["eps"][0]
        if "variance" in state:
            for weight, part, squares in chunks_of([parameter, gradient, state["variance"]]):
                yield weight, squares.clamp(min=least * least).rsqrt_().mul_(part)
            return
        assert sums.mean is not None
        of_matrix = [state["col_var"], sums.mean.clamp(min=least)]
        per_row = [parameter, gradient, state["row_var"], *(of_matrix if parameter.dim() > 2 else [])]
        for weight, part, row, *others in chunks_of(per_row):
            column, mean = others or of_matrix
            yield weight, (row * column).div_(mean).clamp_(min=least * least).rsqrt_().mul_(part)


def form_without(entry: ParameterEntry, parameter: Tensor, *dims: int) -> StateForm:
    """Return the form of sums over some dims, which stay as dims of size 1; who has their first elements writes them.

    Regions of a tensor that differ along these dims alone have the same sums.
    """
    shape, local = list(entry.shape), list(parameter.shape)
    for dim in dims:
        shape[dim] = local[dim] = 1
    regions: dict[tuple[int, ...], Region] = {}
    first: set[tuple[int, ...]] = set()
    for region in entry.regions:
        if all(part.stop > part.start for part in region.logical):
            logical, own = list(region.logical), list(region.local)
            for dim in dims:
                logical[dim] = own[dim] = slice(0, 1)
            place = tuple(part.start for part in own)
            regions[place] = Region(tuple(logical), tuple(own))
            if all(region.logical[dim].start == 0 for dim in dims):
                first.add(place)
    owned = tuple(region for place, region in regions.items() if place in first)
    return StateForm(tuple(shape), parameter.dtype, tuple(local), tuple(regions.values()), owned)


def _shards(entry: ParameterEntry) -> int:
    """Return the ranks over which FSDP2 shards dim 0."""
    parameter = entry.parameter
    return parameter.device_mesh.size(-1) if isinstance(parameter, DTensor) else 1


def _is_cut(entry: ParameterEntry) -> bool:
    return _shards(entry) > 1 or (entry.split is not None and entry.split.degree > 1)


def _squares(gradient: Tensor, dim: int) -> Tensor:
    """Return the sums of squares over a dim, which stays with size 1."""
    return torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square_()


def _move(kept: Tensor, towards: Tensor, share: float) -> None:
    kept.mul_(1 - share).add_(towards.mul_(share))


def _add(whole: Tensor, local: Tensor, regions: Sequence[Region]) -> None:
    """Add this rank's sums where they belong in those of the whole tensor."""
    for region in regions:
        whole[region.logical] += local[region.local].to(whole)


def _part(whole: Tensor, form: StateForm) -> Tensor:
    """Return what of the whole tensor's sums is of this rank's elements."""
    local = whole.new_zeros(form.local_shape)
    for region in form.regions:
        local[region.local] = whole[region.logical]
    return local
