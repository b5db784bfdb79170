"""How blocks run on rows of sequences that their model sees whole: found by a forward on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mpt.modeling_mpt import MptMLP

from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.carried_state import carried_state
from shardwise.model.discover import discover, find_block_lists
from shardwise.model.facts import DECODER, ENCODER, CarriedState, GatheredModule, SplitAttention, SplitForward
from shardwise.model.split_forward import find_split_forward
from shardwise.testing.toy_configs import toy_config


def model_of(task: str, model_type: str, **config: Any) -> PreTrainedModel:
    job = {"model": {"config": toy_config(model_type, **config), "task": task}}
    model = build_model(Job.model_validate(job))
    assert isinstance(model, PreTrainedModel)
    return model


def found(model: PreTrainedModel) -> tuple[SplitForward | None, str]:
    return find_split_forward(model, find_block_lists(model), None)


def test_an_encoder_and_a_decoder_with_positions_of_their_own() -> None:
    forward, failure = found(model_of("seq2seq_lm", "bart"))
    assert forward is not None and not failure
    sides = [block.side for block in forward.blocks.values()]
    assert sides == [ENCODER, ENCODER, DECODER, DECODER] and not forward.gathered
    assert (forward.encoder, forward.encoded) == ("model.encoder", (0,))
    assert forward.attention["model.decoder.layers.1.self_attn"] == SplitAttention(local_keys=True)
    assert forward.attention["model.decoder.layers.1.encoder_attn"] == SplitAttention(local_keys=False)


@pytest.mark.slow
def test_the_first_block_makes_the_biases_of_all() -> None:
    forward, _ = found(model_of("seq2seq_lm", "t5"))
    assert forward is not None
    makes_biases = [module.name for module in forward.gathered]
    assert makes_biases == [f"{stack}.block.0.layer.0.SelfAttention" for stack in ("encoder", "decoder")]
    assert forward.attention["encoder.block.1.layer.0.SelfAttention"] == SplitAttention(True, ("position_bias",))


@pytest.mark.slow
def test_a_block_that_mixes_and_one_that_attends() -> None:
    forward, _ = found(model_of("causal_lm", "qwen3_next"))
    assert forward is not None
    carried = CarriedState(recurrent=(4, 8, 8), ahead=(64, 3))
    assert forward.gathered == (GatheredModule("model.layers.0.linear_attn", DECODER, (0,), (0,), carried),)
    assert list(forward.attention) == ["model.layers.1.self_attn"]
    assert 0 in forward.blocks["model.layers.1"].arguments and len(forward.blocks["model.layers.1"].arguments) == 3


class Summing(nn.Module):
    """A mixer that goes on from the sum of all rows before, as far as it is `told`, and from the two last ones."""

    told = True

    def forward(self, hidden_states: Tensor, cache: Any = None) -> Tensor:
        if cache is None:
            return hidden_states.cumsum(1)
        before = cache.get_recurrent_state(0)
        rows = cache.update_conv_state(hidden_states.mT, 0, conv_kernel_size=3).mT
        summed = rows.cumsum(1)[:, -hidden_states.shape[1] :]
        summed = summed if before is None or not self.told else summed + before[:, None]
        cache.update_recurrent_state(summed[:, -1], 0)
        return summed


class Forgetful(Summing):
    """A mixer that reads its state for a single token alone, as Mamba's first scan does."""

    told = False


class Attending(Summing):
    """A mixer that asks its cache for keys, too."""

    def forward(self, hidden_states: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            cache.update(hidden_states, hidden_states, 0)
        return super().forward(hidden_states, cache)


def test_only_what_goes_on_from_the_state_that_it_is_given_carries_one() -> None:
    hidden = torch.ones(2, 5, 4)
    assert carried_state(Summing().forward, (hidden,), {}) == CarriedState(recurrent=(4,), ahead=(4, 2))
    assert carried_state(Summing().forward, (hidden,), {"cache": object()}) is None
    for module in (Forgetful(), Attending(), nn.Identity()):
        assert carried_state(module.forward, (hidden,), {}) is None


class Shortened(MptMLP):
    """An MLP whose scale depends on how many positions it is given."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return super().forward(hidden_states / hidden_states.shape[1], residual)  # type: ignore[no-any-return]


def test_sequences_of_a_trial_are_no_part_of_one() -> None:
    """Experts ask for more of them; eleven would be taken for the eleven rows of a part."""
    few, many = (found(model_of("causal_lm", "mixtral", num_local_experts=number))[0] for number in (4, 120))
    assert few is not None and few == many


@pytest.mark.slow
def test_arithmetic_with_the_length_is_refused() -> None:
    model = model_of("causal_lm", "mpt")
    assert found(model)[0] is not None
    model.get_submodule("transformer.blocks.1.ffn").__class__ = Shortened
    forward, failure = found(model)
    assert forward is None and "depend on the length of a sequence" in failure


class Reversed(nn.Module):
    """A norm behind the blocks that turns sequences round."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.flip(1)


@pytest.mark.slow
def test_mixing_behind_the_blocks_is_refused() -> None:
    model = model_of("causal_lm", "mpt")
    model.transformer.norm_f = Reversed()
    assert found(model) == (None, "it mixes positions outside of its blocks (flip)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, model_type, config, says",
    [
        ("seq2seq_lm", "nllb-moe", {}, "its experts take a share of a microbatch's tokens"),
        ("masked_lm", "fnet", {}, "it mixes positions outside of its blocks (select)"),
    ],
)
def test_others_are_refused(task: str, model_type: str, config: dict[str, Any], says: str) -> None:
    job = Job.model_validate({"model": {"config": toy_config(model_type, **config), "task": task}})
    answer = discover(build_model(job), job).supports(Axis.CONTEXT)
    assert not answer.ok and answer.reason == says
