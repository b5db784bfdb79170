"""The record of one step, as metrics.jsonl, the display and the trackers get it."""

from __future__ import annotations

from shardwise.checkpoint.manifest import Progress
from shardwise.data.streaming.loader import ALONE, position_key
from shardwise.data.token_data import TokenData
from shardwise.job.tasks import TASKS
from shardwise.model.facts import ModelFacts
from shardwise.observe.metrics import Record
from shardwise.plan.plan import Plan
from shardwise.planner.constants.hardware import peak_tflops
from shardwise.training.rank_figures import figures_of_step
from shardwise.training.setup import AssembledJob
from shardwise.training.step import StepResult


def step_record(
    assembled: AssembledJob,
    progress: Progress,
    result: StepResult,
    learning_rate: float,
    length: int,
    seconds: float,
) -> Record:
    """Return the record of the step that has brought the run to `progress`. Collective.

    Args:
        learning_rate: of the step.
        length: tokens of each of its sequences.
        seconds: of the whole step on this rank, its batches read.
    """
    plan, facts = assembled.plan, assembled.facts
    per_second = result.count / seconds
    sequences = plan.sequences_of(progress.step - 1)
    computed = _positions(assembled, sequences, length, result.count) / seconds
    record: Record = {
        "step": progress.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        "tokens": progress.tokens,
        "tokens_per_second": per_second,
        **flops_figures(plan, facts, computed, length),
        **(result.figures or figures_of_step(assembled.model.device, seconds)),
        "skipped": result.skipped,
        "data_hash": progress.data_hash,
        "seconds": seconds,
    }
    if result.routers is not None:
        record |= {"expert_load": max(result.routers.load.values()), "idle_experts": result.routers.idle}
        record |= {"balancing_loss": result.routers.balancing_loss} if plan.balancing_coefficient else {}
    record |= result.metrics
    if plan.step_sizes.grow:
        record["sequences"] = sequences
    if plan.sequence_lengths.grow:
        record["sequence_length"] = length
    if assembled.given_data is not None and assembled.given_data.sources:
        read = sources_read(assembled.given_data, progress)
        record |= {f"passes/{name}": source["passes"] for name, source in read.items()}
    return record | ({"loss_scale": result.loss_scale} if plan.dtypes.compute == "fp16" else {})


def _positions(assembled: AssembledJob, sequences: int, length: int, count: int) -> float:
    """Return the positions that a step computes, whichever of them are trained on.

    They are what is counted where nothing else tells: of an encoder-decoder, whose two sides have other lengths, of a
    module or a loop of one's own, and of a factory's samples but where they are classified at a length that is given.
    """
    plan, facts = assembled.plan, assembled.facts
    data = plan.job.data
    if data.has_rows:
        return sequences * facts.positions(plan.sequence_length)
    if facts.sample_positions is not None:
        return sequences * facts.positions(length)
    is_known = assembled.given_data is not None and (facts.returns_logits or facts.classifies)
    if data.factory is not None:
        is_known = is_known and facts.classifies and "sequence_length" in data.model_fields_set
    return sequences * length if is_known and TASKS[plan.job.model.task].labels != "decoder" else count


def flops_figures(plan: Plan, facts: ModelFacts, positions: float, length: int) -> dict[str, float | None]:
    """Return the TFLOPs of so many positions a second, in sequences of `length`; None where nobody knows how many."""
    if facts.sample_positions == 0:
        return dict.fromkeys(("tflops_per_rank", "smp_tflops_per_rank", "mfu"))
    per_rank = positions / plan.world.size / 1e12
    tflops = per_rank * facts.model_flops_per_token(facts.positions(length))
    peak = plan.job.observe.peak_tflops or peak_tflops(plan.world.accelerator, plan.dtypes.compute)
    return {
        "tflops_per_rank": tflops,
        "smp_tflops_per_rank": per_rank * facts.smp_flops_per_token(),
        "mfu": tflops / peak if peak else None,
    }


def sources_read(data: TokenData, progress: Progress) -> dict[str, dict[str, float]]:
    """Return how much of each source of the data a run has read; of one corpus under the name `data`.

    Nobody has counted the sequences of a stream: its passes are those of the shards behind it.
    """
    sizes = {source.name: len(source.data.train) for source in data.sources} or {"data": len(data.train)}
    counts = {name: progress.sources.get(name, 0) for name in sizes} if data.sources else {"data": progress.samples}
    total, read = sum(counts.values()) or 1, dict[str, dict[str, float]]()
    for name, count in counts.items():
        read[name] = {"samples": count, "share": count / total}
        key = name if data.sources else ALONE
        if key in data.streams:
            shards = len(data.streams[key].definition.shards)
            read[name] |= {"passes": progress.position.get(position_key(key, "shard"), 0) / shards, "shards": shards}
        else:
            read[name] |= {"passes": count / sizes[name], "sequences": sizes[name]}
    return read
