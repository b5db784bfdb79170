"""Layout against the tables of SMP's documentation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.job.axes import Axis
from shardwise.parallel.layout import ExpertView, Layout, normalise_placement
from shardwise.smp.v2.expert_ranks import ExpertRanks

# placement -> (rdp pp tp) of ranks 0..7, then the TP, PP, RDP, DP and MP groups, for tp = pp = rdp = 2.
TABLE = {
    "DPT": ("000 001 010 011 100 101 110 111", "01 23 45 67", "02 13 46 57", "04 15 26 37", "0145 2367", "0123 4567"),
    "DTP": ("000 010 001 011 100 110 101 111", "02 13 46 57", "01 23 45 67", "04 15 26 37", "0246 1357", "0123 4567"),
    "PDT": ("000 001 100 101 010 011 110 111", "01 23 45 67", "04 15 26 37", "02 13 46 57", "0123 4567", "0145 2367"),
    "PTD": ("000 100 001 101 010 110 011 111", "02 13 46 57", "04 15 26 37", "01 23 45 67", "0123 4567", "0246 1357"),
    "TDP": ("000 010 100 110 001 011 101 111", "04 15 26 37", "01 23 45 67", "02 13 46 57", "0246 1357", "0145 2367"),
    "TPD": ("000 100 010 110 001 101 011 111", "04 15 26 37", "02 13 46 57", "01 23 45 67", "0145 2367", "0246 1357"),
}
NOTIONS = ("tp", "pp", "rdp", "dp", "mp")


def layouts(degrees: dict[str, int], placement: str, world: int) -> list[Layout]:
    return [Layout(degrees, placement, rank) for rank in range(world)]


@pytest.mark.parametrize("placement", TABLE)
def test_smp_tables(placement: str) -> None:
    ranks = layouts({"shard": 2, "pipeline": 2, "tensor": 2}, placement, 8)
    indices, *groups = TABLE[placement]
    assert " ".join("".join(str(r.smp(n)[0]) for n in ("rdp", "pp", "tp")) for r in ranks) == indices
    for notion, expected in zip(NOTIONS, groups, strict=True):
        members = {"".join(map(str, r.smp(notion)[2])) for r in ranks}
        assert members == set(expected.split()), notion


def test_names_and_two_partitions() -> None:
    assert (normalise_placement("cluster"), normalise_placement("spread")) == ("DPT", "TPD")
    spread = layouts({"shard": 4, "pipeline": 2}, "spread", 8)
    assert {r.smp("mp")[2] for r in spread} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {r.smp("dp")[2] for r in spread} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    cluster = layouts({"shard": 4, "pipeline": 2}, "cluster", 8)
    assert {r.smp("mp")[2] for r in cluster} == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_shard_groups_run_inside_a_tensor_ranks_data_line() -> None:
    """The documented example: 32 GPUs, tensor 4, sharded 4."""
    ranks = layouts({"replica": 2, "shard": 4, "tensor": 4}, "cluster", 32)
    groups = {r.ranks("shard") for r in ranks}
    assert {(0, 4, 8, 12), (16, 20, 24, 28), (1, 5, 9, 13), (19, 23, 27, 31)} <= groups


@pytest.mark.parametrize("placement", ["".join(p) for p in itertools.permutations("DPT")])
def test_coordinates_round_trip_and_identities(placement: str) -> None:
    degrees = {"replica": 2, "shard": 3, "context": 2, "pipeline": 2, "tensor": 2}
    for rank in layouts(degrees, placement, 48):
        assert rank.rank_at(**rank.coordinates()) == rank.rank
        size = {n: rank.smp(n)[1] for n in (*NOTIONS, "world")}
        assert size["mp"] * size["rdp"] == size["pp"] * size["dp"] == size["world"] == 48
    assert len({(r.data_rank, *r.ranks("context", "pipeline", "tensor")) for r in layouts(degrees, placement, 48)}) == 6
    assert sorted(r.data_rank for r in layouts(degrees, placement, 48) if r.is_first_of_rows) == list(range(6))


def test_local_rank() -> None:
    assert Layout({"shard": 8}, rank=5, local_size=4).smp("local") == (1, 4, (4, 5, 6, 7))


@pytest.mark.parametrize("bad", ["DP", "DDT", "DPTX", "clutser"])
def test_bad_placement(bad: str) -> None:
    with pytest.raises(ConfigError, match="TPD"):
        normalise_placement(bad)


def test_rank_outside() -> None:
    with pytest.raises(ConfigError, match="outside"):
        Layout({"shard": 2}, rank=2)


@pytest.mark.parametrize("degrees, said", [({"tensr": 2}, "Did you mean 'tensor'"), ({"tensor": 0}, "at least 1")])
def test_degrees_that_are_none(degrees: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Layout(degrees)


def members_asked(layout: Layout) -> Layout:
    """Return `layout` with groups that are their members' ranks, for which no world is needed."""
    layout.group_of = lambda asked, members_of: members_of(layout.rank)  # type: ignore[method-assign]
    return layout


@pytest.mark.parametrize(
    ("local_size", "levels"),
    [
        (8, ((1, 3, 5, 7), None, None)),  # one host
        (4, ((1, 3, 5, 7), (5, 7), (1, 5))),
        (2, ((1, 3, 5, 7), (5,), (1, 3, 5, 7))),  # a row for two experts of a host crosses once all the same
    ],
)
def test_ranks_that_share_experts_in_two_levels(local_size: int, levels: tuple[Any, ...]) -> None:
    """Those of a job, and those of a script of SMP 2, which are replicas of shards."""
    degrees = {Axis.SHARD: 2, Axis.REPLICA: 4}
    script = members_asked(Layout(degrees, rank=5, local_size=local_size))
    assert tuple(ExpertRanks(script, 4).levels()) == levels
    tensor = members_asked(Layout({Axis.TENSOR: 2, Axis.SHARD: 4, Axis.EXPERT: 4}, rank=5, local_size=local_size))
    assert tuple(ExpertView.of(tensor).levels()) == levels
