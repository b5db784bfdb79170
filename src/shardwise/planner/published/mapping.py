"""A TrainingConfiguration of a row: what it states, and by rule what it leaves open.

Nothing here or in the cost models looks at a table's or source's name. Of a row's own words only those that name a
setting or a network are read. Cells that contradict each other leave a row unmapped, with both of them named.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.planner.formulas.communication import ExpertGroups
from shardwise.planner.formulas.prediction import ModelShape, Stack, TrainingConfiguration
from shardwise.planner.published.row import Row, Unmapped
from shardwise.planner.published.row_cluster import cluster_of_row
from shardwise.planner.published.row_model import model_of
from shardwise.planner.published.row_settings import (
    captured_launches,
    checkpointing,
    collectives,
    copies_on_nodes,
    drops_rows,
    fused_attention,
    has_adapters,
    precision,
    reduction,
    sharding,
)
from shardwise.planner.published.unstated import with_checkpointing, with_microbatch

APART = 0.1  # of two cells that say the same, by which they may differ; sources round
NODE = 8  # accelerators of a usual node
ADAPTER_RANK = 16  # of adapters where a strategy names them alone


class MappedRow(NamedTuple):
    """Configuration of a row, without fitted constants (`Constants.applied` has them), and words for its open cells."""

    configuration: TrainingConfiguration
    taken: tuple[str, ...]


class Degrees(NamedTuple):
    """Ranks of the axes that a row names; `data` are those with different sequences."""

    data: int
    tensor: int
    pipeline: int
    context: int


def configuration(row: Row) -> TrainingConfiguration:
    """Return what the row ran. Raises Unmapped."""
    return mapped(row).configuration


@lru_cache(maxsize=8192)
def mapped(row: Row) -> MappedRow:
    """Return what the row ran, and what was taken for cells that state nothing. Raises Unmapped."""
    _check_speed(row)
    tensor, pipeline, context = (row.whole(column, 1) for column in ("tp", "pp", "cp"))
    cluster = cluster_of_row(row, tensor * pipeline * context)
    degrees = Degrees(_data_ranks(row, cluster.size, tensor * pipeline, context), tensor, pipeline, context)
    batch = _batch(row, degrees.data)
    model = model_of(row)
    settings: dict[str, Any] = {
        **_settings(row, degrees, model),
        "checkpointing": "none",
        "microbatch": batch.microbatch or 1,
        "accumulation": batch.accumulation or 1,
    }
    if row.says("act_ckpt"):
        settings["checkpointing"], settings["checkpointed"] = checkpointing(row)
    given = TrainingConfiguration(model=model, cluster=cluster, stack=Stack(row.text["stack"]), **settings)
    return _with_open_cells(row, given, batch)


def _with_open_cells(row: Row, given: TrainingConfiguration, batch: RowBatch) -> MappedRow:
    """Return `given` with the planner's own choice of what `row` leaves open, and the words that say so."""
    taken = [f"{column} {row.text[column]} as suggested" for column in row.suggested]
    if batch.microbatch is None:
        given = with_microbatch(given, batch.sequences, batch.accumulation, not row.says("act_ckpt"))
        taken.append(f"mbs {given.microbatch} and grad_accum {given.accumulation}")
    if not row.says("act_ckpt"):
        given = with_checkpointing(given)
        taken.append(f"act_ckpt {given.checkpointing}")
    if given.expert > 1 and not row.says("dispatcher"):
        once = _sends_once(row, given)
        given = replace(given, copies_on_nodes=once, sorts_rows=once)
        taken.append("rows once to each node" if given.copies_on_nodes else "each copy of a row alone")
    if _hides(given):
        given = replace(given, hides_exchange=True)
        taken.append("exchanges over the network beside another microbatch")
    if row.has_experts:
        taken.append(f"the fullest rank with {given.imbalance:g} times the mean of the rows")
    return MappedRow(given, tuple(taken))


def _sends_once(row: Row, given: TrainingConfiguration) -> bool:
    """Return whether an exchange that nobody names has kernels of its own, which send a row once and sort it.

    HybridEP's are for links beyond a node, and know no capacity: Megatron's moe_expert_capacity_factor goes with the
    plain all-to-all alone, which is also its default.
    """
    return row.whole("gpus_per_node", NODE) > NODE and not given.drops_rows


def _hides(given: TrainingConfiguration) -> bool:
    """Return whether exchanges over the network run beside another microbatch, for which stages have to interleave.

    Configurations that were published with a capacity do not (Megatron-Bridge 4054233, scripts/performance).
    """
    over_network = given.expert > 1 and ExpertGroups.of(given).sharing.nodes > 1
    return over_network and given.pipeline > 1 and given.virtual > 1 and not given.drops_rows


def _settings(row: Row, degrees: Degrees, model: ModelShape) -> dict[str, Any]:
    zero = row.whole("zero_stage", sharding(row))
    shard = min(degrees.data, row.whole("sdp", degrees.data if zero else 1))
    strategy = row.text.get("strategy", "").lower()
    return {
        "sequence": row.whole("seq"),
        "replica": max(1, degrees.data // shard),
        "shard": shard,
        "context": degrees.context,
        "tensor": degrees.tensor,
        "pipeline": degrees.pipeline,
        "expert": _expert_ranks(row, degrees),
        "virtual": row.whole("vpp", 1),
        "sequence_parallel": row.is_true("sp") and degrees.tensor > 1,
        "zero": zero,
        "placement": "PDT",
        "precision": precision(row),
        "reduction": reduction(row),
        "gathers_float8": zero == 3 and precision(row) == "fp8",
        "whole_in_step": zero == 3 and degrees.pipeline > 1,
        "offload_activations": "act" in row.text.get("offload", ""),
        "flash": fused_attention(row),
        "compile": row.is_true("compile"),
        # Who says nothing of torch.compile has blocks that are tuned by hand.
        "fused": fused_attention(row) and not row.says("compile"),
        "dropout": row.text["mlp"] == "gelu" and row.text["flash"] == "0",
        "collectives": collectives(row),
        "scattered_messages": True,
        "async_tensor": "asynctp" in strategy.replace("-", ""),
        "trained": model.adapter_share(ADAPTER_RANK) if has_adapters(row) else 1.0,
        "captured": captured_launches(row),
        "copies_on_nodes": copies_on_nodes(row),
        "sorts_rows": copies_on_nodes(row),
        "drops_rows": drops_rows(row),
        "imbalance": 1.0,  # who measures the speed of experts shares rows out evenly
    }


def _expert_ranks(row: Row, degrees: Degrees) -> int:
    """Return the ranks that share experts, which are data and tensor ranks of one stage."""
    expert = row.whole("ep", 1)
    experts, ranks = row.whole("experts", 1), degrees.data * degrees.tensor * degrees.context
    if expert > 1 and experts % expert:
        raise Unmapped(f"column ep: {expert} ranks cannot share experts={experts}")
    if ranks % expert:
        raise Unmapped(f"row {row.id}, columns ep and n_gpus: {expert} ranks of the {ranks} that dp, tp and cp leave")
    return expert


def _data_ranks(row: Row, size: int, model_ranks: int, context: int) -> int:
    """Return the ranks with sequences of their own. Raises Unmapped where the degrees contradict the ranks."""
    data = row.whole("dp", max(1, size // (model_ranks * context)))
    if data == size // model_ranks > size // (model_ranks * context):
        data //= context  # ranks that share sequences are among them
    if data * model_ranks * context != size:
        raise Unmapped(
            f"column n_gpus: dp x tp x pp x cp is not {size}: {data} x {row.whole('tp', 1)} x {row.whole('pp', 1)} x "
            f"{context}"
        )
    return data


class RowBatch(NamedTuple):
    """Sequences of a microbatch and microbatches of a step, of one data rank, and their product; None: not stated."""

    microbatch: int | None
    accumulation: int | None
    sequences: int | None = None


def _batch(row: Row, data: int) -> RowBatch:
    """Return the batch; what is missing follows from the global batch. Raises Unmapped where cells contradict it."""
    _check_batch(row, data)
    total = row.numbers.get("gbs", math.nan) / data
    stated = row.whole("grad_accum") if "grad_accum" in row.numbers else None
    if "mbs" in row.numbers:
        microbatch = row.whole("mbs")
        if microbatch < 1:
            raise Unmapped(f"column mbs: {row.numbers['mbs']:g} is no whole sequence")
        derived = total / microbatch
        usual = 2 * row.whole("pp", 1) if row.whole("pp", 1) > 1 else 1
        return RowBatch(microbatch, stated or int(derived if derived >= 1 else usual))
    if total >= (stated or 1):
        return RowBatch(int(total / stated), stated) if stated else RowBatch(None, None, int(total))
    if not math.isnan(total) or "step_s" in row.numbers:
        raise Unmapped("neither mbs nor a gbs to derive it from is stated")
    return RowBatch(None, stated)


def _check_batch(row: Row, data: int) -> None:
    """Raise Unmapped where microbatches of all data ranks are not the global batch."""
    stated = [column for column in ("mbs", "grad_accum") if column in row.numbers]
    if "gbs" not in row.numbers or not stated:
        return
    total, said = row.numbers["gbs"], " x ".join(["dp", *stated])
    sequences = data * math.prod(row.numbers[column] for column in stated)
    if sequences > total or (len(stated) == 2 and sequences != total):
        raise Unmapped(f"row {row.id}, columns {said} and gbs: {said} is {sequences:g} beside gbs {total:g}")


def _check_speed(row: Row) -> None:
    """Raise Unmapped where a step's time is not that of its tokens a second."""
    needed = ("step_s", "tok_s_gpu", "n_gpus", "gbs", "seq")
    if not set(needed) <= row.numbers.keys():
        return
    step, speed, ranks, sequences, length = (row.numbers[column] for column in needed)
    own = sequences * length / (speed * ranks)
    if not 1 - APART < own / step < 1 + APART:
        raise Unmapped(f"row {row.id}, columns step_s and tok_s_gpu: {step:g} s beside {speed:g}, which is {own:g} s")
