"""The only place that imports private torch modules; each import says which public name it waits for."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

# No public name: torch documents FakeTensorMode only under its private module (torch 2.11 to 2.13).
from torch._subclasses.fake_tensor import FakeTensorMode

# No public names: what FSDP's local and sharded state dicts are made of and by (torch 2.11 to 2.13).
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

# No public name: scripts of SMP import the wrappers from here themselves (torch 2.11 to 2.13).
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.fsdp import _state_dict_utils as fsdp_state_dicts
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor as create_chunk_sharded_tensor

# No public names: how FSDP reduces gradients of parameters that are not sharded (torch 2.11 to 2.13).
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState as ReductionState  # isort: skip
from torch.distributed.algorithms._comm_hooks.default_hooks import allreduce_hook  # isort: skip

# No public name: where torch's file system storage says that a chunk lies (torch 2.11 to 2.13).
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # isort: skip

# No public name: puts a value of a checkpoint into its place in nested dicts (torch 2.11 to 2.13).
from torch.distributed.checkpoint._nested_dict import set_element as set_state_element
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard

# No public name: what a unit of FSDP2 is doing (torch 2.11 to 2.13).
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.distributed.tensor import debug

# No public name: DTensor keeps how it moved tensors between placements, with the meshes (torch 2.11 to 2.13).
from torch.distributed.tensor import _redistribute as redistribution  # isort: skip

# No public name: torch documents TorchDispatchMode only under its private module (torch 2.11 to 2.13).
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Waits for torch.utils.pytree, which does not exist in torch 2.13.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

# Public names, but torch 2.13 warns of the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# FSDP's strategies of shard groups and replicas; the second has a private name in torch 2.11 to 2.13.
hybrid_strategies = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

# No public name: the product of a linear layer by oneDNN (torch 2.11 to 2.13); builds of torch without it have none.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


# Operations of a group that torch.distributed need not know. Public names exist for groups that it has made alone.
def clear_placement_cache() -> None:
    """Forget the meshes that DTensor keeps: an equal one would find the dead groups of an earlier process group.

    They also keep those groups alive, each with a thread of Gloo's that wakes up a hundred times a second.
    """
    # No public name, and it may be absent from torch 2.11.
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    redistribution.clear_redistribute_planner_cache()
    redistribution._gen_transform_infos.cache_clear()


# A group of ours may fall back on another one of torch's; options are passed on as torch gives them.
def all_gather_base(group: dist.ProcessGroup, output: Tensor, part: Tensor, *options: Any) -> Any:
    """Start a group's own all-gather into one tensor; return its work."""
    return group._allgather_base(output, part, *options)


def reduce_scatter_base(group: dist.ProcessGroup, output: Tensor, whole: Tensor, *options: Any) -> Any:
    """Start a group's own reduce-scatter of one tensor; return its work."""
    return group._reduce_scatter_base(output, whole, *options)


def nccl_options(timeout: timedelta) -> Any:
    """Return NCCL's options with a timeout of each operation."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def all_gather_whole(group: dist.ProcessGroup, output: Tensor, piece: Tensor) -> None:
    """`piece` [c] of every rank to `output` [n * c]; returns when it is there (CUDA: for the current stream)."""
    group._allgather_base(output, piece).wait()


def all_gather_coalesced(group: dist.ProcessGroup, outputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Several `all_gather_whole` as one call."""
    group.allgather_into_tensor_coalesced(list(outputs), list(pieces)).wait()


def reduce_scatter_whole(group: dist.ProcessGroup, output: Tensor, whole: Tensor, reduction: Any) -> None:
    """The rank's piece of the reduced `whole` [n * c] to `output` [c]."""
    group._reduce_scatter_base(output, whole, _reduce_scatter_options(reduction)).wait()


def reduce_scatter_coalesced(
    group: dist.ProcessGroup, outputs: Sequence[Tensor], wholes: Sequence[Tensor], reduction: Any
) -> None:
    """Several `reduce_scatter_whole` as one call."""
    group.reduce_scatter_tensor_coalesced(list(outputs), list(wholes), _reduce_scatter_options(reduction)).wait()


def all_to_all(group: dist.ProcessGroup, output: Tensor, whole: Tensor) -> None:
    """Equal pieces of `whole`, one for each rank, to `output`, one from each rank."""
    group.alltoall_base(output, whole, [], []).wait()


def _reduce_scatter_options(reduction: Any) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = reduction
    return options


def group_of(backends: Mapping[str, Any], store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A process group over backends by device type, which torch.distributed does not know of."""
    group = dist.ProcessGroup(store, rank, size)
    add_backends(group, backends)
    return group


def backends_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """The group's backends by device type."""
    return {device.type: group._get_backend(device) for device in group._device_types}


def add_backends(group: dist.ProcessGroup, backends: Mapping[str, Any]) -> None:
    """Add backends to `group`, by device type, for what it does not do itself."""
    kinds = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
    for device, backend in backends.items():
        kind = kinds.get(backend.name(), dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device(device), kind, backend)
        group._set_default_backend(kind)


_ATEN = torch.ops.aten

# Matrix products and fused attention, by the operators that autograd sees; some have private names alone.
PRODUCT_OPERATORS = tuple(
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN._scaled_mm,
        _ATEN._grouped_mm,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
    )
)


def multiplies(dtype: torch.dtype) -> bool:
    """Return True if this processor has instructions for matrix products of 16 bits, as torch's CPU kernels ask.

    True too where a build of torch cannot say.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    ask = getattr(torch.ops.mkldnn, name, None) if name else None
    return ask is None or bool(ask())


def version_of(tensor: Tensor) -> int:
    """Return how often autograd has seen the tensor's storage written."""
    return tensor._version


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indices, values) of a sparse tensor; the public ways want it coalesced, which copies."""
    return tensor._indices(), tensor._values()


def gradient_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], Tensor | None]]:
    """Hooks of `Tensor.register_hook`, by number."""
    return dict(parameter._backward_hooks or {})


def accumulate_grad_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """Hooks of `Tensor.register_post_accumulate_grad_hook`, by number."""
    return dict(parameter._post_accumulate_grad_hooks or {})  # type: ignore[attr-defined]


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Let `target` have the hooks that `source` has now or is given later."""
    if not source.requires_grad:
        return
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(source, name) is None:
            setattr(source, name, OrderedDict())
        setattr(target, name, getattr(source, name))


def clear_module_hooks(module: nn.Module) -> None:
    """Take off the hooks that a call of `module` calls."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks):
        hooks.clear()


def copy_module(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module that has tables of its own parameters and buffers."""
    copied = copy.copy(module)
    copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
    return copied


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return True if a module's own buffer belongs to its state dict."""
    return buffer not in module._non_persistent_buffers_set


def load_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the hooks that run when a state dict was loaded, by key; removing one here removes it from the module."""
    return module._load_state_dict_post_hooks


def set_reduction_hook(module: Any, hook: Callable[..., Any], state: Any) -> None:
    """Let FSDP reduce the gradients of `module` by `hook(state, gradient)`, for a module that has one already too."""
    module._comm_hook, module._comm_hook_state = hook, state


def wrap_local_load_hook(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrapper` around what FSDP does before it loads a local state dict; once."""
    hook = fsdp_state_dicts._local_pre_load_state_dict_hook
    if not hasattr(hook, "__wrapped__"):
        fsdp_state_dicts._local_pre_load_state_dict_hook = wrapper(hook)


def uses_original_parameters(fsdp_state: Any) -> bool:
    """Return True if FSDP shows the parameters of the module and not its flat ones."""
    return bool(fsdp_state._use_orig_params)


read_scalar = _ATEN._local_scalar_dense.default  # no public name: what `Tensor.item` dispatches to


def fake_store() -> dist.Store:
    """The store of the backend "fake", whose collectives do nothing: one process plays a rank of any world."""
    # No public name: the backend registers itself when torch's own testing module is imported (torch 2.11 to 2.13).
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def default_store() -> dist.Store:
    """The store in which the ranks of the job have met; waits for a public way to ask for it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return True if `group` was not destroyed."""
    # No public name: torch keeps its groups in a private map (torch 2.11 to 2.13).
    return group in dist.distributed_c10d._world.pg_map


def has_flash_attention(query: Tensor) -> bool:
    """Return True if the fused kernel that also gives the log-sum-exp runs on these tensors [B, h, S, d]."""
    return query.device.type == "cpu"


# No public name: scaled_dot_product_attention keeps the log-sum-exp to itself (torch 2.11 to 2.13).
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(output [B, h, Q, d], log-sum-exp [B, h, Q]) of torch's fused attention on a CPU; `mask` is added to scores."""
    output, logs = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, logs


def flash_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    gradient: Tensor,
    output: Tensor,
    logs: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for a given output, its gradient and log-sum-exp."""
    grads: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logs, 0.0, causal, attn_mask=mask, scale=scale
    )
    return grads


class UnpairedDualPipeV(ScheduleDualPipeV):
    """DualPipeV whose paired forward and backward are two actions, so that what the first made leaves before the second
    runs. Torch sends after the pair, which holds up the next rank where the two do not run at once: 2(p - 1) units of
    idle time instead of p - 1, measured and counted."""

    # No public name: a schedule's order can be changed by this method alone (torch 2.11 to 2.13).
    def _calculate_single_rank_operations(self, rank: int) -> Any:
        paired = super()._calculate_single_rank_operations(rank)
        return [each for action in paired if action is not None for each in action.sub_actions or (action,)]


# No public name: FSDP2 reduces gradients in a hook of autograd alone; torch's own pipeline stage reaches in like this.
def reduce_left_gradients(modules: Sequence[FSDPModule]) -> None:
    """Run FSDP2's reduction of the gradients that stand in gathered parameters; the root is the first of `modules`."""
    for module in modules[::-1]:
        for group in _fsdp_groups(module):
            group.post_backward()
    if modules:
        fully_shard.state(modules[0])._root_post_backward_final_callback()  # type: ignore[attr-defined]


def fuses_on_gpu(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return True if the class's fused form runs on a GPU: torch 2.11 refuses Adagrad's there, at the first step."""
    return "cuda_unsupported=True" not in inspect.getsource(optimizer_class)


# No public name: FSDP2 keeps to itself what backwards leave that it is told not to reduce after.
def take_left_gradients(modules: Sequence[FSDPModule]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(sharded parameter, whole gradient) of all that backwards without reduction have left; afterwards it is gone."""
    for module in modules:
        for group in _fsdp_groups(module):
            for each in group.fsdp_params:
                if not hasattr(each, "_unsharded_param"):  # it was never gathered
                    continue
                gradient = each.unsharded_accumulated_grad
                gradient = each._unsharded_param.grad if gradient is None else gradient
                if gradient is not None:
                    each.unsharded_accumulated_grad = each._unsharded_param.grad = None
                    yield each.sharded_param, gradient


def _fsdp_groups(module: FSDPModule) -> list[Any]:
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 on; one group before
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


class UnitHooks(Protocol):
    """Calls ahead of what FSDP2 does with a unit; `index` is the unit's place among those that are watched."""

    def before_forward(self, index: int) -> None: ...

    def after_gathering(self, index: int) -> None: ...

    def after_forward(self, index: int) -> None: ...

    def before_backward(self, index: int) -> None: ...

    def before_reduction(self, index: int) -> None: ...

    def at_end_of_backward(self) -> None: ...


# No public names: FSDP2 tells nobody when it gathers and reduces a unit, nor can a rank do so without computing. Its
# own switch for unused parameters (torch 2.13 on) leaves out whole units, and does not say which were unused.
class ShardedUnit:
    """A unit of FSDP2: its parameters, and its part in a forward and a backward that do not compute."""

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self.state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        self._groups = _fsdp_groups(module)
        self._held: list[Any] = []
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
            parameters = [p for p in group.fsdp_params if getattr(p, "_unsharded_param", None) is not None]
            accumulates = any(p.unsharded_accumulated_grad is not None for p in parameters)
            for parameter in parameters:
                if parameter.unsharded_accumulated_grad is not None or not parameter._unsharded_param.requires_grad:
                    continue
                unused = parameter._unsharded_param.grad is None
                if unused:
                    parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
                if accumulates:
                    parameter.to_accumulated_grad_if_needed()
                if unused:
                    yield parameter.sharded_param

    def forward_without_computing(self) -> None:
        """Gather and free the parameters as a forward does. Collective."""
        module: Any = self.module
        self.state._pre_forward(module, (), {})
        self.state._post_forward(module, (), ())

    def hold(self) -> None:
        """Keep the parameters gathered after forwards, which gather nothing ahead either, until `free`."""
        if not self._held:
            self._held = [group.post_forward_mesh_info for group in self._groups]
            self._prefetched = self.state._states_to_forward_prefetch
            self.state._states_to_forward_prefetch = []
            for group in self._groups:
                group.post_forward_mesh_info = None

    def free(self) -> None:
        """Free what `hold` has kept."""
        self.state._states_to_forward_prefetch = self._prefetched
        for group, mesh in zip(self._groups, self._held, strict=True):
            group.post_forward_mesh_info = mesh
            with group.use_training_state(TrainingState.FORWARD):
                group.reshard()
        self._held = []

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

            def post_backward(*args: Any, reduce: Any = reduce) -> Any:
                hooks.before_reduction(index)
                return reduce(*args)

            group.pre_forward, group.post_forward = pre_forward, post_forward
            group.pre_backward, group.post_backward = pre_backward, post_backward
        final = self.state._root_post_backward_final_callback

        def final_callback() -> None:
            hooks.at_end_of_backward()
            final()

        self.state._root_post_backward_final_callback = final_callback


# No public name: how parameters lie in the flat buffer that FSDP2 hands to a custom all-gather.
def gathered_parameters(module: FSDPModule) -> Iterator[tuple[int, nn.Module, str]]:
    """(elements of a rank's part, padding included, owner, name) of what `module` gathers at once, in its order."""
    for group in _fsdp_groups(module):
        for each in group.fsdp_params:
            yield each._sharded_param_data.numel(), each._module_info.module, each._module_info.param_name


# No public name: that gathering may be asynchronous on the CPU too, where there are no streams.
def gather_asynchronously(root: FSDPModule) -> None:
    """Let every FSDP module in `root` gather by calls that are waited for where the parameters are needed."""
    root._set_unshard_async_op(True)


# No public name: only FSDP2 knows what it does with a reduced gradient right away.
def keeps_reduced_gradients_as_they_are(module: FSDPModule, dtype: torch.dtype) -> bool:
    """Return True if nothing reads or converts what a reduce-scatter of `dtype` gives `module` before backward ends."""
    for group in _fsdp_groups(module):
        if group.mesh_info.replicate_mesh_dim is not None or group._all_reduce_hook is not None:
            return False
        for each in group.fsdp_params:
            sharded = each.sharded_param
            if sharded.grad is not None or each.orig_dtype != dtype or each.offload_to_cpu:
                return False
            if getattr(sharded, "_post_accumulate_grad_hooks", None):
                return False
    return True


# No public name: FSDP2 and DDP end their own backward like this.
def at_end_of_backward(callback: Callable[[], object]) -> None:
    """Call `callback` when the backward that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[arg-type]


# No public name: checkpoints of torch tell recomputations apart by it.
def number_of_backward() -> int:
    """The number of the backward that is running; no two have the same."""
    return torch._C._current_graph_task_id()


# No public names: torch's stage makes a buffer for every microbatch of a step before the first (torch 2.11 to 2.13, a
# TODO there), which for hundreds of them is more memory than anything else on the rank.
class LazyStage(PipelineStage):
    """Torch's stage, with memory for a hidden state or gradient from when it is on its way to when it has been read."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return what opens the connections, except those to itself: in a V both stages of a pair lie on one rank."""
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._described(self.args_recv_info):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._described(self.grad_recv_info):
            return super()._prepare_backward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        for info in _received(self.args_recv_info[fwd_chunk_id]):
            info.buffer = self._room(info.buffer, self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        for info in _received(self.grad_recv_info[bwd_chunk_id]):
            info.buffer = self._room(info.buffer)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _let_go(self.args_recv_info[fwd_chunk_id])  # the stage has it until its backward
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _let_go(self.grad_recv_info[bwd_chunk_id])

    def _room(self, like: Tensor, requires_grad: bool = False) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self.device, requires_grad=requires_grad)

    @contextmanager
    def _described(self, infos: Mapping[int, Sequence[Any]]) -> Iterator[None]:
        """Let what torch makes meanwhile for `infos` have a shape and no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device
            for each in infos.values():
                _let_go(each)


def _received(infos: Sequence[Any]) -> list[Any]:
    """Without what comes from the schedule itself."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _let_go(infos: Sequence[Any]) -> None:
    for info in _received(infos):
        info.buffer = torch.empty((), dtype=info.buffer.dtype, device="meta").expand(info.buffer.shape)


__all__ = [
    "PRODUCT_OPERATORS",
    "CheckpointWrapper",
    "FakeTensorMode",
    "LazyStage",
    "OffloadWrapper",
    "ReductionState",
    "Shard",
    "ShardedTensor",
    "ShardedUnit",
    "StorageInfo",
    "TorchDispatchMode",
    "UnitHooks",
    "UnpairedDualPipeV",
    "add_backends",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_single",
    "all_gather_whole",
    "all_to_all",
    "allreduce_hook",
    "at_end_of_backward",
    "backends_of",
    "clean_tensor_name",
    "clear_placement_cache",
    "copy_module",
    "create_chunk_sharded_tensor",
    "fake_store",
    "flash_attention",
    "flash_attention_backward",
    "fsdp_state_dicts",
    "fuses_on_gpu",
    "gather_asynchronously",
    "gathered_parameters",
    "group_of",
    "has_flash_attention",
    "hybrid_strategies",
    "is_alive",
    "is_persistent",
    "is_traceable_wrapper_subclass",
    "keeps_reduced_gradients_as_they_are",
    "load_hooks",
    "multiplies",
    "nccl_options",
    "read_scalar",
    "reduce_left_gradients",
    "reduce_scatter_base",
    "reduce_scatter_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_whole",
    "set_reduction_hook",
    "set_state_element",
    "sparse_parts",
    "take_left_gradients",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "unflatten_state_dict",
    "uses_original_parameters",
    "version_of",
    "wrap_local_load_hook",
]


def follow_schedulers(optimizer: Any) -> None:
    """Let a step of `optimizer` be its new class's where a learning-rate scheduler was made before that.

    torch's schedulers put a function on the object that calls the step of the class it then had, past this one. One
    takes its place that tells them the same. No public names: their marks (torch 2.11 to 2.13).
    """
    if not hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        return
    del optimizer.step
    own = type(optimizer).step

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return own(optimizer, *args, **kwargs)

    told: Any = step
    told._wrapped_by_lr_sched = True
    optimizer.step = step


def write_count(tensor: Tensor) -> int:
    """Return how often a tensor has been written in place; its counter has no public name (torch 2.11 to 2.13)."""
    return tensor._version
