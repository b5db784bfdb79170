"""A model that the caller has built: taken apart into structure and values, and its values put in their new places.

`parallelize` needs a model on the meta device. What a module's parameters hold is kept beside it until then, and rank
0's values count: ranks that have drawn their own weights train one model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.data.file_samples import gives_samples
from shardwise.data.prepare import prepare
from shardwise.errors import ModelError
from shardwise.job.objects import user_code
from shardwise.job.schema import Job
from shardwise.model.build import prepare_for_training
from shardwise.model.construct import ConstructedModule, NotAModule, check_tensors, construct, detach_weights
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.traced_cut import cut_by_trace
from shardwise.parallel.model import ParallelModel
from shardwise.training.init import draw_adapters, initialize, seeded
from shardwise.training.row_trial import with_row_coupling

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass
class GivenModel:
    """A model on the meta device, and the values of its parameters and buffers.

    Attributes:
        module: parameters on the meta device; changed in place when it is distributed.
        weights: parameter name -> value; on the meta device where it has none and is to be drawn.
        buffers: buffer name -> value; on the meta device where it follows from parameters.
        example: keyword arguments of one forward, for a module that does not take `input_ids`.
        build: makes all values for real, where they cannot be told otherwise.
    """

    module: nn.Module
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    example: Mapping[str, Tensor] | None = None
    build: Callable[[], dict[str, Tensor]] | None = None

    @classmethod
    def of(cls, source: ModelSource, seed: int, example: Mapping[str, Tensor] | None = None) -> GivenModel:
        """Take a module, or call a function that makes one with its parameters on the meta device, drawing from `seed`.

        Raises:
            ModelError: the source is neither, or the function returns something else.
            UserCodeError: the function raises.
        """
        where = f"model={model_reference(source)}"
        if isinstance(source, nn.Module):
            if any(isinstance(module, FSDPModule) for module in source.modules()):
                raise ModelError(f"{where} is sharded already, by another session; make the module anew for each")
            weights = detach_weights(source)
            return cls(prepare_for_training(source), weights, dict(source.named_buffers()), example)
        try:
            with user_code(where):
                constructed = construct(source, seed)
        except NotAModule as error:
            raise ModelError(f"{where} {error}") from error
        check_tensors(constructed.module, where)
        return cls.of_constructed(constructed, example)

    @classmethod
    def of_constructed(cls, constructed: ConstructedModule, example: Mapping[str, Tensor] | None = None) -> GivenModel:
        """Take a module that a function has made on the meta device."""
        module = constructed.module
        weights = {name: constructed.values.get(name, parameter) for name, parameter in module.named_parameters()}
        build = constructed.build if constructed.needs_values else None
        return cls(prepare_for_training(module), weights, dict(module.named_buffers()), example, build)

    def study(self, job: Job) -> ModelFacts:
        """Return the structure of the model, cut into stages where the job asks for a pipeline."""
        facts = discover(self.module, job, self.example)
        data = prepare(job) if gives_samples(job) else None
        if data is not None or self.example is not None or facts.takes_token_ids:
            facts = with_row_coupling(job, self.module, facts, data, self._values, self.example)
        if job.parallel.pipeline_parallel_degree > 1:
            facts = cut_by_trace(self.module, facts, job.data.sequence_length, self.example)
        return facts

    def _values(self) -> dict[str, Tensor]:
        built = {} if self.build is None else self.build()
        return {name: value for name, value in {**self.weights, **built}.items() if not value.is_meta}


def model_reference(source: ModelSource) -> str:
    """Return `module:name` of a model's class, or of the function that makes it.

    Raises:
        ModelError: the source is neither.
    """
    if not callable(source):  # modules are
        raise ModelError(f"model={source!r}: must be a torch.nn.Module, or a function that makes one")
    definition = type(source) if isinstance(source, nn.Module) else source
    return f"{definition.__module__}:{getattr(definition, '__qualname__', type(definition).__qualname__)}"


def place_weights(
    model: ParallelModel,
    weights: Mapping[str, Tensor],
    seed: int,
    buffers: Mapping[str, Tensor] | None = None,
    filled_later: Collection[str] = (),
) -> None:
    """Put rank 0's values into the slices that are here; what has no value is drawn from `seed`. Collective.

    Args:
        model: parallelized, without values.
        weights: by name of the parameter, on the meta device where there is no value; the same names on all ranks.
        seed: of the job.
        buffers: the same for buffers.
        filled_later: names of parameters and buffers that the caller fills afterwards.

    Raises:
        ModelError: a parameter or buffer has no values.
    """
    buffers = buffers or {}
    with_values = {name: value for name, value in {**weights, **buffers}.items() if not value.is_meta}
    if any(value.is_meta for value in weights.values()):
        initialize(model, seed, {*with_values, *filled_later})
    for name, value in with_values.items():
        whole = _of_rank_0(value, model.device)
        if name in buffers:
            _store_buffer(model, name, whole)
        elif name in model.tensor_map.names:
            entry = model.tensor_map[name]
            entry.store(whole.to(entry.parameter.dtype))
    left = next((name for name in buffers if name not in with_values and name not in filled_later), None)
    if left is not None:
        raise ModelError(f"buffer {left!r} has no values: its module makes it on the meta device; give it some there")
    if model.facts.adapters:
        draw_adapters(model, seed)


def _store_buffer(model: ParallelModel, name: str, whole: Tensor) -> None:
    for part in model.parts:
        buffer = dict(part.module.named_buffers()).get(name)
        if buffer is not None:
            buffer.copy_(whole)


def _of_rank_0(value: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's value, in memory of its own. Collective."""
    whole = value.detach().clone(memory_format=torch.contiguous_format).to(device)
    if dist.get_world_size() > 1:
        dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # backends do not know every dtype
    return whole


def take_constructed_values(given: GivenModel, seed: int) -> None:
    """Let a model have the values with which rank 0 builds it, where its constructor has to run for them. Collective.

    Raises:
        ModelError: on all ranks, where the constructor raises or makes tensors of other names or shapes.
    """
    if given.build is None:
        return
    tensors = given.weights | given.buffers
    values: dict[str, Tensor] = {}
    answer: list[list[str] | str] = [""]
    if dist.get_rank() == 0:
        try:
            with seeded(seed, "constructor", torch.device("cpu")):
                values = _built_alike(given.build(), tensors)
            answer = [list(values)]
        except Exception as error:  # the user's code, which runs on this rank alone
            answer = [f"the model was built a second time, for its values: {type(error).__name__}: {error}"]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], str):
        raise ModelError(answer[0])
    for name in answer[0]:
        tensor = tensors[name]
        value = values.get(name, torch.empty((), dtype=tensor.dtype).expand(tensor.shape))  # rank 0's comes there
        (given.buffers if name in given.buffers else given.weights)[name] = value


def _built_alike(built: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of a second build, which has to have the tensors of the first."""
    for name, tensor in tensors.items():
        if name not in built or built[name].shape != tensor.shape:
            raise ModelError(f"{name!r} has another shape this time; let the factory return the same module each time")
    more = next((name for name in built if name not in tensors), None)
    if more is not None:
        raise ModelError(f"{more!r} was not there the first time; let the factory return the same module each time")
    return {name: built[name].to(tensor.dtype) for name, tensor in tensors.items() if not built[name].is_meta}
