"""A model that the caller has built: taken apart into structure and values, and its values put in their new places.

`parallelize` needs a model on the meta device. What a module's parameters hold is kept beside it until then, and rank
0's values count: ranks that have drawn their own weights train one model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat.autograd import share_gradient_hooks
from shardwise.errors import ModelError
from shardwise.job.objects import user_code
from shardwise.job.schema import Job
from shardwise.model.build import parameters_on_meta, prepare_for_training
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.traced_cut import cut_by_trace
from shardwise.parallel.model import ParallelModel
from shardwise.training.init import draw_adapters, initialize

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass
class GivenModel:
    """A caller's model on the meta device, and the values of its parameters.

    Attributes:
        module: parameters on the meta device; changed in place when it is distributed.
        weights: parameter name -> value; on the meta device where it has none and is to be drawn.
        example: keyword arguments of one forward, for a module that does not take `input_ids`.
    """

    module: nn.Module
    weights: dict[str, Tensor]
    example: Mapping[str, Tensor] | None = None

    @classmethod
    def of(cls, source: ModelSource, example: Mapping[str, Tensor] | None = None) -> GivenModel:
        """Take a module, or call a function that makes one with its parameters on the meta device.

        Raises:
            ModelError: the source is neither, or the function returns something else.
            UserCodeError: the function raises.
        """
        module = source
        if not isinstance(module, nn.Module):
            with parameters_on_meta(), user_code(f"model={model_reference(source)}"):
                module = source()
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"model={model_reference(source)} returned a {type(module).__name__}; a torch.nn.Module is needed"
            )
        weights = detach_weights(module)
        return cls(prepare_for_training(module), weights, example)

    def study(self, job: Job) -> ModelFacts:
        """Return the structure of the model, cut into stages where the job asks for a pipeline."""
        facts = discover(self.module, job, self.example)
        if job.parallel.pipeline_parallel_degree > 1:
            facts = cut_by_trace(self.module, facts, job.data.sequence_length, self.example)
        return facts


def model_reference(source: ModelSource) -> str:
    """Return `module:name` of a model's class, or of the function that makes it.

    Raises:
        ModelError: the source is neither.
    """
    if not callable(source):  # modules are
        raise ModelError(f"model={source!r}: must be a torch.nn.Module, or a function that makes one")
    definition = type(source) if isinstance(source, nn.Module) else source
    return f"{definition.__module__}:{getattr(definition, '__qualname__', type(definition).__qualname__)}"


def detach_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the values of all parameters by name, out of the module, whose parameters then take no memory."""
    weights: dict[str, Tensor] = {}
    blanks: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in blanks:
            blank = torch.empty_like(parameter.detach(), device="meta")
            blanks[id(parameter)] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
            share_gradient_hooks(parameter, blanks[id(parameter)])
            weights[name] = parameter.detach()
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, blanks[id(parameter)])
    return weights


def place_weights(model: ParallelModel, weights: Mapping[str, Tensor], seed: int) -> None:
    """Put rank 0's values into the slices that are here; what has no value is drawn from `seed`. Collective."""
    if any(value.is_meta for value in weights.values()):
        initialize(model, seed)
    _place(model, weights)
    if model.facts.adapters:
        draw_adapters(model, seed)


def _place(model: ParallelModel, weights: Mapping[str, Tensor]) -> None:
    """Put rank 0's values into the slices that are here. Collective."""
    dtypes = {entry.name: entry.parameter.dtype for entry in model.tensor_map}
    for name, value in weights.items():
        if value.is_meta:
            continue
        whole = value.to(model.device)
        whole = whole.clone() if whole is value else whole
        if dist.get_world_size() > 1:
            dist.broadcast(whole, 0)
        if name in model.tensor_map.names:
            model.tensor_map[name].store(whole.to(dtypes[model.tensor_map.names[name]]))
    if model.pipeline is None and dist.get_world_size() > 1:
        for buffer in model.module.buffers():
            dist.broadcast(buffer, 0)
