"""Ways in which Muon orthogonalizes matrices whose slices lie on several ranks: the cheapest of three, by a formula.

A matrix of m x n, k the smaller of both and l the larger, lies in s slices on r x s ranks, each slice on r of them.
T Newton-Schulz iterations take F = T (4 k^2 l + 2 k^3) FLOPs. A rank's mean share of a matrix is

| way | bytes that it receives | FLOPs |
|---|---|---|
| `one_rank`: gathered on one rank, results sent back | b m n (s - 1 + r s - 1) / (r s^2) | F / (r s) |
| `every_rank`: gathered on every rank | b m n (s - 1) / s | F |
| `blocks`: squares of k x k summed over the slices | 2 w (T k^2 + 1) (s - 1) / s | F / s |

b are the bytes of a number in the iterations' dtype, w those of a sum. Blocks are possible where slices share the
larger dim alone. A byte counts as the FLOPs that a rank does while it arrives. A stage has its share of the matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from shardwise.job.devices import device_kind
from shardwise.model.adapters import adapter_split
from shardwise.model.facts import ModelFacts
from shardwise.model.matrices import Matrix, matrices_of
from shardwise.model.parameter_optimizers import MUON, ParameterOptimizer, optimizers_of_parameters
from shardwise.model.same_object import SameObject
from shardwise.plan.draft import Draft

ONE_RANK, EVERY_RANK, BLOCKS = "one_rank", "every_rank", "blocks"
WORDS = {ONE_RANK: "gathered on one rank each", EVERY_RANK: "gathered on every rank", BLOCKS: "by blocks"}
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # of a number in the iterations, by compute dtype
SUMS = {"fp64": 8}  # of sums, else fp32's
STEPS = 5  # of torch.optim.Muon, where options name no `ns_steps`


class Slices(NamedTuple):
    """The slices of a matrix: how many, how many ranks hold each, and whether each has all of the smaller dim."""

    number: int
    copies: int
    share_larger: bool


class Cost(NamedTuple):
    """A rank's mean share of a step."""

    received: float
    flops: float

    def total(self, device: str) -> float:
        """Return FLOPs, with bytes counted as such."""
        return device_kind(device).flops_a_byte * self.received + self.flops


NOTHING = Cost(0.0, 0.0)


def costs(matrix: Matrix, slices: Slices, steps: int, compute: str) -> dict[str, Cost]:
    """Return the cost of each way that is possible."""
    flops, elements = steps * matrix.work, math.prod(matrix.shape)
    s, r, size = slices.number, slices.copies, BYTES[compute]
    ways = {
        ONE_RANK: Cost(size * elements * (s - 1 + r * s - 1) / (r * s**2), flops / (r * s)),
        EVERY_RANK: Cost(size * elements * (s - 1) / s, flops),
    }
    if slices.share_larger and s > 1:
        ways[BLOCKS] = Cost(2.0 * SUMS.get(compute, 4) * (steps * min(matrix.shape) ** 2 + 1) * (s - 1) / s, flops / s)
    return ways


class Orthogonalization(NamedTuple):
    """Work and traffic of Muon in a step.

    Attributes:
        ways: name of a parameter -> the way of its matrices.
        matrices: how many matrices go each way.
        cost: of a rank, in the mean over stages.
        others: other optimizers -> tensors that they update.
    """

    ways: dict[str, str]
    matrices: Mapping[str, int]
    cost: Cost
    others: Mapping[str, int]

    @property
    def summary(self) -> str:
        """Say which optimizer updates what."""
        parts = [f"{MUON}: {', '.join(f'{count} {WORDS[way]}' for way, count in sorted(self.matrices.items()))}"]
        return "; ".join([*parts, *(f"{name}: {count}" for name, count in self.others.items())])

    @property
    def rule(self) -> str:
        """The formula with its numbers."""
        return (
            f"matrices of hidden weights, experts and fused projections each by itself; a rank receives "
            f"{self.cost.received / 2**20:.3g} MiB and does {self.cost.flops / 1e9:.3g} GFLOP a step, the least of "
            "bytes and FLOPs"
        )


class Ranks(NamedTuple):
    """The ranks among which matrices are sliced, by axis, and what they compute on."""

    tensor: int
    expert: int
    data: int
    sharded: int
    stages: int
    compute: str
    device: str


def orthogonalization(draft: Draft) -> Orthogonalization | None:
    """Return what Muon does in a step of the job; None where nothing is Muon's."""
    parallel = draft.parallel
    ranks = Ranks(
        parallel.tensor_parallel_degree, parallel.expert_parallel_degree, draft.data_axis, draft.sharded,
        parallel.pipeline_parallel_degree, draft.compute, draft.world.device_type,
    )  # fmt: skip
    return _of_ranks(SameObject(draft.facts), SameObject(draft.optimizer), ranks)


@lru_cache(maxsize=256)
def _of_ranks(of_facts: SameObject, of_settings: SameObject, ranks: Ranks) -> Orthogonalization | None:
    facts: ModelFacts = of_facts.value
    chosen = optimizers_of_parameters(facts, of_settings.value)
    ways: dict[str, str] = {}
    matrices, received, flops = Counter[str](), 0.0, 0.0
    for name in [name for name, own in chosen.items() if own.name == MUON]:
        way, cost, count = _cheapest(facts, ranks, name, chosen[name])
        ways[name] = way
        matrices[way] += count
        received, flops = received + cost.received, flops + cost.flops
    others = Counter(own.name for own in chosen.values() if own.name != MUON)
    cost = Cost(received / ranks.stages, flops / ranks.stages)
    return Orthogonalization(ways, matrices, cost, others) if ways else None


def _cheapest(facts: ModelFacts, ranks: Ranks, name: str, own: ParameterOptimizer) -> tuple[str, Cost, int]:
    """Return the way of a parameter's matrices, its cost, and how many matrices there are."""
    matrices, steps = matrices_of(facts, name), int(own.options.get("ns_steps", STEPS))
    totals: dict[str, list[Cost]] = {}
    for matrix in matrices:
        for way, cost in costs(matrix, _slices_of(facts, ranks, name, matrix), steps, ranks.compute).items():
            totals.setdefault(way, []).append(cost)
    sums = {
        way: Cost(sum(cost.received for cost in parts), sum(cost.flops for cost in parts))
        for way, parts in totals.items()
        if len(parts) == len(matrices)  # one way for all of a parameter
    }
    way = min(sums, key=lambda way: sums[way].total(ranks.device))
    # Experts are on some of the ranks that hold the stage: a rank's mean is over all of them.
    share = ranks.expert if name in facts.expert_parameters else 1
    return way, Cost(sums[way].received / share, sums[way].flops / share), len(matrices)


def _slices_of(facts: ModelFacts, ranks: Ranks, name: str, matrix: Matrix) -> Slices:
    """Return how a matrix is sliced by sharding, which cuts dim 0 of a parameter, and by tensor and expert ranks."""
    shared = ranks.expert if name in facts.expert_parameters else 1
    holders = max(1, ranks.data * ranks.tensor // shared)
    shards = ranks.sharded // math.gcd(ranks.sharded, shared)
    parts, split_dim = (1, 0) if shared > 1 else _tensor_parts(facts, name, ranks.tensor)
    if matrix.expert is not None:
        return Slices(parts, max(1, holders // (shards * parts)), share_larger=False)
    cut = {dim for dim, degree in ((0, shards), (split_dim, parts)) if degree > 1}
    number = shards * parts
    return Slices(number, max(1, holders // number), share_larger=cut == {matrix.larger})


def _tensor_parts(facts: ModelFacts, name: str, degree: int) -> tuple[int, int]:
    """Return into how many parts tensor ranks cut a parameter, and along which dim of a matrix."""
    module, _, leaf = name.rpartition(".")
    split = facts.tensor_splits.get(module) or adapter_split(facts, module)
    part = None if split is None or degree == 1 else split.of(leaf)
    if part is None:
        return 1, 0
    copies = facts.key_value_copies(degree) if part.key_value else 1
    return degree // copies, part.dim - (len(facts.parameter_shapes[name]) - 2)
