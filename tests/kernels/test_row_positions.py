"""transformers asks whether positions start anew inside of a row; its own models number them from first to last."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from benchmarks import coverage
from shardwise.kernels.attention import row_positions
from shardwise.kernels.attention.row_positions import QUESTION, numbers_positions, sequence_numbers
from shardwise.kernels.dropout import DropoutScope, dropout_scope

ANEW = torch.tensor([[0, 1, 2, 0, 1]])


class OwnLlama(LlamaForCausalLM):
    """It may number positions otherwise."""


def small(model_class: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return model_class(config)


def test_models_of_transformers_number_positions_where_they_are_given_none() -> None:
    ids = torch.zeros(1, 5, dtype=torch.int64)
    assert numbers_positions(small(LlamaForCausalLM), {"input_ids": ids})
    assert not numbers_positions(small(LlamaForCausalLM), {"input_ids": ids, "position_ids": ANEW})
    assert not numbers_positions(small(LlamaForCausalLM), None)  # nobody knows what a script calls it with
    assert not numbers_positions(small(OwnLlama), {"input_ids": ids})
    assert not numbers_positions(nn.Linear(1, 1), {})


def test_transformers_asks_here_and_is_answered_without_the_values_where_they_are_known() -> None:
    assert getattr(masking_utils, QUESTION) is sequence_numbers

    def asked(known: bool) -> Tensor | None:
        with dropout_scope(DropoutScope(0, 0, torch.zeros(1, dtype=torch.int64), numbers_positions=known)):
            answer: Tensor | None = getattr(masking_utils, QUESTION)(ANEW)
        return answer

    numbers = asked(known=False)
    assert numbers is not None and numbers.tolist() == [[0, 0, 0, 1, 1]]
    assert asked(known=True) is None
    assert sequence_numbers(torch.arange(5)[None]) is None  # outside of a microbatch, as it is read


@pytest.mark.parametrize("sample", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_no_type_starts_positions_anew(sample: int | None, tmp_path: Path) -> None:
    """Of the types that transformers can run toys of, with tokens of all kinds, those of padding among them."""
    coverage.write_corpora(tmp_path)
    anew, asking = set(), set()

    def noted(task: str, model_type: str, position_ids: Tensor) -> Tensor | None:
        answer = row_positions.from_values(position_ids)
        asking.add((task, model_type))
        if answer is not None:
            anew.add((task, model_type))
        return answer

    for task, model_type in coverage.drawn_types(sample, seed=0):
        ask = mock.patch.object(masking_utils, QUESTION, lambda ids, case=(task, model_type): noted(*case, ids))
        # Of some types the config's class refuses the toy's values.
        with ask, mock.patch.object(coverage, "FIRST_TOKEN", 0), suppress(Exception):
            coverage.run_plain(coverage.toy_job(tmp_path, task, model_type, coverage.CONTROL))
    assert not anew
    assert sample or len(asking) > 200
