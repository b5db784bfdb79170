"""Cost models against what is known by hand or published, and what a prediction has to keep whatever it says."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardwise.errors import ConfigError
from shardwise.job.axes import Axis, state_axes
from shardwise.job.schema import Job
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.planner.constants.hardware import GIB
from shardwise.planner.constants.inventory import accelerator, cluster, presets, stack_of
from shardwise.planner.formulas.communication import all_reduce_seconds, gather_seconds, overlapped_seconds, rank_group
from shardwise.planner.formulas.compute import block_work, matmul_seconds, rates, recomputed_work
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.footprint import footprint
from shardwise.planner.formulas.layer import host_bandwidth
from shardwise.planner.formulas.predict import KEPT, predict
from shardwise.planner.formulas.prediction import ModelShape, TrainingConfiguration
from shardwise.planner.published.mapping import configuration
from shardwise.planner.published.tables import read_table
from tests.planner.test_schedule import FACTS

TABLES = Path("tests/data/perf-tables")


def made(**changes: Any) -> TrainingConfiguration:
    given = {"model": presets()["llama2-7b"], "cluster": cluster("p5.48xlarge:2"), "stack": stack_of("default")}
    return TrainingConfiguration(**given | {"sequence": 4096, "microbatch": 1, "shard": 16} | changes)


LAYOUTS = {
    "sharded": made(),
    "MiCS, accumulated": made(shard=8, replica=2, accumulation=4),
    "tensor": made(tensor=8, shard=2, sequence_parallel=True),
    "pipeline": made(tensor=2, pipeline=4, shard=2, accumulation=8, zero=1),
    "interleaved": made(pipeline=4, virtual=2, shard=4, accumulation=8, zero=0),
    "context": made(context=4, shard=4, checkpointing="full", offload_activations=True),
    "preferences": made(pipeline=4, shard=4, accumulation=8, reference="copy"),
    "scores written": made(flash=False, dropout=True, checkpointing="selective"),
}


def test_a_mask_of_all_keys_takes_the_half_of_attention_that_causality_spares() -> None:
    plain, masked = made(), made(masked=True)
    assert predict(masked).seconds["attention"] == pytest.approx(2 * predict(plain).seconds["attention"])


@pytest.mark.parametrize("method, masked", [("all_gather", True), ("ulysses", False), ("ring", False)])
def test_gathered_keys_are_masked(method: str, masked: bool) -> None:
    parallel = {"context_parallel_degree": 2, "context_parallel_method": method}
    job = Job.model_validate({"parallel": parallel, "data": {"sequence_length": 128}})
    found = configuration_of(resolve(job, World(8, "cuda", 8), FACTS), FACTS, cluster("p5.48xlarge:1"))
    assert found.masked is masked


@pytest.mark.parametrize("name", LAYOUTS)
def test_causes_add_up_and_none_is_negative(name: str) -> None:
    found = predict(LAYOUTS[name])
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds)
    assert min(found.seconds.values()) >= 0 and min(found.memory.values()) >= 0
    assert sum(found.memory.values()) == pytest.approx(max(found.stage_memory))
    assert found.interval[0] < found.step_seconds < found.interval[1]
    assert LAYOUTS[name].ranks == LAYOUTS[name].cluster.size
    assert 0.02 < found.mfu < 0.75


def test_a_reference_costs_a_forward_and_a_copy_its_parameters() -> None:
    plain, without, copied = (predict(made(reference=kind)) for kind in ("", "adapters_off", "copy"))
    forward = sum(without.seconds.values()) - sum(plain.seconds.values())
    assert plain.step_seconds / 5 < forward < plain.step_seconds / 2  # a third of what forward and backward take
    assert without.seconds == copied.seconds and without.memory == plain.memory
    assert copied.memory_bytes - plain.memory_bytes == pytest.approx(
        4 * presets()["llama2-7b"].parameters / 16, rel=0.01
    )


def test_conventions_of_flops() -> None:
    """Llama-2 7B at 4096: 6 x (6.74 - 0.13 looked up) + 12 x 32 x 4096 x 4096 GFLOPs a token; 8P has neither."""
    flops = presets()["llama2-7b"].flops_per_token(4096)
    assert presets()["llama2-7b"].parameters == pytest.approx(6.74e9, rel=2e-3)
    assert flops["palm"] == pytest.approx(6 * (6.738e9 - 0.131e9) + 12 * 32 * 4096 * 4096, rel=2e-3)
    assert flops["8P"] == pytest.approx(8 * 6.738e9, rel=2e-3)


def test_megatron_convention_is_the_papers() -> None:
    """72 L h^2 (1 + s/6h + V/12Lh), arXiv 2205.05198; biases and norms are a thousandth."""
    model, s = presets()["gpt3-175b"], 2048
    ell, h, v = model.layers, model.hidden, model.vocabulary
    paper = 72 * ell * h**2 * (1 + s / (6 * h) + v / (12 * ell * h))
    assert model.flops_per_token(s)["megatron-2022"] == pytest.approx(paper, rel=2e-3)


def test_ring_inside_a_node_is_the_formula() -> None:
    over = rank_group(made(cluster=cluster("p5.48xlarge:1"), shard=8), *state_axes())
    assert gather_seconds(8e9, over) == pytest.approx(7 / 8 * 8e9 / over.intra + 7 * over.hop)
    assert all_reduce_seconds(8e9, over) == pytest.approx(2 * gather_seconds(8e9, over))


def test_groups_follow_the_placement() -> None:
    inner = made(tensor=8, shard=2)
    assert rank_group(inner, Axis.TENSOR).nodes == 1 and rank_group(inner, *state_axes()).nodes == 2
    outer = replace(inner, placement="TPD")
    assert rank_group(outer, Axis.TENSOR).local == 4 and rank_group(outer, *state_axes()).nodes == 1


def test_direct_gathering_beats_the_ring_where_hops_are_many() -> None:
    over = rank_group(made(cluster=cluster("p4d.24xlarge:16"), shard=128), *state_axes())
    assert gather_seconds(1e8, over, "smddp") < gather_seconds(1e8, over, "hierarchical") < gather_seconds(1e8, over)


def test_nccl_scatters_what_smddp_gathers() -> None:
    """With nothing to hide behind, a block gathered twice directly and scattered once by a ring."""
    nodes, alone = cluster("p4d.24xlarge:16"), replace(stack_of("default"), overlap=1.0)
    exposed = made(cluster=nodes, shard=128, stack=alone, reduction="bf16", collectives="smddp")
    size, over = 2 * exposed.model.layer_parameters, rank_group(exposed, *state_axes())
    saved = predict(replace(exposed, collectives="nccl")).seconds["shard"] - predict(exposed).seconds["shard"]
    spared = 2 * exposed.model.layers * (gather_seconds(size, over) - gather_seconds(size, over, "smddp"))
    assert saved == pytest.approx(spared)


def test_joined_times_lie_between_the_longer_and_the_sum() -> None:
    assert overlapped_seconds(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert overlapped_seconds(3.0, 4.0, 1.0) == pytest.approx(7.0)
    assert overlapped_seconds(3.0, 0.0, 3.0) == 3.0


def test_tensor_ranks_of_this_package_copy_what_they_exchange_and_gather_again() -> None:
    """Where nodes share the tensor ranks, the second gathering of both regions' inputs is a quarter of the traffic."""
    layout: dict[str, Any] = {"tensor": 16, "shard": 1, "zero": 0, "sequence_parallel": True}
    row = (
        4096 * 4096 * 2 / rates(accelerator("H100"), stack_of("default"), "bf16").bandwidth
    )  # of a layer's activations
    for microbatch, passes in ((1, 0), (2, 20)):
        theirs = predict(made(**layout, microbatch=microbatch)).seconds
        own = predict(made(**layout, microbatch=microbatch, own_regions=True)).seconds
        exposed = theirs["tensor"] / stack_of("default").tensor_exposed  # four pairs a block
        assert 0.2 < (own["tensor"] - theirs["tensor"]) / exposed < 0.25
        copied = own["memory_bound"] - theirs["memory_bound"]
        assert copied == pytest.approx(32 * passes * microbatch * row)
    plain = {**layout, "sequence_parallel": False}
    copied = (
        predict(made(**plain, own_regions=True)).seconds["memory_bound"]
        - predict(made(**plain)).seconds["memory_bound"]
    )
    assert copied == pytest.approx(32 * 8 * row)


def test_small_products_waste_the_accelerator() -> None:
    speed = rates(accelerator("H100"), stack_of("default"), "bf16")
    large, small = (2 * n**3 / matmul_seconds(n, n, n, speed) / speed.flops for n in (8192, 256))
    assert 0.9 < large < 1.0 and small < 0.3


@pytest.mark.parametrize("index", range(8))
def test_memory_is_that_of_the_paper(index: int) -> None:
    """arXiv 2205.05198, figure 1: parameters and optimizer, and activations of the first stage, in GiB.

    The paper's states leave the embeddings out, and its gradients add up in fp32, which no cell says.
    """
    row = read_table(TABLES / "megatron_sequence_parallel_a100.csv")[8 + index]
    states, kept = (float(word.split("=")[1]) for word in row.text["notes"].split())
    causes, _ = footprint(
        replace(configuration(row), reduction="fp32", stack=replace(stack_of("default"), activations=1.0))
    )
    assert sum(causes[each] for each in ("parameters", "gradients", "optimizer")) / GIB == pytest.approx(
        states, rel=0.085
    )
    assert causes["activations"] / GIB == pytest.approx(kept, rel=0.01)


class _Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(self.down(torch.nn.functional.gelu(self.up(hidden))))


@pytest.mark.parametrize(("reentrant", "dropout", "again"), [(False, 0.0, 1), (True, 0.0, 2), (False, 0.1, 2)])
def test_torchs_checkpoint_stops_before_a_last_product_that_nothing_keeps(
    reentrant: bool, dropout: float, again: int
) -> None:
    """FLOPs of torch itself: of two products `again` many run once more."""
    mlp, hidden, flops = _Mlp(dropout), torch.randn(8, 16, requires_grad=True), []
    for run in (mlp, partial(checkpoint, mlp, use_reentrant=reentrant)):
        with FlopCounterMode(display=False) as counter:
            run(hidden).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[1] - flops[0] == again * 2 * 8 * 16 * 64


def test_recomputation_that_stops_early_spares_the_last_product() -> None:
    stack = replace(stack_of("default"), recompute=1.0)
    whole, early = (
        recomputed_work(given, block_work(given)[0])
        for given in (made(checkpointing="full", stack=replace(stack, stops_early=stops)) for stops in (False, True))
    )
    given = made(stack=stack)
    model, speed = given.model, rates(given.cluster.accelerator, stack, given.precision)
    last = matmul_seconds(4096, model.hidden, model.intermediate, speed)
    assert whole.matmul - early.matmul == pytest.approx(last) and early.device > 0.5 * whole.device
    assert (whole.attention, whole.memory_bound) == (early.attention, early.memory_bound)


def test_a_dropout_behind_the_last_product_keeps_recomputation_to_the_end() -> None:
    def stops(**model: object) -> bool:
        job = {"model": model, "data": {"sequence_length": 32}, "training": {"sequences_per_step": 4}}
        plan = resolve(Job.model_validate(job), World(4, "cpu", 4), FACTS)
        return configuration_of(plan, FACTS, cluster("cpu:4")).stack.stops_early

    assert stops() and not stops(dropout=0.1)


def test_more_sharding_needs_less_memory_and_checkpointing_more_time() -> None:
    whole, parts = predict(made(shard=2, replica=8)), predict(made())
    assert parts.memory_bytes < whole.memory_bytes
    full = predict(made(checkpointing="full"))
    assert full.memory["activations"] < parts.memory["activations"] and full.step_seconds > parts.step_seconds


def test_a_plan_becomes_the_configuration_it_runs() -> None:
    parallel = {"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2, "sharded_data_parallel_degree": 2}
    sizes = {"gradient_accumulation": 8, "sequences_per_step": 32}
    job = {"parallel": parallel, "training": sizes, "data": {"sequence_length": 32}}
    plan = resolve(Job.model_validate(job), World(4, "cpu", 4), FACTS)
    shape = ModelShape("tiny", 8, 10, 2, 2, 40, 50)
    found = configuration_of(plan, FACTS, cluster("cpu:4"), shape=shape)
    assert (found.pipeline, found.virtual, found.shard, found.accumulation, found.microbatch) == (2, 2, 2, 8, 2)
    assert found.sequences == 32 and found.precision == "fp32" and found.zero == 3
    assert math.isfinite(predict(found).step_seconds)


@pytest.mark.parametrize(
    ("strategy", "pipeline", "kept"), [("each", 1, 1), ("group_3", 1, 2), ("contiguous", 1, 8), ("each", 2, 0)]
)
def test_a_plan_says_which_blocks_wait_gathered_for_backward(strategy: str, pipeline: int, kept: int) -> None:
    job = {
        "parallel": {"pipeline_parallel_degree": pipeline},
        "memory": {"checkpoint_strategy": strategy, "activation_checkpointing": "full"},
        "training": {"sequences_per_step": 4},
        "data": {"sequence_length": 32},
    }
    made_plan = resolve(Job.model_validate(job), World(4, "cpu", 4), FACTS)
    assert configuration_of(made_plan, FACTS, cluster("cpu:4")).kept_blocks == kept


def test_blocks_that_wait_gathered_spare_a_gather_each() -> None:
    """With nothing to hide behind, of each kept block and microbatch exactly one all-gather; all of them kept is as if
    nothing were freed."""
    exposed = made(stack=replace(stack_of("default"), overlap=1.0), accumulation=4)
    freed, kept, whole = (predict(replace(exposed, kept_blocks=n)) for n in (0, 3, exposed.model.layers))
    one = gather_seconds(2 * exposed.model.layer_parameters, rank_group(exposed, *state_axes()))
    assert freed.seconds["shard"] - kept.seconds["shard"] == pytest.approx(4 * 3 * one)
    assert whole == predict(replace(exposed, reshard_after_forward=False))
    hidden = [predict(made(kept_blocks=n)).seconds["shard"] for n in (0, 1)]
    assert 0 < hidden[0] - hidden[1] < one


@pytest.mark.parametrize(
    "text, message",
    [
        ("p9.48xlarge:2", "Did you mean 'p"),
        ("p5.48xlarge:many", "no count of nodes"),
        ("H900:8", "not known"),
        ("nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_clusters_that_are_not_known(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(text)


def test_a_cluster_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("accelerator: H100\nnodes: 3\nper_node: 4\nintra: 450\ninter_gbps: 400\nfabric: ethernet\n")
    found = cluster(str(file))
    assert found.size == 12 and found.inter == 50 and found.fabric.name == "ethernet"
    file.write_text("accelerator: H100\nnode: 3\n")
    with pytest.raises(ConfigError, match="Did you mean 'nodes'"):
        cluster(str(file))


@pytest.mark.parametrize(
    ("text", "intra", "link", "inter"),
    [
        ("NVIDIA A100-SXM4-80GB:8", 300, "nvlink", 200),  # as torch names the device of a run
        ("p4d.24xlarge:2", 300, "nvlink", 50),
        ("h200:8", 450, "nvlink4", 400),
        ("MI300X:16", 448, "nvlink4", 400),
        ("NVIDIA GeForce RTX 4090:2", 32, "pcie", 12.5),
        ("l40s:16", 32, "pcie", 12.5),
    ],
)
def test_a_part_brings_its_own_links(text: str, intra: float, link: str, inter: float) -> None:
    found = cluster(text)
    assert (found.intra, found.link.name, found.inter) == (intra, link, inter)


def test_an_accelerator_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'H100"):
        accelerator("H1000 SXM")


def test_groups_that_lie_over_a_nodes_edge_are_between_nodes() -> None:
    """Of 6 tensor ranks on nodes of 8 the second group is on two nodes, and all wait for it."""
    inside, over = (
        rank_group(made(tensor=t, shard=48 // t, cluster=cluster("p5.48xlarge:6")), Axis.TENSOR) for t in (8, 6)
    )
    assert (inside.nodes, over.nodes > 1) == (1, True)
    alone = rank_group(made(tensor=6, shard=1, cluster=replace(cluster("p5.48xlarge:1"), per_node=6)), Axis.TENSOR)
    assert alone.nodes == 1
    size = 1e8
    assert gather_seconds(size, over) > 3 * gather_seconds(size, inside)


@pytest.mark.parametrize(("zero", "bytes_of_element"), [(3, 12), (1, 4 * 16 + 8), (0, 12 * 16)])
def test_copies_of_the_state_take_time_and_room_of_the_host(zero: int, bytes_of_element: int) -> None:
    plain, kept, seldom = (predict(made(zero=zero, kept_every=every)) for every in (0, 1, 10))
    elements = made().model.parameters / 16
    assert plain.host_bytes == plain.seconds["copies"] == 0.0
    assert kept.host_bytes == seldom.host_bytes == pytest.approx(2 * bytes_of_element * elements, rel=0.05)
    assert kept.seconds["copies"] == pytest.approx(10 * seldom.seconds["copies"])
    link = host_bandwidth(made().cluster.accelerator)
    assert kept.seconds["copies"] == pytest.approx(kept.host_bytes / 2 * (1 / link + 1 / KEPT), rel=1e-6)


def test_offloaded_parameters_take_time_and_room_of_the_host() -> None:
    plain, offloaded = (predict(made(offload_parameters=flag)) for flag in (False, True))
    elements = made().model.parameters / 16
    assert offloaded.host_bytes == pytest.approx(16 * elements, rel=0.05) and plain.host_bytes == 0
    assert offloaded.seconds["optimizer"] == pytest.approx(34 * elements / 25e9, rel=0.05)
    moved = 3 * 4 * elements / 12e9  # a copy forward, one backward, gradients back
    assert plain.seconds["offload"] == 0 < offloaded.seconds["offload"] < moved
    assert offloaded.step_seconds > plain.step_seconds
    longer = predict(made(offload_parameters=True, microbatch=8))
    assert longer.seconds["offload"] < offloaded.seconds["offload"]  # hidden behind more work
    assert cluster("h100:4").host_bytes == pytest.approx(256 * GIB)


def test_an_offloaded_optimizer_costs_less_beside_backward() -> None:
    plain, clipped, beside = (
        predict(made(offload_optimizer=share, updates_in_backward=ahead))
        for share, ahead in ((0.0, False), (0.5, False), (0.5, True))
    )
    assert plain.seconds["offload"] == 0.0 < beside.seconds["offload"] < clipped.seconds["offload"]
    assert clipped.memory["optimizer"] == beside.memory["optimizer"] < plain.memory["optimizer"]
    assert plain.host_bytes == 0.0 and beside.host_bytes == 1.5 * clipped.host_bytes
    assert clipped.seconds["optimizer"] == plain.seconds["optimizer"] / 2


def test_muons_iterations_take_products_and_traffic() -> None:
    def seconds(received: float, flops: float, **layout: Any) -> float:
        return predict(made(orthogonalized=(received, flops), **layout)).seconds["optimizer"]

    alone, shape = seconds(0.0, 0.0), {"shard": 8, "cluster": cluster("p5.48xlarge:1")}
    products = seconds(0.0, 1e13) - alone
    assert 1e13 / 989e12 < products < 1e13 / 400e12  # dense bf16 of an H100, and two fifths of it
    over_nodes, in_node = seconds(1e9, 0.0) - alone, seconds(1e9, 0.0, **shape) - seconds(0.0, 0.0, **shape)
    assert 1e9 / 450e9 < in_node < 1e9 / 200e9 and over_nodes > 1e9 / 400e9
    assert seconds(1e9, 1e13) == pytest.approx(alone + products + over_nodes)


def test_processes_of_a_cpu_share_their_hosts_memory(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("accelerator: cpu\nper_node: 4\nhost_gb: 64\n")
    found = [cluster(text).accelerator.memory_bytes / GIB for text in ("c5.xlarge:2", "m5.24xlarge:1", str(path))]
    assert found == [8, 384, 16]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accelerator: H100\nnodes: 2\nnodes: 4\n", "key 'nodes' is given twice"),
        ("accelerator: H100\n1: 2\n", "unknown key 1"),
        ("accelerator: H100\nnodes: true\n", "nodes=True has to be a number"),
    ],
)
def test_a_clusters_file_is_read_like_a_job(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        cluster(str(tmp_path / "mine.yaml"))


def test_a_clusters_file_has_whole_nodes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("accelerator: H100\nnodes: 2\nintra: 450\nhost_gb: 1024\n")
    found = cluster(str(path))
    assert (found.size, found.link.name, found.host_bytes) == (16, "nvlink4", 128 * GIB)
    path.write_text("accelerator: H100\nnodes: 1.5\n")
    with pytest.raises(ConfigError, match=r"nodes=1\.5 has to be a whole number"):
        cluster(str(path))
    with pytest.raises(ConfigError, match="12 accelerators do not fill nodes of 8"):
        cluster("l40s:12")
