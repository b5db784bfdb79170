"""The exchange of rows to experts: rates from the published table, what a degree costs, and where both ways meet."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import harmonic_mean

import pytest

from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.planner.constants.inventory import cluster, fabrics
from shardwise.planner.formulas.axis_traffic import block_elements, block_traffic
from shardwise.planner.formulas.communication import RankGroup, exchange_seconds, nodes_of_row
from shardwise.planner.formulas.compute import block_work
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.prediction import ModelShape, Stack, TrainingConfiguration
from shardwise.planner.search.expert_remarks import break_even_tokens
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.parallel.test_experts import by_hosts

TABLE = Path(__file__).parents[1] / "data" / "perf-tables" / "fabric_ep_and_allreduce.csv"
EFA, NVLINK = 50.0, 450.0  # GB/s of one p5en accelerator over the network, and over its links, one direction
# Qwen3-30B-A3B: 48 blocks of 128 experts of width 768, of which a token takes 8.
STACKED = 3 * 2048 * 768 * 128
QWEN = ModelShape(
    "qwen3-30b-a3b", 48, 2048, 32, 4, 8 * 768, 151936, gated=True, head_size=128, idle=STACKED * 120 // 128,
    experts=128, experts_of_token=8, expert_width=768, stacked=STACKED,
)  # fmt: skip


def configured(**changes: int) -> TrainingConfiguration:
    return replace(TrainingConfiguration(QWEN, cluster("p5.48xlarge:2"), Stack("test"), 4096, 1, shard=16), **changes)


def test_rates_are_those_of_the_published_table() -> None:
    with TABLE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["GBps"]]
    network = [float(row["GBps"]) for row in rows if row["fabric"] == "UCCL-EP EFA RDMA"]
    links = [float(row["GBps"]) for row in rows if "NVLink" in row["fabric"]]
    assert fabrics()["efa"].exchange == pytest.approx(harmonic_mean(network) / EFA, abs=0.01)
    assert fabrics()["nvlink4"].exchange == pytest.approx(harmonic_mean(links) / NVLINK, abs=0.01)


def test_rows_and_weights_meet_where_the_formula_says() -> None:
    assert break_even_tokens(configured()) == 3 * 768 * 128 / 8 == 36864


def test_an_exchange_costs_more_between_nodes_and_with_uneven_loads() -> None:
    seconds = [block_traffic(configured(expert=degree))["expert"] for degree in (1, 8, 16)]
    assert seconds[0] == 0 and 2 * seconds[1] < seconds[2]
    even = block_traffic(replace(configured(expert=16), imbalance=1.0))["expert"]
    assert even < seconds[2] < 1.21 * even


def test_kept_rows_are_not_exchanged_again() -> None:
    sharing = replace(configured(expert=16), selective_exchanges=True)
    once, twice, selective, kept = (
        block_traffic(replace(sharing, checkpointing=policy, keeps_expert_rows=keeps))["expert"]
        for policy, keeps in (("none", False), ("full", False), ("selective", False), ("full", True))
    )
    assert once == kept < twice < 1.5 * once, "two of six exchanges of rows; numbers are exchanged once"
    assert selective == twice, "selective checkpointing of shardwise keeps products alone"
    assert block_traffic(replace(configured(expert=16), checkpointing="selective"))["expert"] == once


def test_each_stack_of_a_block_has_an_exchange_of_its_own() -> None:
    """JetMoE routes its attention too: of both, rows go to one stack of experts and to another."""
    shapes = {}
    for model_type in ("jetmoe", "mixtral", "gpt_oss"):
        job = Job.model_validate({"model": {"config": toy_config(model_type)}})
        shapes[model_type] = ModelShape.of(study(job))
    assert (shapes["jetmoe"].expert_stacks, shapes["mixtral"].expert_stacks) == (4, 1)
    assert [shapes[name].expert_biases for name in ("jetmoe", "mixtral", "gpt_oss")] == [False, False, True]
    one, two = (
        block_traffic(replace(configured(expert=16), model=replace(QWEN, expert_stacks=stacks)))["expert"]
        for stacks in (1, 2)
    )
    assert two == 2 * one


def test_rows_of_a_job_cross_once_where_a_node_has_several_ranks() -> None:
    sections = {"parallel": {"expert_parallel_degree": 4}, "data": {"sequence_length": 64}}
    job = Job.model_validate({"model": {"config": toy_config("qwen3_moe")}, **sections})
    facts = study(job)
    for ranks_a_node, crosses_once in ((2, True), (1, False)):
        plan = resolve(job, World(4, "cpu", ranks_a_node), facts)
        nodes = replace(cluster("p5.48xlarge:2"), per_node=ranks_a_node, nodes=4 // ranks_a_node)
        assert configuration_of(plan, facts, nodes).copies_on_nodes == crosses_once


@pytest.mark.slow
def test_as_many_rows_cross_the_network_as_ranks_send_there(world_pool: WorldPool) -> None:
    """Every choice of three of eight experts, repetitions among them, which is what the formula takes the mean of."""
    routes = [list(map(list, product(range(8), repeat=3)))] * 4
    two_hosts = RankGroup(4, 2, math.inf, 1.0, 0.0, 0.0, 1.0, exchange=(math.inf, 1.0))  # a row a second
    each_way = exchange_seconds(3.0 * len(routes[0]), two_hosts, nodes_of_row(2, 3) / 3)
    for _, sent in world_pool.run(4, by_hosts, routes):
        assert sent == 4 * each_way, "there and back, forward and backward"


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_row_goes_to_the_nodes_of_its_groups(nodes: int) -> None:
    """Every choice of two of eight groups, and of three experts in them with repetitions."""
    ways = [
        len({group * nodes // 8 for group in experts})
        for groups in combinations(range(8), 2)
        for experts in product(groups, repeat=3)
    ]
    assert nodes_of_row(nodes, 3, groups=8, chosen=2) == pytest.approx(sum(ways) / len(ways))
    assert nodes_of_row(nodes, 3, groups=8, chosen=2) < nodes_of_row(nodes, 3)


def test_a_library_that_calls_a_product_for_each_expert_wastes_a_wave_for_each() -> None:
    together, apart = (replace(configured(expert=8), fused=fused) for fused in (False, True))
    assert block_work(apart)[0].matmul > 1.02 * block_work(together)[0].matmul


def test_a_rank_holds_its_experts_alone() -> None:
    whole, shared = block_elements(configured()), block_elements(configured(expert=8))
    assert whole.own == 0 and shared.own == STACKED / 8
    assert shared.shared == whole.shared - STACKED
    assert shared.sharded(configured(expert=8)) == whole.sharded(configured())  # 16 ranks hold all of it either way
