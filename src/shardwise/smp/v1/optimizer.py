"""`smp.DistributedOptimizer`: a script's own torch optimizer, on the elements of the parameters that live here.

The optimizer keeps its class, its groups and its schedulers; `optimizer_binding.py` has what it does with the model.
Under `fp16` a wrapper scales the loss and skips steps whose gradients are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat.optimizers import follow_schedulers
from shardwise.errors import ConfigError
from shardwise.job.axes import state_axes
from shardwise.job.schema import LossScaleSection
from shardwise.kernels.precision import LossScaler
from shardwise.smp.options import make_job
from shardwise.smp.v1.optimizer_binding import OptimizerBinding
from shardwise.smp.v1.optimizer_parameters import inner_optimizer
from shardwise.smp.v1.own_optimizer import OwnOptimizer, ParameterNumbers, subclass_with
from shardwise.smp.v1.session import state

LOSS_SCALE = "precision.loss_scale"  # the section of a job


class DistributedOptimizerMixin(ParameterNumbers):
    """Methods that a script's optimizer gains; its own class comes behind it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """`optimizer`: SMP wraps under sharded data parallelism too, and scripts give what is inside to schedulers."""
        if name == "optimizer" and "_smp" in vars(self):
            return self._smp.optimizer
        inherited = getattr(super(), "__getattr__", super().__getattribute__)  # which says that there is none
        return inherited(name)

    @property
    def overflow(self) -> bool:
        """True where the last step was skipped because its gradients were not finite."""
        return self._smp.overflow

    @property
    def _global_grad_norm(self) -> float | None:
        return None if self._smp.norm is None else float(self._smp.norm)

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's elements of every group, as one tensor a group."""
        groups = self._smp.optimizer.param_groups
        return [torch.cat([local.detach().flatten() for local in group["params"]]) for group in groups]

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters of every group, as `model.named_parameters()` has them, with `ds_shape`."""
        return self._smp.parameters.of_groups()

    @property
    def ds_param_shard_group(self) -> dist.ProcessGroup:
        """The ranks among which parameters are sharded."""
        return self._smp.session.layout.group(*state_axes())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Complete the step's gradients and update this rank's elements. Collective."""
        value = closure() if closure is not None else None
        if self._smp.prepare_step():
            self._smp.release_weights()
            self._inner_step()
        self._smp.gather_weights()
        return value

    def _inner_step(self) -> None:
        super().step()  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True, set_grads_to_None: bool | None = None) -> None:
        """Drop gradients; the second name is of older scripts."""
        if self._smp.parallel is None:
            self._inner_zero()
        self._smp.zero(set_to_none if set_grads_to_None is None else set_grads_to_None)

    def _inner_zero(self) -> None:
        super().zero_grad()  # type: ignore[misc]

    def clip_master_grads(self, max_norm: float) -> float:
        """Clip by the norm of the whole model's gradients; that norm, or -1 where it is not finite. Collective."""
        return self._smp.clip(max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, of whole tensors, in the order of the script's own optimizer. Collective."""
        return self._smp.whole_state()

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return this rank's state, with the key `_smp_is_partial`.

        Where state is sharded and `gather_if_shard`, reduced data rank 0 gets under `state` a list of all ranks' states
        of its group, by rank; the others their own. Collective then.
        """
        return self._smp.local_state(gather_if_shard)

    def orig_state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's own state dict on this rank."""
        return self._smp.own_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """Load what `state_dict` or `local_state_dict` returned; before the first step it waits for it."""
        self._smp.load(state_dict)


class Fp16Optimizer(DistributedOptimizerMixin):
    """The wrapper under `fp16`: `optimizer` is the script's own, for schedulers; everything else reaches it too."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: LossScaler) -> None:
        self.optimizer = optimizer
        self._smp = OptimizerBinding(state, optimizer, scaler, self)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_smp"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale and how it moves."""
        assert self._smp.scaler is not None
        return self._smp.scaler

    @property
    def loss_scale(self) -> float:
        """The factor of losses before backward."""
        return self._smp.loss_scale

    def _inner_step(self) -> None:
        self.optimizer.step()

    def _inner_zero(self) -> None:
        self.optimizer.zero_grad()


def DistributedOptimizer(
    optimizer: Any,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
    **loss_args: Any,
) -> Any:
    """Make `optimizer` update a distributed model; built before or after the model is wrapped.

    It is returned itself, of a subclass of its class; under `fp16` inside of a wrapper that scales the loss.

    Args:
        optimizer: of torch.optim's kind, or an object that holds such a one as its `optimizer` and keeps its own step
            and state. One that needs whole tensors is refused where they are in parts.
        static_loss_scale: a scale that stays; of use under `fp16` alone.
        dynamic_loss_scale: let the scale move (Micikevicius et al., arXiv 1710.03740, section 3.2).
        dynamic_loss_args: init_scale, scale_factor, scale_window, min_scale, delayed_shift, consecutive_hysteresis;
            also as keywords.

    Raises:
        NotInitializedError: `smp.init` was not called.
        ModelError: there is no torch optimizer in `optimizer`.
        ConfigError: a number of the loss scale is wrong; or `sdp_gradient_clipping` is on, and `optimizer` takes a step
            of its own.
    """
    if state.cfg.fp16:
        settings = {"init_scale": 2.0**32} | dict(dynamic_loss_args or {}) | loss_args
        if not dynamic_loss_scale:
            settings = {"static": static_loss_scale or 1.0}
        return Fp16Optimizer(optimizer, LossScaler.of("fp16", _loss_scale(settings)))
    inner_optimizer(optimizer)
    is_torchs = isinstance(optimizer, torch.optim.Optimizer)
    if not is_torchs:
        _check_clipping(type(optimizer).__name__)
    before = DistributedOptimizerMixin if is_torchs else OwnOptimizer
    optimizer.__class__ = subclass_with(before, type(optimizer))
    follow_schedulers(optimizer)
    optimizer._smp = OptimizerBinding(state, optimizer, None)
    return optimizer


def _loss_scale(settings: Mapping[str, Any]) -> LossScaleSection:
    try:
        return make_job({LOSS_SCALE: settings}).precision.loss_scale
    except ConfigError as error:
        text = str(error).replace(f"{LOSS_SCALE}.static", "static_loss_scale")
        error.args = (f"smp.DistributedOptimizer: {text.replace(LOSS_SCALE, 'dynamic_loss_args')}",)
        raise


def _check_clipping(name: str) -> None:
    """Refuse clipping in the step of an object that may have scaled its gradients, or read them before."""
    max_norm = state.cfg.sdp_gradient_clipping
    if state.cfg.sharded_data_parallel_degree > 1 and max_norm:
        raise ConfigError(
            f"sdp_gradient_clipping {max_norm} clips in the step of a torch optimizer, and {name} takes a step of its "
            "own, on gradients that it may have scaled; set sdp_gradient_clipping to 0 and clip there"
        )
