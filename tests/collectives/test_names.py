"""Names of collectives: what they say, that they differ, and that errors carry them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardwise.collectives import fsdp
from shardwise.collectives.context import heads_for_rows, pass_on
from shardwise.collectives.fsdp import name_collectives
from shardwise.collectives.names import CollectiveName, trace_collectives
from shardwise.collectives.tensor import summed
from shardwise.testing.world import WorldPool

NAME = CollectiveName("transformer.h.0", "shard", "all_gather")


def test_a_name_says_what_travels_where_and_how() -> None:
    assert str(NAME) == "all_gather of transformer.h.0 over shard"


def test_digests_tell_names_apart_and_fit_an_int64() -> None:
    others = [
        CollectiveName("transformer.h.1", "shard", "all_gather"),
        CollectiveName("transformer.h.0", "replica", "all_gather"),
        CollectiveName("transformer.h.0", "shard", "reduce_scatter"),
    ]
    digests = {name.digest for name in (NAME, *others)}
    assert len(digests) == 4 and all(0 <= digest < 2**63 for digest in digests)
    assert CollectiveName("transformer.h.0", "shard", "all_gather").digest == NAME.digest


def test_an_error_of_a_collective_says_which_it_was() -> None:
    says = r"^connection closed \(in the all_gather of transformer.h.0 over shard\)$"
    with pytest.raises(dist.DistBackendError, match=says), NAME:
        raise dist.DistBackendError("connection closed")


def test_an_error_of_gloo_has_no_class_of_its_own_and_the_innermost_name_stays() -> None:
    outer = CollectiveName("stage 1", "pipeline", "batch_isend_irecv")
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with (
        pytest.raises(RuntimeError, match=r"by peer \(in the all_gather of transformer.h.0 over shard\)$"),
        outer,
        NAME,
    ):
        raise error
    assert error.collective_name is NAME  # type: ignore[attr-defined]


def names_of_failures() -> list[str]:
    """What an all-gather of a sharded unit, and collectives of the tensor and context axes, say of a broken backend."""
    group = dist.group.WORLD
    assert group is not None
    values, said = torch.ones(1, 2, 2, 2), []
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: summed(values, group),
        "all_to_all_single": lambda: heads_for_rows(values, group),
        "batch_isend_irecv": lambda: pass_on([values], group),
    }
    for function, call in calls.items():
        broken = dist.DistBackendError("broken")
        with mock.patch.object(dist, function, side_effect=broken), contextlib.suppress(dist.DistBackendError):
            call()
        said.append(str(broken))
    module = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2))))
    name_collectives([module, module[0]])  # type: ignore[index]
    with mock.patch.object(fsdp, "all_gather_single", side_effect=dist.DistBackendError("broken")):
        try:
            module(values)
        except dist.DistBackendError as error:
            said.append(str(error))
    return said


def test_collectives_of_every_axis_are_named(world_pool: WorldPool) -> None:
    for said in world_pool.run(2, names_of_failures):
        assert said == [
            "broken (in the all_reduce of activations, or their gradients, over world)",
            "broken (in the all_to_all of attention's heads over world)",
            "broken (in the batch_isend_irecv of attention's blocks over world)",
            "broken (in the all_gather of 0 over shard)",
        ]


def test_a_trace_shows_collectives_by_name() -> None:
    trace_collectives(True)
    try:
        with torch.profiler.profile() as profile, NAME:
            torch.ones(1)
    finally:
        trace_collectives(False)
    with NAME:
        pass
    assert [event.name for event in profile.events() or [] if event.name == str(NAME)] == [str(NAME)]


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^no number$"), NAME:
        raise ValueError("no number")
