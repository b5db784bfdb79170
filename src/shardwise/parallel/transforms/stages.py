"""Pipeline stages between blocks, cut from the unmodified model.

The model's own forward runs on every stage, on the whole microbatch's ids, so masks, positions and rotary tables are
the model's own. Blocks of the stages before return the boundary input; the first block behind the stage keeps the
boundary output and ends the forward. Embeddings and head stand where they are used; elsewhere placeholders give tensors
of the right shape, which nobody reads. Towers stand on the first stage as a whole. On stages of a decoder the encoder
returns its states as they arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from shardwise._torch_compat.modules import clear_module_hooks
from shardwise.errors import ModelError, UserCodeError
from shardwise.job.axes import Axis
from shardwise.job.objects import in_parentheses, raised_at
from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts
from shardwise.model.modules import empty_module
from shardwise.model.placeholders import AbsentWeights, placeholder
from shardwise.model.rehearsal import ABSENCE
from shardwise.model.tower_placeholders import TowerPlaceholder, leave_out_towers
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.stage_boundary import ENCODED, BoundaryShapes, StageBoundary, set_shapes
from shardwise.plan.plan import Plan


class BlockStages(Transform):
    """Stages of whole blocks, for models that are a chain of blocks or two."""

    name = "stages"
    axis = Axis.PIPELINE

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return not facts.stages.traced

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            assert stage.number is not None
            stage.boundary = cut_stage(
                stage.model, inputs.facts, inputs.plan, stage.number, inputs.device, build.boundary_shapes
            )
        build.share_parameters()


class StageForwardEnds(BaseException):
    """Leaves the forward of a stage behind its last block: what follows belongs to other stages.

    No Exception: a model's own `except Exception` is for its errors.
    """


def cut_stage(
    model: nn.Module,
    facts: ModelFacts,
    plan: Plan,
    stage: int,
    device: torch.device,
    shapes: BoundaryShapes | None = None,
) -> StageBoundary:
    """Leave of `model` (on the meta device) what belongs to `stage`.

    A parameter that is tied across stages stays under all its names on each that uses it.

    Args:
        device: where the stage computes.
        shapes: of what travels, where that is more than hidden states; it has the model as it was, with its towers.
    """
    dtype = torch_dtype(plan.dtypes.compute)
    boundary = StageBoundary(stage, len(plan.stages), dtype=dtype)
    own = plan.stages[stage]
    names = [block.name for block in facts.blocks]
    first, end = names.index(own[0]), names.index(own[-1]) + 1
    before, after = names[facts.stages.tower_blocks : first], names[end:]
    for name in before:
        _empty(model.get_submodule(name), _returning_input(boundary, facts))
    for name in after:
        _empty(model.get_submodule(name), _keeping_output(boundary, facts))
    lost = AbsentWeights(dtype, device)
    model.forward = _running_stage(
        model.forward, boundary, lost, _SkippedBlocks(facts.definition, not facts.has_config, before, after)
    )

    left_out = leave_out_towers(
        model,
        facts.stages.towers if first else (),
        lambda name: _tower_placeholder(name, facts, shapes, dtype, device),
        dtype,
        device,
    )
    runs = {name: numbers for name, numbers in facts.stages.runs.items() if name not in left_out}
    placeholders: dict[str, Callable[..., Tensor]] = {}
    for name, numbers in runs.items():
        if not any(first <= number < end for number in numbers):
            placeholders[name] = placeholder(facts.stages.placeholders.get(name), dtype, device)
    used = [name for name in (*own, *runs) if name not in placeholders]
    kept = {id(parameter) for name in used for parameter in model.get_submodule(name).parameters(recurse=name in own)}
    absent = {*before, *after, *left_out}
    for name, forward in placeholders.items():
        if not lost.drop(model.get_submodule(name), forward, kept):
            absent.add(name)
    boundary.absent = frozenset(absent)
    if shapes is not None and facts.stages.has_flat_boundaries:
        boundary.input_numbers, boundary.output_numbers = shapes.crossing(stage), shapes.crossing(stage + 1)
        boundary.prepare = partial(set_shapes, boundary, shapes)
        _connect_encoder(model, facts.stages.encoder, boundary)
    return boundary


def _tower_placeholder(
    name: str, facts: ModelFacts, shapes: BoundaryShapes | None, dtype: torch.dtype, device: torch.device
) -> TowerPlaceholder:
    assert shapes is not None
    prefix, blocks = f"{name}.", [block.name for block in facts.blocks[: facts.stages.tower_blocks]]
    inside = [block.removeprefix(prefix) for block in blocks if block.startswith(prefix)]
    return TowerPlaceholder(name, shapes.model.get_submodule(name), inside, dtype, device)


def _empty(block: nn.Module, forward: Callable[..., Any]) -> None:
    empty_module(block)
    block.forward = forward  # type: ignore[method-assign]
    clear_module_hooks(block)  # the stage that owns the block calls them


def _returning_input(boundary: StageBoundary, facts: ModelFacts) -> Callable[..., Any]:
    outputs = facts.stages.outputs

    def forward(*args: Any, **kwargs: Any) -> Any:
        values = boundary.inputs_by_number()
        return tuple(values.get(number) for number in range(outputs)) if outputs else values[0]

    return forward


def _keeping_output(boundary: StageBoundary, facts: ModelFacts) -> Callable[..., Any]:
    handed_on = facts.stages.handed_on

    def forward(*args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)  # type: ignore[operator]
        boundary.block_outputs |= {number: given.get(key) for number, key in handed_on.items()}
        raise StageForwardEnds

    return forward


@dataclass(frozen=True)
class _SkippedBlocks:
    """Blocks of other stages, at which a stage gets its input and ends."""

    definition: str
    is_users: bool  # the model has a user's forward
    before: list[str]
    after: list[str]

    def error(self, names: list[str]) -> ModelError:
        """Return what is raised where a forward has run none of `names`, of the stages before or behind one."""
        return ModelError(
            f"a forward of {self.definition} has skipped all blocks of other stages, {names[0]} to {names[-1]}; let it "
            "run some of every stage, or use pipeline_parallel_degree 1"
        )

    def access_error(self, error: Exception) -> UserCodeError:
        """Return what is raised where a forward may have asked a module of another stage for what is not here."""
        place = in_parentheses(raised_at(error))
        return UserCodeError(
            f"the forward of {self.definition} raised {type(error).__name__}: {error}{place}. A stage holds its own "
            "blocks alone: if this line reads what another stage holds, read it in the forward of the module that owns "
            "it, or use pipeline_parallel_degree 1"
        )


def _running_stage(
    forward: Callable[..., Any], boundary: StageBoundary, lost: AbsentWeights, skipped: _SkippedBlocks
) -> Callable[..., Any]:
    """Run the model's forward as far as this stage goes; inside of what FSDP2 hooks to the model's call."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        boundary.is_input_read = boundary.is_first
        try:
            with lost.shown():
                output = forward(*args, **kwargs)
        except StageForwardEnds:
            output = tuple(boundary.block_outputs.values())
        except (AttributeError, TypeError) as error:  # the whole model's forward has been tried without
            if skipped.is_users and any(words in str(error) for words in ABSENCE):
                raise skipped.access_error(error) from error
            raise
        else:
            if skipped.after:
                raise skipped.error(skipped.after)
        if not boundary.is_input_read:
            raise skipped.error(skipped.before)
        return output

    return run


class _EncoderOutput(MoeModelOutputWithPast):
    """The states of an encoder that another stage has run; what else a model's encoder may return is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _connect_encoder(model: nn.Module, name: str, boundary: StageBoundary) -> None:
    """Give stages behind the encoder its states as they arrived; stages that hand them on keep them."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        boundary.block_outputs[ENCODED] = output[0]

    if ENCODED in boundary.input_numbers:
        encoder: Any = model.get_submodule(name)
        encoder.forward = lambda *_, **__: _EncoderOutput(last_hidden_state=boundary.inputs_by_number()[ENCODED])
    if ENCODED in boundary.output_numbers:
        model.get_submodule(name).register_forward_hook(keep)
