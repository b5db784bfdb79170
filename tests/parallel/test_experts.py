"""Dispatch and combine by themselves: whatever the router chooses, results and gradients are those of whole experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shardwise.collectives.experts import Arriving, RowExchange, exchange_counts
from shardwise.errors import ModelError
from shardwise.job.schema import MemorySection
from shardwise.kernels.experts import SortedExperts
from shardwise.parallel import experts_at_once, experts_by_host
from shardwise.parallel.experts import SharedExperts
from shardwise.parallel.kept_routes import CheckpointedCalls, KeptRows, routes_of
from shardwise.parallel.layout import ExpertLevels
from shardwise.parallel.transforms.checkpointing import apply_activation_checkpointing
from shardwise.testing.world import WorldPool

EXPERTS, HIDDEN = 4, 6
# Experts of each rank's tokens, two a token.
ROUTES = {
    "spread": [[[0, 1], [2, 3], [1, 2]], [[3, 0], [1, 3]]],
    "all tokens on one expert": [[[0, 0], [0, 0]], [[0, 0], [0, 0], [0, 0]]],
    "a rank that gets nothing": [[[0, 1], [1, 0]], [[1, 0]]],
    "a rank without tokens": [[], [[0, 3], [2, 1]]],
}


def whole_experts() -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=5, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    return experts


def inputs_of(rank: int, route: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    hidden = torch.randn(len(route), HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(len(route), 2, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, torch.tensor(route, dtype=torch.int64).view(-1, 2), weights


def run_backward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the output and the gradients of hidden states and weights, for a loss that tells all of them apart."""
    output = experts(hidden, index, weights)
    (output * torch.arange(1, HIDDEN + 1)).square().sum().backward()
    assert hidden.grad is not None and weights.grad is not None
    return [output.detach(), hidden.grad, weights.grad]


def shared(routes: list[list[list[int]]]) -> tuple[list[Tensor], list[Tensor]]:
    """Run this rank's tokens with half of the experts; return results and the experts' gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts: Any = whole_experts()
    local = EXPERTS // ranks
    for name, parameter in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(parameter[rank * local : (rank + 1) * local].detach().clone()))
    experts.num_experts = local
    group = dist.group.WORLD
    assert group is not None
    shared_experts = SharedExperts("experts", SortedExperts(experts, experts.forward), EXPERTS, ExpertLevels(group))
    results = run_backward(shared_experts.run, *inputs_of(rank, routes[rank]))
    return results, [parameter.grad for parameter in experts.parameters()]


# Experts of each of four ranks' tokens, three a token; two ranks are a host, and two experts a rank.
OF_HOSTS = [
    [[0, 1, 4], [7, 6, 5], [2, 0, 3]],
    [[5, 4, 1]],
    [],
    [[0, 2, 1], [3, 3, 3]],
]


class ScaledRows(nn.Module):
    """Experts that multiply by whole numbers, so that sums in any order have the same bits."""

    def __init__(self, first: int, number: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(first + 1.0, first + number + 1.0, dtype=torch.float64))

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return rows * self.scale[experts[:, 0], None] * weights


def by_hosts(routes: list[list[list[int]]], part_bytes: int) -> tuple[list[list[Tensor]], int]:
    """Share experts at once, then in two levels; return outputs and gradients of both, and rows sent between hosts."""
    with mock.patch.object(experts_by_host, "PART_BYTES", part_bytes):
        return at_once_and_by_hosts(routes)


def at_once_and_by_hosts(routes: list[list[list[int]]]) -> tuple[list[list[Tensor]], int]:
    rank, everyone = dist.get_rank(), dist.group.WORLD
    assert everyone is not None
    local, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    cross, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    sent = 0

    def counted(exchange: RowExchange, rows: Tensor, taken: Tensor | None = None) -> Arriving:
        nonlocal sent
        if exchange.group is cross and rows.shape[1] == HIDDEN:
            sent += exchange.sent[1 - rank // 2]
        return start(exchange, rows, taken)

    start = RowExchange.start
    answers = []
    for groups in (ExpertLevels(everyone), ExpertLevels(everyone, local, cross)):
        experts = ScaledRows(2 * rank, 2)
        generator = torch.Generator().manual_seed(rank)
        values = (
            torch.randint(9, (len(routes[rank]), width), generator=generator).double().requires_grad_()
            for width in (HIDDEN, 3)
        )
        index = torch.tensor(routes[rank], dtype=torch.int64).view(-1, 3)
        hidden, weights = values
        shared_experts = SharedExperts("experts", SortedExperts(experts, experts.forward), 8, groups)
        assert experts.scale.grad is None
        with mock.patch.object(RowExchange, "start", counted):
            results = run_backward(shared_experts.run, hidden, index, weights)
        answers.append(
            [*results, *(parameter.grad for parameter in experts.parameters() if parameter.grad is not None)]
        )
    return answers, sent


@pytest.mark.parametrize("part_bytes", [HIDDEN * 8, 1 << 20], ids=["a part a token", "one part"])
def test_a_token_crosses_once_to_a_host_and_gives_the_bits_of_one_exchange(
    world_pool: WorldPool, part_bytes: int
) -> None:
    answers = world_pool.run(4, by_hosts, OF_HOSTS, part_bytes)
    for rank, ((at_once, in_two_levels), sent) in enumerate(answers):
        assert len(at_once) == 4 and all(map(torch.equal, at_once, in_two_levels))
        elsewhere = {0, 1, 2, 3} if rank >= 2 else {4, 5, 6, 7}
        crossing = sum(bool(elsewhere & set(token)) for token in OF_HOSTS[rank])
        peer = (rank + 2) % 4
        here = {4, 5, 6, 7} if rank >= 2 else {0, 1, 2, 3}
        returning = sum(bool(here & set(token)) for token in OF_HOSTS[peer])
        assert sent == 2 * (crossing + returning), "there and back, forward and backward"


# --- checkpointed


class Routed(nn.Module):
    """A block that sends its tokens to shared experts, the weights of which come from the tokens."""

    def __init__(self, experts: Callable[..., Tensor]) -> None:
        super().__init__()
        self.experts, self.calls = experts, 0

    def forward(self, hidden: Tensor, index: Tensor) -> Tensor:
        return hidden + self.experts(hidden.sin(), index, hidden[:, :3].cos())


def checkpointed(memory: dict[str, Any], levels: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Return output and gradients of a block of shared experts, and how often ranks have exchanged what."""
    rank, everyone, calls = dist.get_rank(), dist.group.WORLD, dict.fromkeys(("numbers", "rows"), 0)
    assert everyone is not None
    local, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    cross, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    own = ScaledRows(2 * rank, 2)
    groups = ExpertLevels(everyone, local, cross) if levels else ExpertLevels(everyone)
    block = Routed(SharedExperts("experts", SortedExperts(own, own.forward), 8, groups).run)
    if memory:
        apply_activation_checkpointing([[block]], MemorySection(**memory), None)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(len(OF_HOSTS[rank]), HIDDEN, dtype=torch.float64, generator=generator, requires_grad=True)

    def counted(what: str, function: Callable[..., Any]) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            calls[what] += 1
            return function(*args, **kwargs)

        return count

    with ExitStack() as stack:
        for where in (experts_at_once, experts_by_host):
            stack.enter_context(mock.patch.object(where, "exchange_counts", counted("numbers", exchange_counts)))
        for name in ("exchange", "start"):
            counting = counted("rows", getattr(RowExchange, name))
            stack.enter_context(mock.patch.object(RowExchange, name, counting))
        output = block(hidden, torch.tensor(OF_HOSTS[rank], dtype=torch.int64).view(-1, 3))
        output.square().sum().backward()
    assert hidden.grad is not None and own.scale.grad is not None
    return [output.detach(), hidden.grad, own.scale.grad], calls


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("levels", [False, True], ids=["at once", "two levels"])
def test_a_recomputation_routes_no_second_time(world_pool: WorldPool, levels: bool, policy: str) -> None:
    memory = {"activation_checkpointing": policy}
    plain, again, kept = (
        world_pool.run(4, checkpointed, each, levels) for each in ({}, memory, {**memory, "keep_expert_rows": True})
    )
    for (expected, once), (results, twice), (of_kept, not_again) in zip(plain, again, kept, strict=True):
        assert all(map(torch.equal, expected, results)) and all(map(torch.equal, expected, of_kept))
        assert once["numbers"] == twice["numbers"] == not_again["numbers"] == (2 if levels else 1)
        assert once["rows"] == not_again["rows"] < twice["rows"]
        assert levels or (once["rows"], twice["rows"]) == (4, 6)


def test_other_choices_in_a_recomputation_are_refused() -> None:
    calls, chosen = CheckpointedCalls(keeps_rows=False), torch.tensor([[0, 1]])
    with calls.made():
        assert routes_of("experts", chosen, lambda kept: "there") == "there"
    for _ in range(2):  # a block may be computed again for a gradient of its own
        with calls.again():
            assert routes_of("experts", chosen.clone(), lambda kept: "elsewhere") == "there"
    with calls.again(), pytest.raises(ModelError, match="tokens chose other experts when their block was computed"):
        routes_of("experts", chosen.flip(1), lambda kept: "elsewhere")
    assert routes_of("experts", chosen, lambda kept: "elsewhere") == "elsewhere"


def test_kept_rows_that_experts_write_are_refused() -> None:
    kept, rows = KeptRows(keeps=True), torch.zeros(2)
    assert kept.result("rows", lambda: rows) is rows
    assert torch.equal(kept.result("rows", lambda: torch.ones(2)), torch.zeros(2))
    rows.add_(1)
    with pytest.raises(ModelError, match="the experts write their rows in place"):
        kept.result("rows", lambda: rows)


@pytest.mark.parametrize("name", ROUTES)
def test_shared_experts_are_whole_ones(world_pool: WorldPool, name: str) -> None:
    routes = ROUTES[name]
    answers = world_pool.run(2, shared, routes)
    experts = whole_experts()
    for rank, (results, _) in enumerate(answers):
        if not routes[rank]:
            assert [len(value) for value in results] == [0, 0, 0]
            continue
        for value, expected in zip(results, run_backward(experts, *inputs_of(rank, routes[rank])), strict=True):
            torch.testing.assert_close(value, expected)
    for number, parameter in enumerate(experts.parameters()):
        torch.testing.assert_close(torch.cat([gradients[number] for _, gradients in answers]), parameter.grad)
