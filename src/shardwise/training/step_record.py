"""The record of one step, as metrics.jsonl, the display and the trackers get it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.checkpoint.manifest import Progress
from shardwise.observe.memory import peak_memory_bytes
from shardwise.observe.metrics import Record
from shardwise.planner.constants.hardware import peak_tflops
from shardwise.training.setup import AssembledJob
from shardwise.training.step import StepResult


def step_record(
    assembled: AssembledJob, progress: Progress, result: StepResult, learning_rate: float, seconds: float
) -> Record:
    """Return the record of the step that has brought the run to `progress`. Collective: peaks of memory are gathered.

    Args:
        learning_rate: of the step.
        seconds: of the whole step on this rank, its batches read.
    """
    plan, facts = assembled.plan, assembled.facts
    per_second = result.count / seconds
    # What is computed are all positions, whichever of them are trained on.
    reads_rows = plan.job.data.has_rows
    computed = plan.sequences_per_step * plan.sequence_length / seconds if reads_rows else per_second
    tflops = computed * facts.model_flops_per_token(plan.sequence_length) / plan.world.size / 1e12
    peak = plan.job.observe.peak_tflops or peak_tflops(plan.world.accelerator, plan.dtypes.compute)
    record: Record = {
        "step": progress.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        "tokens": progress.tokens,
        "tokens_per_second": per_second,
        "tflops_per_rank": tflops,
        "smp_tflops_per_rank": computed * facts.smp_flops_per_token() / plan.world.size / 1e12,
        "mfu": tflops / peak if peak else None,
        "peak_memory_bytes": _peak_memory(assembled),
        "skipped": result.skipped,
        "data_hash": progress.data_hash,
        "seconds": seconds,
    }
    if result.routers is not None:
        record["expert_load"] = max(result.routers.load.values())
        record |= {"balancing_loss": result.routers.balancing_loss} if plan.balancing_coefficient else {}
    record |= result.metrics
    return record | ({"loss_scale": result.loss_scale} if plan.dtypes.compute == "fp16" else {})


def _peak_memory(assembled: AssembledJob) -> list[int]:
    """Return the peak bytes of every rank."""
    device = assembled.model.device
    own = torch.tensor([peak_memory_bytes(device)], dtype=torch.int64, device=device)
    peaks = [torch.empty_like(own) for _ in range(assembled.plan.world.size)]
    dist.all_gather(peaks, own)
    return [int(peak) for peak in peaks]
