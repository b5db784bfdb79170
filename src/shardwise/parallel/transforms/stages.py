"""A pipeline stage, cut from the unmodified model.

The model's own forward runs on every stage, on the whole microbatch's ids, so masks, positions and rotary tables are
the model's own. Blocks of other stages are passages: the ones before hand in what arrived, the first one after keeps
what leaves and ends the forward. Embeddings and head stand where they are used; elsewhere stand-ins give tensors of the
right shape, which nobody reads. What travels is what a block hands to the next, of what is made from weights: hidden
states [B, S, H], and their gradients. Of an encoder-decoder it is more: a bias of positions that the first block of a
stack made for all of it, and the encoder's states, which go on to every stage of the decoder, where the encoder itself
is a passage. Then one flat tensor travels, so that torch's stages see a chain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from shardwise.errors import ModelError
from shardwise.job.axes import Axis
from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts, StandIn
from shardwise.model.probe import Shapes, shapes_handed_on
from shardwise.plan.plan import Plan

ENCODED = -1  # the encoder's states, among the numbers of a block's outputs


class Left(BaseException):
    """Leaves the forward of a stage behind its last block: what follows belongs to other stages.

    No Exception: a model's own `except Exception` is for its errors.
    """


@dataclass
class Passage:
    """Where values enter and leave one stage; blocks of other stages lead here.

    Attributes:
        stage: number of the stage, of `stages`.
        absent: modules of which the stage holds nothing.
        arrived: [B, S, H] from the stage before, for the forward that runs now; flat where `shapes` are known.
        leaving: what a traced stage leaves for the one behind.
        prepare: told the inputs of the next forward, where they say how large is what travels: sets `shapes`.
        shapes: of what arrives and of what leaves, where these are not hidden states [B, S, H].
        entering, going: which outputs of the block before arrive, and which of the stage's last leave.
        parts: of what arrives, the shapes in the flat tensor.
        dtype: of the flat tensors.
        values: outputs of blocks of this stage that leave, of the forward that runs now.
        changed: buffers into which the forward writes, and the stage that does.
    """

    stage: int
    stages: int
    absent: frozenset[str] = frozenset()
    arrived: Tensor | None = None
    leaving: Tensor | None = None
    prepare: Callable[[Mapping[str, Any]], None] | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    entering: tuple[int, ...] = (0,)
    going: tuple[int, ...] = (0,)
    parts: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float32
    values: dict[int, Any] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def entered(self) -> dict[int, Any]:
        """What arrived, by the number of the output that it was."""
        if not self.parts or self.arrived is None:
            return {0: self.arrived}
        ends = [0]
        for shape in self.parts:
            ends.append(ends[-1] + torch.Size(shape).numel())
        runs = zip(self.entering, self.parts, pairwise(ends), strict=True)
        return {number: self.arrived[start:end].view(shape) for number, shape, (start, end) in runs}

    def take(self) -> Tensor:
        """What leaves; it is given out once."""
        leaving = self.leaving
        if leaving is None and self.shapes is None:
            leaving = self.values[0]
        elif leaving is None:
            leaving = torch.cat([self.values[number].reshape(-1) for number in self.going]).to(self.dtype)
        self.arrived, self.leaving, self.values = None, None, {}
        return leaving.contiguous()


def cut_stage(
    model: nn.Module, facts: ModelFacts, plan: Plan, stage: int, device: torch.device, sizes: Sizes | None = None
) -> Passage:
    """Leave of `model` (on the meta device) what belongs to `stage`.

    A parameter that is tied across stages stays under all its names on each that uses it.

    Args:
        device: where the stage computes.
        sizes: of what travels, where that is more than hidden states.
    """
    dtype = torch_dtype(plan.dtypes.compute)
    passage = Passage(stage, len(plan.stages), dtype=dtype)
    own = plan.stages[stage]
    names = [block.name for block in facts.blocks]
    first, end = names.index(own[0]), names.index(own[-1]) + 1
    before, after = names[:first], names[end:]
    for name in before:
        _empty(model.get_submodule(name), _entering(passage, facts))
    for name in after:
        _empty(model.get_submodule(name), _leaving(passage, facts))
    if after:
        model.forward = _ending(model.forward, passage)

    elsewhere: dict[str, Callable[..., Tensor]] = {}
    for name, numbers in facts.stages.runs.items():
        if not any(first <= number < end for number in numbers):
            stand_in = facts.stages.stand_ins.get(name)
            elsewhere[name] = _identity if stand_in is None else _standing_in(stand_in, dtype, device)
    here = [name for name in (*own, *facts.stages.runs) if name not in elsewhere]
    kept = {id(parameter) for name in here for parameter in model.get_submodule(name).parameters(recurse=name in own)}
    absent = {*before, *after}
    for name, forward in elsewhere.items():
        if not _leave_out(model.get_submodule(name), forward, kept):
            absent.add(name)
    passage.absent = frozenset(absent)
    if sizes is not None:
        passage.entering, passage.going = sizes.crossing(stage), sizes.crossing(stage + 1)
        passage.prepare = partial(_prepare, passage, sizes)
        _lead_encoder(model, facts.stages.encoder, passage)
    return passage


def join_ends(models: Sequence[nn.Module]) -> bool:
    """Let parts of one rank share parameters of the same name; whether there are any: where the ends meet, ties."""
    held: dict[str, nn.Parameter] = {}
    joined = False
    for model in models:
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = held.setdefault(name, parameter)
            joined = joined or held[name] is not parameter
    return joined


def _empty(block: Any, forward: Callable[..., Any]) -> None:
    """A block keeps its attributes, which the model's loop may read, and nothing that takes memory."""
    for held in (block._modules, block._parameters, block._buffers):
        held.clear()
    block.forward = forward


def _leave_out(module: Any, forward: Callable[..., Tensor], kept: set[int]) -> bool:
    """Take away the module's own parameters but those in `kept`; whether any stays."""
    module.forward = forward
    for leaf, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in kept:
            module._parameters[leaf] = None
    return any(parameter is not None for parameter in module._parameters.values())


def _entering(passage: Passage, facts: ModelFacts) -> Callable[..., Any]:
    outputs = facts.stages.outputs

    def forward(*args: Any, **kwargs: Any) -> Any:
        values = passage.entered()
        return tuple(values.get(number) for number in range(outputs)) if outputs else values[0]

    return forward


def _leaving(passage: Passage, facts: ModelFacts) -> Callable[..., Any]:
    handed_on = facts.stages.handed_on

    def forward(*args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)  # type: ignore[operator]
        passage.values |= {number: given.get(key) for number, key in handed_on.items()}
        raise Left

    return forward


def _ending(forward: Callable[..., Any], passage: Passage) -> Callable[..., Any]:
    """The model's forward as far as this stage goes; inside of what FSDP2 hooks to the model's call."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Left:
            return tuple(passage.values.values())

    return run


def _lead_encoder(model: nn.Module, name: str, passage: Passage) -> None:
    """Stages behind the encoder get its states as they arrived; stages that hand them on keep them."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        passage.values[ENCODED] = output[0]

    if ENCODED in passage.entering:
        encoder: Any = model.get_submodule(name)
        encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=passage.entered()[ENCODED])
    if ENCODED in passage.going:
        model.get_submodule(name).register_forward_hook(keep)


def _standing_in(stand_in: StandIn, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """A forward whose output has the right shape and costs nothing."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)  # type: ignore[operator]
        follows = given[stand_in.argument]
        shape = stand_in.shape(follows.shape if isinstance(follows, Tensor) else follows)
        return torch.zeros((), dtype=dtype, device=device).expand(shape)

    return forward


def _identity(*args: Any, **kwargs: Any) -> Tensor:
    value: Tensor = args[0] if args else next(iter(kwargs.values()))
    return value


# ---- what travels, where it is more than hidden states


class Sizes:
    """Shapes of what travels between the stages of one model, for each shape of its inputs; shared by a rank's stages.

    Found by a forward of the uncut model that computes nothing.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, plan: Plan) -> None:
        self.model = copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})
        self.facts, self.plan = facts, plan
        self.known: dict[Any, Shapes] = {}

    def crossing(self, stage: int) -> tuple[int, ...]:
        """Which outputs of the block before it arrive at a stage, the encoder's states among them."""
        if stage in (0, len(self.plan.stages)):
            return ()
        first = [block.name for block in self.facts.blocks].index(self.plan.stages[stage][0])
        handed_on, end = tuple(self.facts.stages.handed_on), self.facts.stages.encoder_blocks
        if not self.facts.stages.encoder or first < end:
            return handed_on
        return (ENCODED,) if first == end else (*handed_on, ENCODED)

    def __call__(self, stage: int, inputs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
        """The shapes of what arrives at `stage`, as `crossing` names it, in forwards of these inputs.

        Raises:
            ModelError: they cannot be told.
        """
        inputs = {name: inputs[name] for name in inputs if not name.endswith("mask")}  # transformers may look into them
        forms = ((value.shape, value.dtype) if isinstance(value, Tensor) else repr(value) for value in inputs.values())
        key = *inputs, *forms
        if key not in self.known:
            self.known[key] = shapes_handed_on(self.model, self.facts, inputs)
        makers = dict.fromkeys(self.facts.stages.handed_on, self.plan.stages[stage - 1][-1])
        makers[ENCODED] = self.facts.stages.encoder
        whole = {number: self.known[key][makers[number], max(number, 0)] for number in self.crossing(stage)}
        return tuple(shape if number in (0, ENCODED) else self._split(shape) for number, shape in whole.items())

    def _split(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a tensor rank has of what blocks hand on beside hidden states: a bias of its heads' scores."""
        degree = self.plan.degrees[Axis.TENSOR]
        if degree == 1:
            return shape
        if len(shape) != 4 or shape[1] != self.facts.attention_heads:
            raise ModelError(
                f"blocks of {self.facts.family} hand on a tensor {list(shape)}, of which it is not known what a tensor "
                "rank has; use tensor_parallel_degree 1, or pipeline_parallel_degree 1"
            )
        return (shape[0], shape[1] // degree, *shape[2:])


def _prepare(passage: Passage, sizes: Sizes, inputs: Mapping[str, Any]) -> None:
    """Say how large is what travels in forwards of these inputs."""
    passage.parts, going = sizes(passage.stage, inputs), sizes(passage.stage + 1, inputs)
    arriving, leaving = (sum(torch.Size(shape).numel() for shape in parts) for parts in (passage.parts, going))
    passage.shapes = (arriving,), (leaving,)
