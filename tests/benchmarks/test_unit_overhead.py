"""What is added to units of FSDP2: each copy of the benchmark has its additions and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.unit_overhead import KINDS, NARROW, TimedModel, added_seconds, two_ranks
from shardwise.collectives.fsdp import NamedAllGather

TINY = replace(NARROW, layers=1, width=8, heads=1, vocabulary=16, sequence=4)


def additions_of(copy: TimedModel) -> tuple[bool, bool, bool]:
    """Whether collectives have names, units are watched, and what a user's forward may do to parameters is."""
    block = copy.module.transformer.h[0]  # type: ignore[union-attr, index]
    [group] = block._get_fsdp_state()._fsdp_param_groups  # type: ignore[union-attr, operator]
    use = copy.use
    return isinstance(group._all_gather_comm, NamedAllGather), use is not None, use is not None and use.watches_traits


@pytest.mark.slow
def test_each_copy_has_its_additions_and_each_round_a_difference() -> None:
    with two_ranks():
        copies = [TimedModel(TINY, additions) for additions in KINDS.values()]
        differences = added_seconds(2, TINY)
    named, used, traits = zip(*map(additions_of, copies), strict=True)
    assert (named, used, traits) == (
        (False, True, True, True),
        (False, False, True, True),
        (False, False, False, True),
    )
    assert {name: len(added) for name, added in differences.items()} == dict.fromkeys(list(KINDS)[1:], 2)
