"""The changes of `tsm.init` to torch's `FullyShardedDataParallel`: groups by degree, and SMP's further keywords.

Scripts import the class before `init`, so it is changed in place, and given back at the end; the configs of whole state
dicts are changed when `torch.sagemaker` is imported. A call without SMP's degrees reaches torch as it came, but for the
cache of keys and values, which is off. On the CPU, where FSDP refuses to spread weights itself, that is done before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)

from shardwise._torch_compat.fsdp1 import ReductionState, allreduce_hook, hybrid_strategies, set_reduction_hook
from shardwise.errors import ConfigError
from shardwise.job.axes import Axis
from shardwise.smp.session import device_type
from shardwise.smp.v2.logger import note_once
from shardwise.smp.v2.own_modules import UnwrappedModule, refuse_kinds
from shardwise.smp.v2.session import DATA, REPLICA, SHARD, state
from shardwise.smp.v2.share_experts import (
    experts_of_unit,
    refuse_unwrapped_experts,
    shared_stacks,
    wrap_shared_experts,
)
from shardwise.smp.v2.split_model import added_names, join_parts, local_names

_fsdp: Any = FullyShardedDataParallel
_fsdp_init: Any = FullyShardedDataParallel.__init__
_config_init: Any = FullStateDictConfig.__init__
_state_init: Any = FullOptimStateDictConfig.__init__
_wrapping = False  # FSDP wraps children by the same constructor


@contextmanager
def fsdp_by_degrees() -> Iterator[None]:
    """Change FSDP in place, and give it back at the end."""
    _fsdp.__init__ = _init
    try:
        yield
    finally:
        _fsdp.__init__ = _fsdp_init


def take_state_dict_settings() -> None:
    """Change the configs of whole states, for good: scripts make them before `tsm.init` too."""
    configs: Any = FullStateDictConfig, FullOptimStateDictConfig
    for config, constructor in zip(configs, (_init_config, _init_state), strict=True):
        config.__init__ = constructor


@functools.wraps(_config_init)
def _init_config(
    self: Any, offload_to_cpu: bool = False, rank0_only: bool = False, translate_on_save: bool = True
) -> None:
    """With `translate_on_save`: whole tensors under the model's own names, also of a model in tensor parts."""
    # Parameters of the CPU are there already: FSDP would free them with its gathered copy.
    _config_init(self, offload_to_cpu and device_type() != "cpu", rank0_only)
    self.translate_on_save = translate_on_save


@functools.wraps(_state_init)
def _init_state(self: Any, offload_to_cpu: bool = True, rank0_only: bool = False) -> None:
    """On the CPU nothing is moved: torch (2.11, 2.13) would give out a buffer that it fills again with the next."""
    _state_init(self, offload_to_cpu and device_type() != "cpu", rank0_only)


@functools.wraps(_fsdp_init)
def _init(self: Any, *args: Any, post_param_init_fn: Callable[[nn.Module], Any] | None = None, **kwargs: Any) -> None:
    global _wrapping
    given = inspect.signature(_fsdp_init).bind(self, *args, **kwargs).arguments
    given.pop("self")
    given |= given.pop("kwargs", {})
    if _wrapping:
        _wrap_one(self, given)
        return
    _check(given["module"])
    refuse_kinds(given["module"], given)
    unwrapped = UnwrappedModule(given["module"], given)
    copies = _choose_groups(given)
    _initialize(given, post_param_init_fn)
    _wrapping = True
    try:
        _wrap_one(self, given)
    finally:
        _wrapping = False
    refuse_unwrapped_experts(self)
    unwrapped.check(self)
    if copies is not None:
        _average(self, copies)
        if given.get("sync_module_states"):
            _spread(self)
    if local_names(self):
        self.register_state_dict_post_hook(_to_whole)
        self.register_load_state_dict_pre_hook(_to_parts)


def _wrap_one(unit: Any, given: dict[str, Any]) -> None:
    """Make `unit`; experts in it that ranks share get units of their own before."""
    if given.get("auto_wrap_policy") is None:
        module, settings = given["module"], {name: value for name, value in given.items() if name != "module"}
        wrap_shared_experts(module, settings)
    _fsdp_init(unit, **given)


def _check(module: nn.Module) -> None:
    """Refuse degrees that split nothing and parameters that came since, and turn off a cache that recomputation would
    add to a second time."""
    if (state.layout.size(Axis.TENSOR, Axis.CONTEXT) > 1 or state.experts is not None) and not state.transformed:
        raise ConfigError(
            f"tensor_parallel_degree={state.tp_size}, context_parallel_degree={state.cp_size} and "
            f"expert_parallel_degree={state.ep_size} split models that tsm.transform is given, and FSDP gets one "
            "before any was; call tsm.transform(model), or set them to 1"
        )
    if added := added_names(module):
        raise ConfigError(
            f"{added[-1]} is in the model since tsm.transform, which has split it over tensor_parallel_degree="
            f"{state.tp_size} or expert_parallel_degree={state.ep_size}, and would get each rank's part of its "
            "gradient alone; set the degrees to 1 for adapters"
        )
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        note_once("use_cache is off inside of FSDP: recomputed blocks would add to the cache a second time")
        config.use_cache = False  # type: ignore[union-attr]


def _choose_groups(given: dict[str, Any]) -> dist.ProcessGroup | None:
    """FSDP's `process_group` and strategy by SMP's degrees, where the script has not given groups of its own.

    Returns:
        Where nothing is sharded, the ranks over which `_average` has to reduce gradients.
    """
    if given.get("process_group") is not None or given.get("device_mesh") is not None:
        if state.experts is not None:
            raise ConfigError(
                f"FSDP: process_group and device_mesh of the script's own do not know the ranks of "
                f"expert_parallel_degree={state.ep_size}; leave them out"
            )
        return None
    hybrid = given.get("sharding_strategy") in hybrid_strategies
    if state.native:
        state.native_hybrid = hybrid
    if state.native and not hybrid:
        return None
    layout = state.layout
    if local_names(given["module"]):
        given["use_orig_params"] = True  # a norm counts each parameter by how it is split
    if layout.size(*SHARD) == 1:
        given |= {"sharding_strategy": ShardingStrategy.NO_SHARD, "process_group": layout.group(*SHARD)}
        return layout.group(*DATA)
    if not hybrid:
        given["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    given["process_group"] = (layout.group(*SHARD), layout.group(*REPLICA))
    return None


def _average(model: Any, group: dist.ProcessGroup) -> None:
    """Reduce gradients of whole copies over `group`, and of shared experts over the ranks that hold the same ones.

    FSDP would reduce them over its `process_group`. That is the shard's, this rank alone, because scripts save by it:
    only the first replica does, so a group with others in it would wait for ever.
    """
    how = ReductionState(group)
    modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    for module in modules:
        experts = experts_of_unit(module)
        own = how if experts is None else ReductionState(experts.holders())
        set_reduction_hook(module, allreduce_hook, own)


def _initialize(given: dict[str, Any], after: Callable[[nn.Module], Any] | None) -> None:
    """Lead to `after` what the script gives to be called once parameters have values, before they are sharded."""
    module, create = given["module"], given.get("param_init_fn")
    if state.device.type == "cpu":
        given["device_id"] = state.device
        _materialize(module, create)
        given.pop("param_init_fn", None)
        if after is not None:
            after(module)  # before tied weights are spread, which are one on rank 0
        if given.pop("sync_module_states", False):
            _spread(module)
    elif after is not None and create is not None and any(p.is_meta for p in module.parameters()):

        def both(part: nn.Module) -> None:
            create(part)
            after(part)

        given["param_init_fn"] = both
    elif after is not None:
        after(module)


@torch.no_grad()
def _materialize(module: nn.Module, create: Callable[[nn.Module], Any] | None) -> None:
    """Give values to what is on the meta device, as FSDP does itself elsewhere."""
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(value.is_meta for value in own):
            continue
        if create is not None:
            create(part)
        else:
            part.to_empty(device="cpu", recurse=False)
            reset: Any = part.reset_parameters
            reset()


@torch.no_grad()
def _spread(module: nn.Module) -> None:
    """The weights of the first rank of each line of data ranks, for all of it."""
    everyone = state.layout.group(*DATA)
    of_experts = {
        id(parameter): ranks.holders()
        for name, ranks in shared_stacks(module).items()
        for parameter in module.get_submodule(name).parameters()
    }
    for value in dict.fromkeys([*module.parameters(), *module.buffers()]):
        group = of_experts.get(id(value), everyone)
        dist.broadcast(value.data, dist.get_process_group_ranks(group)[0], group=group)


# ---- whole state dicts of a model in parts


def _is_whole(model: Any) -> bool:
    settings = FullyShardedDataParallel.get_state_dict_type(model)
    return settings.state_dict_type == StateDictType.FULL_STATE_DICT and getattr(
        settings.state_dict_config, "translate_on_save", True
    )


def _to_whole(model: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    if _is_whole(model):
        join_parts(model, state_dict, prefix, state.groups_of_parts(), state.device)


def _to_parts(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, cut in local_names(model).items():
        whole = state_dict.get(prefix + name)
        if whole is not None and tuple(whole.shape) == cut.shape:
            state_dict[prefix + name] = cut.local_part(whole)
