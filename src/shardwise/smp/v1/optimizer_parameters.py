"""The parameters of a script's optimizer: which elements it updates on this rank, and in which order.

When the model is distributed the groups' parameters are replaced by plain tensors that share storage with the sharded
ones, so that any elementwise optimizer updates each element where it lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ModelError
from shardwise.job.axes import Axis, state_axes
from shardwise.job.optimizers import ELEMENTWISE
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.smp.v1.inspection import show_shard
from shardwise.smp.v1.session import SmpSessionV1


def inner_optimizer(given: Any) -> Optimizer:
    """Return the torch optimizer in `given`, or it itself. Raises ModelError where there is none."""
    inner = given
    while not isinstance(inner, Optimizer):
        if not hasattr(inner, "optimizer"):
            raise ModelError(
                f"{type(given).__name__} is none of torch.optim's classes and holds none as its attribute optimizer; "
                "smp.DistributedOptimizer has nothing to put the distributed parameters into"
            )
        inner = inner.optimizer
    return inner


class OptimizerParameters:
    """The parameters of one optimizer.

    Args:
        session: the session of this process.
        optimizer: the script's torch optimizer, or that in an object of another class.
        reads_gradients: it is in such an object, which reads gradients itself, maybe before its step.

    Attributes:
        locals: entries with elements on this rank, with the tensors that the optimizer updates.
        order: names of all parameters of all groups, in the optimizer's order.
        group_sizes: parameters of each group.
        parallel: the engine's model, once it is distributed.
        names_by_tensor_rank: names of the optimizer's parameters in their order, a list for each tensor rank.
    """

    def __init__(self, session: SmpSessionV1, optimizer: Optimizer, reads_gradients: bool) -> None:
        self.optimizer = optimizer
        self.locals: list[tuple[ParameterEntry, nn.Parameter]] = []
        self.order: list[str] = []
        self.group_sizes: list[int] = []
        self.parallel: ParallelModel | None = None
        self.names_by_tensor_rank: list[list[str]] = []
        self._session, self._reads_gradients = session, reads_gradients

    def adopt(self, parallel: ParallelModel) -> None:
        """Put this rank's elements in the place of the parameters of all groups.

        Raises:
            ModelError: a parameter is not the model's, or the optimizer needs whole tensors and they are in parts.
        """
        self.parallel = parallel
        _check_class(self.optimizer, parallel)
        names_by_id = self._names_by_id
        updated: dict[str, nn.Parameter] = {}
        # An object of the script's own counts every element in its norm: the first stage alone has what is tied.
        stage = parallel.layout.index(Axis.PIPELINE)
        elsewhere = [name for name, ranks in parallel.tied.items() if self._reads_gradients and stage != ranks[0]]
        for group in self.optimizer.param_groups:
            # Scripts that walk all modules for their groups find a tied parameter twice.
            dtypes = {_name_of(names_by_id, parameter): parameter.dtype for parameter in group["params"]}
            names = list(dtypes)
            self.order += names
            self.group_sizes.append(len(names))
            local = [name for name in names if name in parallel.tensor_map.names and name not in elsewhere]
            updated |= {name: self._elements(parallel.tensor_map[name], dtypes[name]) for name in local}
            group["params"] = [updated[name] for name in local if updated[name].numel()]
        self.locals = [(parallel.tensor_map[name], elements) for name, elements in updated.items() if elements.numel()]
        self._name_tensor_group()
        self.optimizer.state.clear()

    @property
    def _names_by_id(self) -> dict[int, str]:
        return self._session.weights.names if self._session.weights is not None else {}

    def _elements(self, entry: ParameterEntry, dtype: Any) -> nn.Parameter:
        """Return what the optimizer updates of `entry`: the elements themselves.

        An object of the script's own that keeps masters knows 16-bit weights by their `dtype`: it gets copies in that,
        and `write_back` takes what it makes.
        """
        values = entry.local.to(dtype) if self._reads_gradients else entry.local
        elements = nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())
        self._names_by_id[id(elements)] = entry.name
        return elements

    def write_back(self) -> None:
        """Copy what the optimizer's object made of weights that it holds in a dtype of their own. Collective."""
        for entry, local in self.locals:
            if local.dtype != entry.parameter.dtype:
                entry.local.copy_(local.detach())
        if self.parallel is not None:
            self.parallel.copy_tied()

    def numbered(self) -> list[tuple[str, nn.Parameter]]:
        """List (name, what the optimizer updates on this rank), in the order of its numbers."""
        if self.parallel is not None:
            return [(entry.name, parameter) for entry, parameter in self.updated()]
        names = self._names_by_id
        return [(names.get(id(parameter), ""), parameter) for parameter in self._current()]

    def updated(self) -> list[tuple[ParameterEntry, nn.Parameter]]:
        """List (entry, what the torch optimizer updates of it), in its order.

        That is `locals`, or what an object of another class has put in their place since.
        """
        entries = {id(local): entry for entry, local in self.locals}
        return [
            (entries.get(id(parameter), entry), parameter)
            for (entry, _), parameter in zip(self.locals, self._current())
        ]

    def _current(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _name_tensor_group(self) -> None:
        """Collect each tensor rank's numbers by name, for scripts that join their state themselves. Collective."""
        by_rank: list[Any] = [[name for name, _ in self.numbered()]]
        degree = self._session.layout.size(Axis.TENSOR)
        if degree > 1:
            by_rank *= degree
            dist.all_gather_object(by_rank, by_rank[0], group=self._session.layout.group(Axis.TENSOR))
        self.names_by_tensor_rank = by_rank

    def of_groups(self) -> list[list[nn.Parameter]]:
        """List the module's own parameters of every group; the optimizer may hold this rank's elements instead."""
        weights, parallel = self._session.weights, self.parallel
        if parallel is None or weights is None:
            return [list(group["params"]) for group in self.optimizer.param_groups]
        own = dict(weights.module.named_parameters())
        degree = self._session.layout.size(Axis.SHARD)
        groups, names = [], iter(self.order)
        for count in self.group_sizes:
            local = [name for name in islice(names, count) if name in own]
            groups.append([own[name] for name in local])
            for name in local:
                elements = parallel.tensor_map[name].local
                show_shard(own[name], parallel.facts.parameter_shapes[name], elements, degree)
        return groups


def _name_of(names: Mapping[int, str], parameter: nn.Parameter) -> str:
    if id(parameter) not in names:
        raise ModelError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the wrapped model's; build "
            "it from model.parameters(), before or after smp.DistributedModel"
        )
    return names[id(parameter)]


def _check_class(optimizer: Any, parallel: ParallelModel) -> None:
    """Refuse an optimizer that needs whole tensors where they are cut. Raises ModelError."""
    pieces = parallel.layout.size(*state_axes(), Axis.TENSOR)
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")), "")
    known = name if name != "Optimizer" else type(optimizer).__name__
    if pieces > 1 and known not in ELEMENTWISE:
        raise ModelError(
            f"{known} is not known to be elementwise, and parameters are cut over {pieces} ranks; use degree 1 for "
            f"sharding and tensors, or one of {', '.join(ELEMENTWISE)}"
        )
