"""FSDP2 (`fully_shard`): its units, the gradients that it keeps whole, and its gathering and reduction."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

# No public names: what a unit of FSDP2 is doing (torch 2.11 to 2.13), and its parameters.
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

GATHERING, REDUCTION = "gathering", "reduction"  # of a unit


def _let_shards_be_integers() -> None:
    """Have FSDP2 of torch 2.11 make integer shards as later ones do: it first asks of each that it has a gradient."""

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        differentiable = data.is_floating_point() or data.is_complex()
        return nn.Parameter(data, differentiable if requires_grad is None else requires_grad)

    own = ModuleType(nn.__name__)
    own.__dict__.update(nn.__dict__, Parameter=parameter)
    _fsdp_param.nn = own  # type: ignore[attr-defined]


if torch.__version__ < "2.12":
    _let_shards_be_integers()


# No public name: FSDP2 passes what a unit is given through a function of autograd, which makes zeros of gradients that
# nothing has sent. An optimizer would take these for gradients: weights that one process leaves alone would decay.
_OfTorch = _fsdp_param_group.RegisterPostBackwardFunction


class _PostBackward(_OfTorch):  # type: ignore[misc, valid-type]
    if "setup_context" in vars(_OfTorch):

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            _OfTorch.setup_context(ctx, inputs, output)

    else:  # torch 2.11

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.set_materialize_grads(False)
            return _OfTorch.forward(ctx, *inputs)


_fsdp_param_group.RegisterPostBackwardFunction = _PostBackward  # type: ignore[misc]


# No public name: FSDP2 reduces gradients in a hook of autograd alone; torch's own pipeline stage reaches in like this.
def reduce_left_gradients(modules: Sequence[FSDPModule]) -> None:
    """Run FSDP2's reduction of the gradients that stand in gathered parameters; the root is the first of `modules`."""
    for module in modules[::-1]:
        for group in _parameter_groups(module):
            group.post_backward()
    if modules:
        fully_shard.state(modules[0])._root_post_backward_final_callback()  # type: ignore[attr-defined]


# No public names: FSDP2 adds up gradients in the dtype of reduction where backward leaves a unit, no later.
def gradient_sums(modules: Sequence[FSDPModule]) -> dict[nn.Module, Callable[[], None]]:
    """Return owner of parameters -> what adds their gradients to those that earlier backwards have left."""
    owned: dict[nn.Module, list[Any]] = {}
    for group in (group for module in modules for group in _parameter_groups(module)):
        for parameter in group.fsdp_params:
            owned.setdefault(parameter._module_info.module, []).append(parameter)
    return {owner: partial(_add_up, parameters) for owner, parameters in owned.items()}


def _add_up(parameters: Sequence[Any]) -> None:
    for parameter in parameters:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


# No public name: FSDP2 keeps to itself what backwards leave that it is told not to reduce after.
def take_left_gradients(modules: Sequence[FSDPModule]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(sharded parameter, whole gradient) of all that backwards without reduction have left; afterwards it is gone."""
    for module in modules:
        for group in _parameter_groups(module):
            for parameter in _gathered_before(group):
                if (gradient := parameter.take_gradient()) is not None:
                    yield parameter.sharded, gradient


# No public name: the same, of gradients whole or summed over the shards alone.
def drop_left_gradients(modules: Sequence[FSDPModule]) -> None:
    """Forget what backwards without reduction, or without that over replicas, have left."""
    for _ in take_left_gradients(modules):
        pass
    for module in modules:
        for group in _parameter_groups(module):
            group._partial_reduce_output = None


class _GatheredParameter:
    """A parameter that FSDP2 has gathered before, and its whole gradient, which lies in one of two places.

    Backward leaves it in the gathered parameter; once it is in the dtype of reduction, FSDP2 keeps it apart.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.sharded: nn.Parameter = parameter.sharded_param
        self.gathered: nn.Parameter = parameter._unsharded_param

    @property
    def is_accumulated(self) -> bool:
        """True where the gradient is kept apart, in the dtype of reduction."""
        return self._parameter.unsharded_accumulated_grad is not None

    def take_gradient(self) -> Tensor | None:
        """Return the gradient and remove it; None if there is none."""
        gradient: Tensor | None = self._parameter.unsharded_accumulated_grad
        gradient = self.gathered.grad if gradient is None else gradient
        self._parameter.unsharded_accumulated_grad = self.gathered.grad = None
        return gradient

    def fill_gradient(self) -> bool:
        """Give a trainable parameter without a gradient one of zeros; return True if it had none."""
        if self.is_accumulated or self.gathered.grad is not None or not self.gathered.requires_grad:
            return False
        self.gathered.grad = torch.zeros_like(self.gathered)
        return True

    def accumulate(self) -> None:
        """Convert the gradient to the dtype of reduction, if it is not yet."""
        if not self.is_accumulated:
            self._parameter.to_accumulated_grad_if_needed()


def _gathered_before(group: Any) -> list[_GatheredParameter]:
    return [_GatheredParameter(parameter) for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]


class UnitHooks(Protocol):
    """Calls ahead of what FSDP2 does with a unit; `index` is the unit's place among those that are watched."""

    def before_forward(self, index: int) -> None: ...

    def after_gathering(self, index: int) -> None: ...

    def after_forward(self, index: int) -> None: ...

    def before_backward(self, index: int) -> None: ...

    def before_reduction(self, index: int) -> AbstractContextManager[Any]:
        """Return the context in which the reduction runs."""
        ...

    def at_end_of_backward(self) -> None: ...


# No public names: FSDP2 tells nobody when it gathers and reduces a unit, nor can a rank do so without computing. Its
# own switch for unused parameters (torch 2.13 on) leaves out whole units, and does not say which were unused.
class ShardedUnit:
    """A unit of FSDP2: its parameters, and its part in a forward and a backward that do not compute."""

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self.state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        self._groups = _parameter_groups(module)
        self._post_forward_meshes: list[Any] = []
        self._prefetched: list[Any] = []

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that are gathered together."""
        modules: Sequence[nn.Module] = self.state._modules
        return modules

    def parameter_names(self) -> list[str]:
        """Return the names of the parameters, in the order of `parameters`."""
        return [str(parameter._param_fqn) for group in self._groups for parameter in group.fsdp_params]

    @property
    def reduces(self) -> bool:
        """True where a backward now reduces gradients, and does not leave them whole."""
        return any(group.reduce_grads for group in self._groups)

    def process_groups(self) -> Iterator[dist.ProcessGroup]:
        """Yield the groups in which the parameters are gathered and their gradients reduced."""
        for group in self._groups:
            if group.mesh_info.shard_mesh_dim is not None:
                yield group.mesh_info.shard_process_group
            if group.mesh_info.replicate_mesh_dim is not None:
                yield group.mesh_info.replicate_process_group

    def parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
        """Yield (sharded parameter, gathered parameter, None before the first gathering)."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                yield parameter.sharded_param, getattr(parameter, "_unsharded_param", None)

    def fill_unused(self) -> Iterator[nn.Parameter]:
        """Give gathered parameters that have no gradient one of zeros; yield their sharded parameters.

        Where earlier microbatches have left gradients in the dtype of reduction, all of the unit get it, since
        FSDP2 reduces them in one tensor.
        """
        for group in self._groups:
            parameters = _gathered_before(group)
            accumulates = any(parameter.is_accumulated for parameter in parameters)
            for parameter in parameters:
                unused = parameter.fill_gradient()
                if accumulates:
                    parameter.accumulate()
                if unused:
                    yield parameter.sharded

    def forward_without_computing(self) -> None:
        """Gather and free the parameters as a forward does. Collective."""
        module: Any = self.module
        self.state._pre_forward(module, (), {})
        self.state._post_forward(module, (), ())

    def hold(self) -> None:
        """Keep the parameters gathered after forwards, which gather nothing ahead either, until `free`."""
        if not self._post_forward_meshes:
            self._post_forward_meshes = [group.post_forward_mesh_info for group in self._groups]
            self._prefetched = self.state._states_to_forward_prefetch
            self.state._states_to_forward_prefetch = []
            for group in self._groups:
                group.post_forward_mesh_info = None

    def free(self) -> None:
        """Free what `hold` has kept."""
        self.state._states_to_forward_prefetch = self._prefetched
        for group, mesh in zip(self._groups, self._post_forward_meshes, strict=True):
            group.post_forward_mesh_info = mesh
            with group.use_training_state(TrainingState.FORWARD):
                group.reshard()
        self._post_forward_meshes = []

    def backward_without_computing(self) -> None:
        """Gather the parameters, and reduce the gradients there are, as a backward does. Collective."""
        self.state._pre_backward(None)
        self.reduce()

    def reduce(self) -> None:
        """Reduce gradients and free the parameters. Collective."""
        for group in self._groups:
            group.post_backward()

    def watch(self, hooks: UnitHooks, index: int) -> None:
        """Let `hooks` be called ahead of what FSDP2 does, until the unit is gone."""
        for group in self._groups:
            forward, after, backward, reduce = (
                group.pre_forward, group.post_forward, group.pre_backward, group.post_backward
            )  # fmt: skip

            def pre_forward(*args: Any, group: Any = group, forward: Any = forward) -> Any:
                if group._training_state != TrainingState.FORWARD:  # one call a module where a unit has several
                    hooks.before_forward(index)
                inputs = forward(*args)
                hooks.after_gathering(index)
                return inputs

            def post_forward(*args: Any, after: Any = after) -> Any:
                hooks.after_forward(index)
                return after(*args)

            def pre_backward(*args: Any, group: Any = group, backward: Any = backward) -> Any:
                if group._training_state != TrainingState.PRE_BACKWARD:  # one call a tensor that left the unit
                    hooks.before_backward(index)
                return backward(*args)

            def post_backward(*args: Any, group: Any = group, reduce: Any = reduce) -> Any:
                with hooks.before_reduction(index):
                    # FSDP2 asks each parameter for what it is to add up, also one that it has never gathered.
                    return reduce(*args) if group.reduce_grads or _gathered_before(group) else None

            group.pre_forward, group.post_forward = pre_forward, post_forward
            group.pre_backward, group.post_backward = pre_backward, post_backward
        if not self._groups:  # all of its parameters are in other units
            module: Any = self.module
            module.register_forward_pre_hook(lambda *_: hooks.before_forward(index), prepend=True)
            module.register_forward_hook(lambda *_: hooks.after_forward(index))
        final = self.state._root_post_backward_final_callback

        def final_callback() -> None:
            hooks.at_end_of_backward()
            final()

        self.state._root_post_backward_final_callback = final_callback


# No public name: FSDP2 gathers a unit for backward where the gradient of what the unit has returned arrives.
def gather_ahead_of_backward(module: FSDPModule, tensors: Sequence[Tensor]) -> None:
    """Let backward gather the unit of `module` when it comes to one of `tensors`, which the unit has computed."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    state._register_pre_backward_hook(list(tensors))


# No public name: how parameters lie in the flat buffer that FSDP2 hands to a custom all-gather.
def gathered_parameters(module: FSDPModule) -> Iterator[tuple[int, nn.Module, str]]:
    """(elements of a rank's part, padding included, owner, name) of what `module` gathers at once, in its order."""
    for group in _parameter_groups(module):
        for parameter in group.fsdp_params:
            owner = parameter._module_info
            yield parameter._sharded_param_data.numel(), owner.module, owner.param_name


# No public name: that gathering may be asynchronous on the CPU too, where there are no streams.
def gather_asynchronously(root: FSDPModule) -> None:
    """Let every FSDP module in `root` gather by calls that are waited for where the parameters are needed."""
    root._set_unshard_async_op(True)


# No public name: only FSDP2 knows what it does with a reduced gradient right away.
def keeps_reduced_gradients_as_they_are(module: FSDPModule, dtype: torch.dtype) -> bool:
    """Return True if nothing reads or converts what a reduce-scatter of `dtype` gives `module` before backward ends."""
    for group in _parameter_groups(module):
        if group.mesh_info.replicate_mesh_dim is not None or group._all_reduce_hook is not None:
            return False
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            if sharded.grad is not None or parameter.orig_dtype != dtype or parameter.offload_to_cpu:
                return False
            if getattr(sharded, "_post_accumulate_grad_hooks", None):
                return False
    return True


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 on; one group before
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


@contextmanager
def units_made_in(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Let units that FSDP2 makes inside begin, in `mode`, with their empty tensor; parameters stay as they are."""

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        with mode:
            return torch.empty(*args, **kwargs)

    own = ModuleType(torch.__name__)
    own.__dict__.update(torch.__dict__, empty=empty)
    with mock.patch.object(_fsdp_param_group, "torch", own):
        yield


# No public names: FSDP2 gathers and reduces units amid the operators of forward and backward, and tells nobody.
@contextmanager
def unit_work_seen(enter: Callable[[str, Hashable], AbstractContextManager[None]]) -> Iterator[None]:
    """Be in `enter(GATHERING or REDUCTION, of what)` wherever FSDP2 works on a unit inside."""

    def around(phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            unit = args[0][0] if phase == REDUCTION else args[0]  # the first of its parameters, or their group
            with enter(phase, (original.__name__, id(unit))):
                return original(*args, **kwargs)

        return inside

    group = _fsdp_param_group.FSDPParamGroup
    with ExitStack() as stack:
        for owner, name, phase in (
            (group, "unshard", GATHERING),
            (group, "wait_for_unshard", GATHERING),
            (_fsdp_param_group, "foreach_reduce", REDUCTION),
        ):
            stack.enter_context(mock.patch.object(owner, name, around(phase, getattr(owner, name))))
        yield
