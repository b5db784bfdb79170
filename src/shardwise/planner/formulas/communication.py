"""Seconds of collectives on groups that lie across nodes.

A group has n ranks, r of them on each node, m = n/r nodes. S bytes are the whole tensor. b is what one rank moves in
a second: its own link inside a node, and between nodes its share of the node's network, B·r/per_node over the r rings
that leave it (all groups of the axis run at once).

- ring (Thakur, Rabenseifner and Gropp 2005, section 4.1): all-gather and reduce-scatter (n-1)/n·S/b + (n-1)·hop inside
  a node. Between nodes a ring's steps are cut in slices, of which one is on its way while the next is sent, so that
  latency hides behind transfer and the other way round: hypot of the two terms, with b of the slower kind of link. So
  groups over nodes take (n-1) hops for small tensors, and large ones b. All-reduce moves twice as much, its two halves
  one behind the other.
- tree (Sanders, Speck and Traff 2009, double binary trees as NCCL builds them): all-reduce 2·S/b + 2·log2(m)·hops.
- hierarchical: inside the nodes and between them one after the other, so that only m - 1 hops are between nodes.
- flat, ZeRO-3 of its first years: what a rank gathers comes through its own part of the node's network, B/per_node, and
  not through rings that leave a node once (as its step times in arXiv 2104.04473, table 2, say); and matrix by matrix,
  each with a ring's hops (DeepSpeed keeps smaller parameters whole, stage3_param_persistence_threshold).
- direct, SMDDP's all-gather: every rank sends its part to its peers of all nodes at once, so that one hop is paid, and
  nodes copy inside at the link's speed at the same time.

- exchange of rows among the ranks that share experts: every rank sends to all at once, (local-1)/n of its rows over
  links at the same time as over the network, at rates of their own (`Fabric.exchange`), and the slower of both sets the
  pace. A row that goes to k experts crosses the network once for each node that has some, of m nodes on the mean
  m·(1 - (1 - 1/m)^k) times (DeepEP; HybridEP).

NCCL has the ring for all-gather and reduce-scatter, and takes the quicker of ring and tree for all-reduce.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from shardwise.job.axes import Axis, data_axes, placed_axes
from shardwise.planner.formulas.prediction import Cluster, Stack, TrainingConfiguration

TREE = 0.25  # share of the ring's bandwidth that trees reach on large sizes (p5 with EFA, fabric_bandwidth.csv)
MATRICES = 4  # of a block: query, key and value in one, output, up and down
DIRECT = 0.90  # share of the nominal bandwidth between nodes that direct sending reaches


class RankGroup(NamedTuple):
    """Ranks of one axis: how many, how many of them on a node, and rates in bytes a second and seconds a hop."""

    ranks: int
    local: int
    intra: float
    inter: float  # of one rank, all ranks of the node at work
    hop: float
    far_hop: float
    nominal: float  # `inter` without the fabric's efficiency
    exchange: tuple[float, float]  # bytes a second of one rank's rows to experts, over links and over the network

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.local)


@lru_cache(maxsize=4096)
def spaced_group(ranks: int, stride: int, cluster: Cluster, stack: Stack) -> RankGroup:
    """Return the group of `ranks` ranks that lie `stride` apart."""
    # Groups that do not divide a node lie over the edges of some: those of the slowest group count.
    island = cluster.island
    whole = island if cluster.size == island else math.gcd(ranks * stride, island)
    local = max(1, min(ranks, whole // max(1, stride)))
    # The node's network is shared by all of its ranks; those of one group form rings that use their share together.
    share = cluster.inter * 1e9 * local / cluster.per_node
    return RankGroup(
        ranks,
        local,
        cluster.intra * 1e9 * cluster.link.bandwidth,
        share * cluster.fabric.bandwidth * stack.network,
        cluster.link.hop_seconds,
        cluster.fabric.hop_seconds,
        share,
        (
            cluster.intra * 1e9 * (cluster.link.exchange or cluster.link.bandwidth),
            share / local * (cluster.fabric.exchange or cluster.fabric.bandwidth * stack.network),
        ),
    )


def rank_group(configuration: TrainingConfiguration, *axes: Axis) -> RankGroup:
    """Return the group of the ranks that differ along `axes`, which lie side by side in the placement."""
    stride = _stride(configuration, axes)
    return spaced_group(configuration.degree(*axes), stride, configuration.cluster, configuration.stack)


def _stride(configuration: TrainingConfiguration, axes: tuple[Axis, ...]) -> int:
    """Return how far neighbours on `axes` lie apart."""
    placed = placed_axes(configuration.placement)
    fastest = max(placed.index(axis) for axis in axes)
    return configuration.degree(*placed[fastest + 1 :])


class ExpertGroups(NamedTuple):
    """The data ranks seen a second time: those that share experts, that shard one, and that hold copies of a shard.

    Where more ranks share experts than there are data ranks, tensor ranks are among them (Megatron's folding, arXiv
    2504.14960, section 3).
    """

    sharing: RankGroup
    shards: RankGroup
    copies: RankGroup

    @classmethod
    def of(cls, configuration: TrainingConfiguration) -> ExpertGroups:
        """Return the groups of a configuration; experts vary fastest."""
        near, expert, shards = _stride(configuration, data_axes()), configuration.expert, configuration.expert_shards
        data = configuration.degree(*data_axes())
        if expert > data:
            near, data = 1, data * configuration.tensor
        copies = max(1, data // (expert * shards))
        sizes = ((expert, near), (shards, near * expert), (copies, near * expert * shards))
        return cls(*(spaced_group(*size, configuration.cluster, configuration.stack) for size in sizes))


def nodes_of_row(nodes: int, copies: int, groups: int = 1, chosen: int = 1) -> float:
    """Return how many of `nodes` a row goes to, on the mean, whose `copies` go to experts in `chosen` of `groups`."""
    if groups % nodes:
        return nodes * (1 - (1 - 1 / nodes) ** copies)
    own = groups // nodes  # groups of one node
    ways = [(k, math.comb(own, k) * math.comb(groups - own, chosen - k)) for k in range(1, min(own, chosen) + 1)]
    return nodes * sum(way * (1 - (1 - k / chosen) ** copies) for k, way in ways) / math.comb(groups, chosen)


def exchange_seconds(size: float, over: RankGroup, crossing: float = 1.0) -> float:
    """Seconds in which each rank sends `size` bytes to the ranks of the group, its own part among them.

    `crossing`: the share that crosses the network, where of a row's copies for one node one is sent and copied there.
    """
    if over.ranks == 1:
        return 0.0
    links, network = over.exchange
    inside = (over.local - 1) / over.ranks * size / links + (over.local - 1) * over.hop
    if over.nodes == 1:
        return inside
    network = network if crossing < 1.0 else over.inter / over.local
    far = (over.nodes - 1) / over.nodes * crossing * size / network
    return max(inside, far + (over.nodes - 1) * over.far_hop)


def gather_seconds(size: float, over: RankGroup, algorithm: str = "nccl") -> float:
    """All-gather or reduce-scatter of `size` bytes, seconds.

    `algorithm`: nccl (ring), flat (each rank by its own part of the network), hierarchical or smddp.
    """
    if over.ranks == 1:
        return 0.0
    share = (over.ranks - 1) / over.ranks * size
    if over.nodes == 1:
        return share / over.intra + (over.ranks - 1) * over.hop
    if algorithm == "flat":
        return share / min(over.intra, over.inter / over.local) + MATRICES * (over.ranks - 1) * over.far_hop
    if algorithm == "nccl":
        return math.hypot(share / min(over.intra, over.inter), (over.ranks - 1) * over.far_hop)
    far = (over.nodes - 1) / over.nodes * size
    if algorithm == "smddp":
        return max(share / over.intra, far / (over.nominal * DIRECT)) + over.far_hop + over.local * over.hop
    inside = (over.local - 1) / over.local * size / over.intra + (over.local - 1) * over.hop
    return inside + far / over.inter + (over.nodes - 1) * over.far_hop


def all_reduce_seconds(size: float, over: RankGroup) -> float:
    """All-reduce of `size` bytes, seconds."""
    if over.nodes == 1:
        return 2 * gather_seconds(size, over)
    ring = 2 * (over.ranks - 1) / over.ranks * size / min(over.intra, over.inter) + (over.ranks - 1) * over.far_hop
    hops = 2 * (math.log2(over.nodes) * over.far_hop + over.local * over.hop)
    return min(ring, 2 * size / (min(over.intra, over.inter) * TREE) + hops)


def message_seconds(size: float, over: RankGroup) -> float:
    """One rank to the next of its axis, seconds; the slowest neighbours of the group."""
    if over.ranks == 1:
        return 0.0
    if over.nodes == 1:
        return size / over.intra + over.hop
    return size / (over.inter / over.local) + over.far_hop


def overlapped_seconds(computation: float, traffic: float, exponent: float) -> float:
    """Seconds of two things at once that hinder each other: (a^x + b^x)^(1/x).

    1 is one after the other, a large exponent the longer of both; between them, traffic of half the computation's time
    costs a few per cent, which is the contention for memory and multiprocessors, and none is ever free.
    """
    if traffic <= 0.0 or computation <= 0.0:
        return computation + traffic
    longer, shorter = max(computation, traffic), min(computation, traffic)
    share: float = (1.0 + (shorter / longer) ** exponent) ** (1.0 / exponent)
    return longer * share
