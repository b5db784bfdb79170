"""Names of collectives: what they say, that they differ, and that errors carry them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwise.collectives.names import CollectiveName

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


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^no number$"), NAME:
        raise ValueError("no number")
