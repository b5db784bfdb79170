"""Rehearses the forward of a pipeline stage, which holds a part of the model, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.job.capability import Capability, unless
from shardwise.model.config_cache import once_a_config
from shardwise.model.facts import StageFacts
from shardwise.model.modules import empty_module
from shardwise.model.placeholders import AbsentWeight, AbsentWeights, placeholder
from shardwise.model.probe import POSITIONS, copy_to_probe, fake_state, run_on_fakes, token_inputs, try_devices
from shardwise.model.stage_cut import holds_any
from shardwise.model.tower_placeholders import leave_out_towers

# In the errors of a forward that reads what is not there.
ABSENCE = ("object has no attribute", "NoneType", AbsentWeight.__name__)


def rehearse_stage(
    model: nn.Module, blocks: Sequence[str], stages: StageFacts, example: Mapping[str, Tensor]
) -> Capability:
    """Answer whether a forward runs on stages that hold other blocks, where blocks are empty and return their input.

    That of transformers' models without an encoder does. `example` as for `probe`.
    """

    def rehearse(device: str, dtype: torch.dtype) -> None:
        rehearsed = copy_to_probe(model)
        for name in blocks:
            _empty_block(rehearsed, name, stages)
        run_on_fakes(rehearsed, example, device, dtype)

    failure = try_devices(rehearse)[1]
    return unless(failure and f"its forward reaches into its blocks: {failure}")


@once_a_config
def reads_absent_weights(
    model: PreTrainedModel, blocks: Sequence[str], stages: StageFacts, example: Mapping[str, Tensor] | None = None
) -> str:
    """Return how the forward of a stage without the modules ahead of the blocks, or behind, fails for want of weights.

    Empty where it does not; without towers also where it fails in another way. `example` as for `probe`.
    """

    def rehearse(absent: Iterable[str], device: str, dtype: torch.dtype) -> None:
        rehearsed = copy_to_probe(model)
        for name in blocks:
            _empty_block(rehearsed, name, stages)
        lost = AbsentWeights(dtype, place := torch.device(device))
        copies = {name: copy_to_probe(rehearsed.get_submodule(name)) for name in stages.towers}
        towers = copies if absent is stages.before else ()
        left_out = leave_out_towers(
            rehearsed, towers, lambda name: partial(_run_copy, copies[name], device, dtype), dtype, place
        )
        for name in (name for name in absent if name not in left_out and not holds_any(name, blocks)):
            lost.drop(rehearsed.get_submodule(name), placeholder(stages.placeholders.get(name), dtype, place))
        with lost.shown():
            run_on_fakes(rehearsed, inputs, device, dtype)

    # Without labels: a loss of the model's own would read a head's logits, of other classes where the head is absent.
    inputs = {name: value for name, value in (example or token_inputs(model, POSITIONS)).items() if name != "labels"}
    failures = filter(None, (try_devices(partial(rehearse, absent))[1] for absent in (stages.before, stages.after)))
    return next((failure for failure in failures if stages.towers or any(words in failure for words in ABSENCE)), "")


def _run_copy(module: nn.Module, device: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Run a tower whose module in the model is empty; under FakeTensorMode."""
    return torch.func.functional_call(module, fake_state(module, device, dtype), args, kwargs)


def _empty_block(model: nn.Module, name: str, stages: StageFacts) -> None:
    """Let a block return its input, in the form in which blocks return."""
    block: Any = model.get_submodule(name)
    empty_module(block)
    block.forward = lambda hidden, *_, **__: (hidden, *(None,) * (stages.outputs - 1)) if stages.outputs else hidden
