"""The batch of a run whose number of ranks changes: that of all its hosts, whoever of them is there."""

from __future__ import annotations

from shardwise.job.schema import Job
from shardwise.plan.draft import Draft
from shardwise.plan.plan import World


def with_fixed_batch(job: Job, world: World) -> tuple[Job, str]:
    """Return the job with the sequences of a step as `world` has them, and a sentence where it had left them open.

    `gradient_accumulation` is that of all ranks. Fewer take more microbatches of the same size.
    """
    training = job.training
    if training.gradient_accumulation is None:
        return job, ""  # the batch is given, or the default: no number of it depends on the ranks
    draft = Draft(job, world)
    batch = {"sequences_per_step": draft.sequences.value, "microbatch_size": draft.microbatch.value}
    fixed = training.model_copy(update={**batch, "gradient_accumulation": None, "tokens_per_step": None})
    return job.model_copy(update={"training": fixed}), (
        f"a step has {draft.sequences.value} sequences ({draft.sequences.rule}) on any number of hosts; fewer take "
        f"more than {training.gradient_accumulation} microbatches of {draft.microbatch.value}."
    )
