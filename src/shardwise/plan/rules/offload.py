"""Rules about what is kept in the host's memory."""

from __future__ import annotations

from shardwise.job.objects import is_reference
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizers import ELEMENTWISE, is_elementwise, is_known
from shardwise.plan.draft import Draft
from shardwise.plan.rules.checkpointing import CHECKPOINTING, no_checkpointing
from shardwise.plan.rules.optimizer import OWN_CLASS, optimizer_sections
from shardwise.plan.rules.rule import Rule
from shardwise.words import one_of

OPTIMIZER = "memory.offload_optimizer"
UPDATED_ALONE = (*ELEMENTWISE, *(name for name, record in RECORDS.items() if record.elementwise))


def _needs_others(d: Draft) -> str:
    """Return the first optimizer of a job whose update reads more than an element's own history; or an empty string."""
    names = (section.name for section in optimizer_sections(d))
    return next((name for name in names if is_known(name) and not is_elementwise(name)), "")


def _is_capturable(d: Draft) -> bool:
    return any(section.options.get("capturable") for section in optimizer_sections(d))


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("offload-parameters", ("memory.offload_parameters", "parallel.shard_optimizer_state"),
         "offload keeps shards of parameters on the host, and shard_optimizer_state leaves parameters whole",
         lambda d: d.memory.offload_parameters and d.parallel.shard_optimizer_state,
         fix="use sharded_data_parallel_degree instead of shard_optimizer_state"),
    Rule("offload-activations", ("memory.offload_activations", CHECKPOINTING),
         "what is offloaded are the kept activations of checkpointed blocks",
         lambda d: d.memory.offload_activations and no_checkpointing(d),
         fix=f"set {CHECKPOINTING} to full"),
    Rule("offload-optimizer", (OPTIMIZER, "memory.offload_parameters"),
         "offload_parameters keeps all optimizer state in host memory already",
         lambda d: d.memory.offload_optimizer and d.memory.offload_parameters,
         fix="leave one of them out"),
    Rule("offload-optimizer-class", (OPTIMIZER, "optimizer.name", "optimizer.groups"),
         "an update in host memory may read each element's own history alone",
         lambda d: d.memory.offload_optimizer and _needs_others(d),
         fix="leave offload_optimizer out, or use an elementwise optimizer such as AdamW",
         because=lambda d: f"{_needs_others(d)} reads more than an element's own history, and an update in host memory "
         "may not",
         use=lambda d: f"leave {OPTIMIZER} out, or use {one_of(UPDATED_ALONE)}"
         f"{OWN_CLASS if is_reference(_needs_others(d)) else ''}"),
    Rule("offload-optimizer-capturable", (OPTIMIZER, "optimizer.options", "optimizer.groups"),
         "capturable updates run on a GPU alone",
         lambda d: d.memory.offload_optimizer and _is_capturable(d),
         fix="leave capturable out"),
)
# fmt: on
