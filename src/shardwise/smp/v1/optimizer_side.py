"""What a script's optimizer and its model share: which elements are updated here, their gradients, norm and loss scale.

When the model is distributed the groups' parameters are replaced by plain tensors that share storage with the sharded
ones, so that any elementwise optimizer updates each element where it lives. What scripts see is in `optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.job.axes import Axis, state_axes
from shardwise.job.optimizers import ELEMENTWISE
from shardwise.kernels.precision import LossScaler
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import Entry
from shardwise.smp.v1.inspection import show_shard
from shardwise.smp.v1.optimizer_state import load_state
from shardwise.smp.v1.own_optimizer import inner_optimizer
from shardwise.smp.v1.process import state
from shardwise.training.step import squared_share

if TYPE_CHECKING:
    from shardwise.smp.v1.model import DistributedModel

OVERFLOWN = -1.0  # what clip_master_grads returns where the norm is not finite


class Side:
    """What an optimizer and its model share: which tensors are updated, the norm, the loss scale.

    Attributes:
        optimizer: the script's torch optimizer, or that in an object of another class.
        public: what the script holds: the optimizer, or the wrapper around it.
        locals: parameters that have elements here, with the tensors that the optimizer updates.
        overflow: the last step was skipped.
    """

    def __init__(self, optimizer: Any, scaler: LossScaler | None, public: Any = None) -> None:
        self.optimizer, self.scaler = inner_optimizer(optimizer), scaler
        self.public = optimizer if public is None else public
        self.eager = self.optimizer is not optimizer  # it reads gradients itself, maybe before its step
        self.locals: list[tuple[Entry, nn.Parameter]] = []
        self.order: list[str] = []  # names of all parameters of all groups, in the optimizer's order
        self.group_sizes: list[int] = []
        self.parallel: ParallelModel | None = None
        self.overflow = False
        self.pending: Mapping[str, Any] | None = None
        self.norm: Tensor | None = None
        self._unscaled = False
        state.optimizer = self
        if state.model is not None and state.model.parallel is not None:
            self.adopt(state.model.parallel)

    @property
    def loss_scale(self) -> float:
        """By which losses are multiplied before backward."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def adopt(self, parallel: ParallelModel) -> None:
        """Put this rank's elements in the place of the parameters of all groups.

        Raises:
            ModelError: a parameter is not the model's, or the optimizer needs whole tensors and they are in parts.
        """
        self.parallel = parallel
        model = state.model
        assert model is not None
        _check_class(self.optimizer, parallel)
        made: dict[str, nn.Parameter] = {}
        # An object of the script's own counts every element in its norm: the first stage alone has what is tied.
        place = parallel.layout.index(Axis.PIPELINE)
        elsewhere = [name for name, ranks in parallel.tied.items() if self.eager and place != ranks[0]]
        for group in self.optimizer.param_groups:
            # Scripts that walk all modules for their groups find a tied parameter twice.
            dtypes = {_name_of(model.names, parameter): parameter.dtype for parameter in group["params"]}
            names = list(dtypes)
            self.order += names
            self.group_sizes.append(len(names))
            here = [name for name in names if name in parallel.tensor_map.names and name not in elsewhere]
            made |= {name: self._held(parallel.tensor_map[name], model, dtypes[name]) for name in here}
            group["params"] = [made[name] for name in here if made[name].numel()]
        self.locals = [(parallel.tensor_map[name], local) for name, local in made.items() if local.numel()]
        self._name_tensor_group()
        self.optimizer.state.clear()
        if self.pending is not None:
            load_state(self, self.pending)
            self.pending = None

    def _held(self, entry: Entry, model: DistributedModel, dtype: torch.dtype) -> nn.Parameter:
        """What the optimizer updates of `entry`: the elements themselves. An object of the script's own that keeps
        masters knows 16-bit weights by their `dtype`: it gets copies in that, and `write_back` takes what it makes.
        """
        held = nn.Parameter(entry.local.to(dtype) if self.eager else entry.local)
        model.names[id(held)] = entry.name
        return held

    def write_back(self) -> None:
        """What the optimizer's object made of weights that it holds in a dtype of their own. Collective."""
        for entry, local in self.locals:
            if local.dtype != entry.parameter.dtype:
                entry.local.copy_(local.detach())
        if self.parallel is not None:
            self.parallel.copy_tied()

    def numbered(self) -> list[tuple[str, nn.Parameter]]:
        """(name, what the optimizer updates here), in the order of its numbers on this rank."""
        if self.parallel is not None:
            return [(entry.name, parameter) for entry, parameter in self.updated()]
        names = state.model.names if state.model is not None else {}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [(names.get(id(parameter), ""), parameter) for parameter in parameters]

    def updated(self) -> list[tuple[Entry, nn.Parameter]]:
        """(entry, what the torch optimizer updates of it), in its order: `locals`, or what an object of another class
        has put in their place since."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        own = {id(local): entry for entry, local in self.locals}
        return [(own.get(id(parameter), entry), parameter) for (entry, _), parameter in zip(self.locals, parameters)]

    def _name_tensor_group(self) -> None:
        """For scripts that join the state of tensor ranks themselves: each one's numbers by name. Collective."""
        everyone: list[Any] = [[name for name, _ in self.numbered()]]
        if state.layout.size(Axis.TENSOR) > 1:
            everyone *= state.layout.size(Axis.TENSOR)
            dist.all_gather_object(everyone, everyone[0], group=state.layout.group(Axis.TENSOR))
        state.param_index_to_name_tp_group = {rank: dict(enumerate(names)) for rank, names in enumerate(everyone)}
        state.param_name_to_index_tp_group = {
            rank: {name: number for number, name in enumerate(names)} for rank, names in enumerate(everyone)
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take a state, or keep it until the model is distributed."""
        if self.parallel is None:
            self.pending = saved
        else:
            load_state(self, saved)

    def gradients(self) -> Iterator[tuple[Entry, Tensor]]:
        """Entries with this rank's gradient elements."""
        for entry, _ in self.locals:
            gradient = entry.local_gradient
            if gradient is not None:
                yield entry, gradient

    def show_gradients(self) -> None:
        """Let the optimizer's tensors show the gradients, which GradScaler and scripts read there."""
        for entry, local in self.locals:
            gradient = entry.local_gradient
            local.grad = None if gradient is None else gradient.to(local.dtype)

    def parameters_of_groups(self) -> list[list[nn.Parameter]]:
        """The module's own parameters of every group; the optimizer may hold this rank's elements in their place."""
        model, parallel = state.model, self.parallel
        if parallel is None or model is None:
            return [list(group["params"]) for group in self.optimizer.param_groups]
        here = dict(model.get_module().named_parameters())
        groups, names = [], iter(self.order)
        for count in self.group_sizes:
            found = [(name, here[name]) for name in islice(names, count) if name in here]
            groups.append([parameter for _, parameter in found])
            for name, parameter in found:
                show_shard(parameter, parallel.facts.parameter_shapes[name], parallel.tensor_map[name].local)
        return groups

    def settle(self) -> None:
        """Complete the gradients of this step. Collective."""
        if state.model is not None:
            state.model.settle_gradients()
        self.show_gradients()

    def global_norm(self) -> Tensor:
        """0-dim fp64 L2 norm of the gradients of the whole model, the loss scale taken out. Collective."""
        self.settle()
        squares = squared_share(self.gradients(), state.device)
        dist.all_reduce(squares)
        return squares.sqrt() / (1.0 if self._unscaled else self.loss_scale)

    def clip(self, most: float) -> float:
        """Take the loss scale out of the gradients and clip them; the norm before, or -1 where it is not finite."""
        self.norm = norm = self.global_norm()
        if not torch.isfinite(norm):
            return OVERFLOWN
        factor = (most / (norm + 1e-6)).clamp(max=1.0) if most else torch.ones_like(norm)
        self._multiply(factor / (1.0 if self._unscaled else self.loss_scale))
        self._unscaled = True
        return float(norm)

    def ready(self) -> bool:
        """Settle, clip and unscale before the optimizer's step; False where it is to be skipped. Collective."""
        if state.model is not None:
            state.model.come_back()
        sharded = self.parallel is not None and state.cfg.sharded_data_parallel_degree > 1
        most = float(state.cfg.sdp_gradient_clipping) if sharded else 0.0
        if self.scaler is None:
            if most:
                self.clip(most)
            else:
                self.settle()
            self._unscaled = False
            return True
        self.overflow = self.norm is not None and not bool(torch.isfinite(self.norm))
        if not self._unscaled:
            self.overflow = self.clip(most) == OVERFLOWN
        self.scaler.update(self.overflow)
        self._unscaled, self.norm = False, self.norm if not self.overflow else None
        return not self.overflow

    def zero(self, set_to_none: bool) -> None:
        """Drop (or zero) gradients of parameters and of the optimizer's tensors."""
        entries = list(self.parallel.tensor_map) if self.parallel is not None else []
        for entry in entries:
            if set_to_none:
                entry.parameter.grad = None
            elif entry.parameter.grad is not None:
                entry.parameter.grad.zero_()
        for _, local in self.locals:
            local.grad = None if set_to_none else local.grad
        self._unscaled = False

    def _multiply(self, factor: Tensor) -> None:
        gradients = [gradient for _, gradient in self.gradients()]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0]))


def _name_of(names: Mapping[int, str], parameter: nn.Parameter) -> str:
    if id(parameter) not in names:
        raise ModelError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the wrapped model's; build "
            "it from model.parameters(), before or after smp.DistributedModel"
        )
    return names[id(parameter)]


def _check_class(optimizer: Any, parallel: ParallelModel) -> None:
    """Whole tensors are there where nothing is sharded or split."""
    pieces = parallel.layout.size(*state_axes(), Axis.TENSOR)
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")), "")
    known = name if name != "Optimizer" else type(optimizer).__name__
    if pieces > 1 and known not in ELEMENTWISE:
        raise ModelError(
            f"{known} is not known to be elementwise, and parameters are cut over {pieces} ranks; use degree 1 for "
            f"sharding and tensors, or one of {', '.join(ELEMENTWISE)}"
        )
