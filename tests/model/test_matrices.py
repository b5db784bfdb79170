"""Matrices of fused projections and stacks: where each lies in its parameter, and in a slice of it."""

from __future__ import annotations

import pytest
import torch

from shardwise.model.matrices import Matrix, is_hidden_matrix, matrices_of
from shardwise.parallel.tensor_map import ParameterSplit
from shardwise.training.setup import study
from tests.model import toys

PROJECTIONS = {
    "gpt2": ("c_attn.weight", 3),
    "gpt_neox": ("query_key_value.weight", 3),
    "falcon": ("query_key_value.weight", 3),
    "llama": ("q_proj.weight", 1),
}


@pytest.mark.parametrize("family", PROJECTIONS)
def test_projections_make_up_their_parameter(family: str) -> None:
    """Every element is in one matrix, and embeddings, norms and heads are in none."""
    facts = study(toys.job(family))
    leaf, count = PROJECTIONS[family]
    name = next(name for name in facts.parameter_shapes if name.endswith(leaf))
    shape, matrices = facts.parameter_shapes[name], matrices_of(facts, name)
    everything = tuple(slice(0, size) for size in shape)
    taken = torch.zeros(shape)
    for matrix in matrices:
        for place in matrix.places(everything, everything):
            taken[place.local] += 1
    assert torch.equal(taken, torch.ones(shape))
    assert len(matrices) == count
    hidden = [name for name in facts.parameter_shapes if is_hidden_matrix(facts, name)]
    assert name in hidden
    assert not any(word in other for other in hidden for word in ("norm", "ln_", "embed", "wte", "lm_head"))


def test_a_slice_holds_its_part_of_each_matrix() -> None:
    """Two projections of four rows, split over two tensor ranks: each has two rows of both."""
    second = ParameterSplit((8, 3), 0, (4, 4), degree=2, index=1)
    lower = Matrix((4, 3), (slice(4, 8),))
    (place,) = [place for region in second.regions() for place in lower.places(region.logical, region.local)]
    assert place.inside == (slice(2, 4), slice(0, 3))
    assert place.local == (slice(2, 4), slice(0, 3))
