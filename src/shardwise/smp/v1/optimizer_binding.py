"""The binding of a script's optimizer to its distributed model: gradients, their norm, the loss scale, and the state.

What scripts see is in `optimizer.py`, and which elements are updated in `optimizer_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.kernels.precision import LossScaler
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.smp.v1.optimizer_parameters import OptimizerParameters, inner_optimizer
from shardwise.smp.v1.optimizer_state import (
    MASTERS,
    load_optimizer_state,
    local_optimizer_state,
    local_part_of,
    whole_optimizer_state,
)
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.smp.v1.weights import PARTIAL
from shardwise.training.step import squared_share

OVERFLOWN = -1.0  # what clip_master_grads returns where the norm is not finite


class OptimizerBinding:
    """One optimizer of the script and the session's model, whichever of the two is made first.

    Args:
        session: the session of this process.
        optimizer: a torch optimizer, or an object of another class that holds one.
        scaler: the loss scale, under `fp16`.
        public: what the script holds, where that is a wrapper around the optimizer.

    Attributes:
        parameters: which elements are updated on this rank.
        reads_gradients: the object reads gradients itself, maybe before its step.
        overflow: the last step was skipped.
        norm: 0-dim fp64 norm of the step's gradients, once it is known.
    """

    def __init__(self, session: SmpSessionV1, optimizer: Any, scaler: LossScaler | None, public: Any = None) -> None:
        inner = inner_optimizer(optimizer)
        self.session = session
        self.public = optimizer if public is None else public
        self.reads_gradients = inner is not optimizer
        self.parameters = OptimizerParameters(session, inner, self.reads_gradients)
        self.scaler = scaler
        self.overflow = False
        self.norm: Tensor | None = None
        self._pending: Mapping[str, Any] | None = None
        self._is_ready = False
        self._unscaled = False
        session.attach_optimizer(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The script's torch optimizer, or that in an object of another class."""
        return self.parameters.optimizer

    @property
    def parallel(self) -> ParallelModel | None:
        """The engine's model, once it is distributed."""
        return self.parameters.parallel

    @property
    def locals(self) -> list[tuple[ParameterEntry, nn.Parameter]]:
        """Entries with elements on this rank, with the tensors that the optimizer updates."""
        return self.parameters.locals

    @property
    def names_by_tensor_rank(self) -> list[list[str]]:
        """Names of the optimizer's parameters in their order, a list for each tensor rank."""
        return self.parameters.names_by_tensor_rank

    @property
    def loss_scale(self) -> float:
        """The factor of losses before backward."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def adopt(self, parallel: ParallelModel) -> None:
        """Put this rank's elements in the place of the parameters of all groups, and load the state that waits for it.

        Raises:
            ModelError: a parameter is not the model's, or the optimizer needs whole tensors and they are in parts.
        """
        self.parameters.adopt(parallel)
        if not self.reads_gradients:
            self.be_ready()

    def be_ready(self) -> None:
        """Load the state that waits: all that holds it is there.

        In an object of another class that is so behind the first step, whose hooks make its masters.
        """
        self._is_ready = True
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._load(pending)

    # ---- gradients

    def gradients(self) -> Iterator[tuple[ParameterEntry, Tensor]]:
        """Yield entries with this rank's gradient elements."""
        for entry, _ in self.parameters.locals:
            gradient = entry.local_gradient
            if gradient is not None:
                yield entry, gradient

    def show_gradients(self) -> None:
        """Show the gradients on the optimizer's tensors, where GradScaler and scripts read them."""
        for entry, local in self.parameters.locals:
            gradient = entry.local_gradient
            local.grad = None if gradient is None else gradient.to(local.dtype)

    def settle(self) -> None:
        """Complete the gradients of this step. Collective."""
        if self.session.passes is not None:
            self.session.passes.complete_gradients()
        if self.session.weights is not None:
            self.session.weights.settle_gradients()
        self.show_gradients()

    def zero(self, set_to_none: bool) -> None:
        """Drop (or zero) gradients of parameters and of the optimizer's tensors."""
        entries = list(self.parallel.tensor_map) if self.parallel is not None else []
        for entry in entries:
            if set_to_none:
                entry.parameter.grad = None
            elif entry.parameter.grad is not None:
                entry.parameter.grad.zero_()
        for _, local in self.parameters.locals:
            local.grad = None if set_to_none else local.grad
        if self.session.passes is not None:
            self.session.passes.drop_gradients()
        self._unscaled = False

    # ---- norm and loss scale

    def global_norm(self) -> Tensor:
        """Return the 0-dim fp64 L2 norm of the whole model's gradients, the loss scale taken out. Collective."""
        self.settle()
        squares = squared_share(self.gradients(), self.session.device)
        dist.all_reduce(squares)
        return squares.sqrt() / (1.0 if self._unscaled else self.loss_scale)

    def clip(self, max_norm: float) -> float:
        """Take the loss scale out of the gradients and clip them; return the norm before, or -1 if it is not finite."""
        self.norm = norm = self.global_norm()
        if not torch.isfinite(norm):
            return OVERFLOWN
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        self._multiply(factor / (1.0 if self._unscaled else self.loss_scale))
        self._unscaled = True
        return float(norm)

    def prepare_step(self) -> bool:
        """Settle, clip and unscale before the optimizer's step; return False where it is to be skipped. Collective."""
        if self.session.weights is not None:
            self.session.weights.return_from_host()
        cfg = self.session.cfg
        sharded = self.parallel is not None and cfg.sharded_data_parallel_degree > 1
        max_norm = float(cfg.sdp_gradient_clipping) if sharded else 0.0
        if self.scaler is None:
            if max_norm:
                self.clip(max_norm)
            else:
                self.settle()
            self._unscaled = False
            return True
        self.overflow = self.norm is not None and not bool(torch.isfinite(self.norm))
        if not self._unscaled:
            self.overflow = self.clip(max_norm) == OVERFLOWN
        self.scaler.update(self.overflow)
        self._unscaled, self.norm = False, self.norm if not self.overflow else None
        return not self.overflow

    def release_weights(self) -> None:
        """Let go of gathered parameters before this rank's elements change."""
        if self.session.weights is not None:
            self.session.weights.release()

    def gather_weights(self) -> None:
        """Gather whole parameters after the step, where the optimizer's state alone is sharded."""
        if self.session.weights is not None:
            self.session.weights.gather()

    def _multiply(self, factor: Tensor) -> None:
        gradients = [gradient for _, gradient in self.gradients()]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0]))

    # ---- state

    def own_state(self) -> dict[str, Any]:
        """Return the torch optimizer's own state dict on this rank."""
        return torch.optim.Optimizer.state_dict(self.optimizer)

    def part(self) -> dict[str, Any]:
        """Return what this rank's file of a checkpoint keeps of the optimizer."""
        if self.reads_gradients:
            own: dict[str, Any] = self.public.local_state_dict(gather_if_shard=False)
            return own
        return self.local_state(False, with_masters=False)

    def local_state(self, gather_if_shard: bool, with_masters: bool = True) -> dict[str, Any]:
        """Return this rank's state with the loss scale; gathered as in `local_optimizer_state`."""
        state = self.own_state() | {"scaler": self.scaler_state()} | (self._masters() if with_masters else {})
        return local_optimizer_state(self.session, state, gather_if_shard)

    def whole_state(self) -> dict[str, Any]:
        """Return the whole state, of whole tensors, with the loss scale. Collective.

        Raises:
            MessageError: one of the ranks will not come.
        """
        return whole_optimizer_state(self.session, self.parameters) | {"scaler": self.scaler_state()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take a state, or keep it until all that holds it is there (`be_ready`).

        Raises:
            CheckpointError: it is of another number of ranks, of parameters or of groups.
        """
        if self._is_ready:
            self._load(saved)
        else:
            self._pending = saved

    def local_part_of(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a gathered or whole state. Raises CheckpointError for other groups."""
        return local_part_of(self.session, self.parameters, saved)

    def scaler_state(self) -> tuple[float, int, int] | None:
        """Return the loss scale, good steps and hysteresis; None without a scaler."""
        scaler = self.scaler
        return None if scaler is None else (scaler.scale, scaler.good_steps, scaler.hysteresis)

    def _load(self, given: Mapping[str, Any]) -> None:
        if self.reads_gradients:
            self.public.load_state_dict(given)
            return
        saved = dict(given)
        scaler, is_partial = saved.pop("scaler", None), saved.pop(PARTIAL, False)
        if self.scaler is not None and scaler:
            self.scaler.scale, self.scaler.good_steps, self.scaler.hysteresis = scaler
        saved = self.local_part_of({**saved, PARTIAL: is_partial})
        masters = saved.pop(MASTERS, [])
        if masters:
            self.release_weights()
        for (_, local), master in zip(self.parameters.locals, masters):
            local.data.copy_(master)
        load_optimizer_state(self.parameters, saved)

    def _masters(self) -> dict[str, Any]:
        """Return fp32 elements that a script's file of the model cannot hold, since it is shown gathered parameters."""
        parallel = self.parallel
        sharded_state = parallel is not None and self.session.cfg.shard_optimizer_state
        if parallel is None or not sharded_state or parallel.plan.dtypes.compute in ("fp32", "fp64"):
            return {}
        return {MASTERS: [local.detach().clone() for _, local in self.parameters.locals]}
