"""Rules about compiled blocks and their capture in CUDA graphs."""

from __future__ import annotations

from shardwise.job.devices import Feature
from shardwise.plan.draft import Draft
from shardwise.plan.rules.checkpointing import CHECKPOINTING, STRATEGY, checkpoints_groups, no_checkpointing
from shardwise.plan.rules.parallel import SPLITTING_KEYS
from shardwise.plan.rules.rule import Rule

GRAPHS = "model.cuda_graphs"


def _not_compilable(d: Draft) -> bool:
    return d.memory.activation_checkpointing == "selective" or checkpoints_groups(d) or d.memory.offload_activations


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("compile-blocks", ("model.compile",), "blocks are compiled one by one, and this model has no repeated blocks",
         lambda d: d.model.compile and not d.facts.blocks,
         fix="use false"),
    Rule("compile-memory", ("model.compile", CHECKPOINTING, STRATEGY, "memory.offload_activations"),
         "a compiled block can be checkpointed in full and by itself, without offload",
         lambda d: d.model.compile and _not_compilable(d),
         fix="use model.compile false, or checkpointing none or full, strategy each and offload_activations false"),
    Rule("graphs-compile", (GRAPHS, "model.compile"), "what is captured are compiled blocks",
         lambda d: d.model.cuda_graphs and not d.model.compile,
         fix="use model.compile true"),
    Rule("graphs-device", (GRAPHS, "parallel.device"), "CUDA graphs need a GPU",
         lambda d: d.model.cuda_graphs and not d.world.kind.supports(Feature.GRAPHS),
         fix="use cuda_graphs false",
         because=lambda d: d.world.kind.refusal(Feature.GRAPHS)),
    Rule("graphs-alone", (GRAPHS, *SPLITTING_KEYS), "a graph reads weights where they were when it was captured",
         lambda d: d.model.cuda_graphs and d.world.size > 1,
         fix="use one rank, or cuda_graphs false",
         because=lambda d: f"{d.world.size} ranks gather weights and exchange activations, each time in other memory"),
    Rule("graphs-dtype", (GRAPHS, "precision.compute"), "weights that are cast for each step are never in place",
         lambda d: d.model.cuda_graphs and d.compute in ("bf16", "fp16"),
         fix="use precision.compute fp32, or cuda_graphs false",
         because=lambda d: f"weights are fp32, and cast to {d.compute} in other memory each time"),
    Rule("graphs-memory", (GRAPHS, CHECKPOINTING, "memory.offload_parameters", "training.gradient_accumulation"),
         "a graph's memory is its own until the step ends",
         lambda d: d.model.cuda_graphs and (not no_checkpointing(d) or d.memory.offload_parameters
                                            or d.accumulation.value > 1),
         fix="use checkpointing none, offload_parameters false and one microbatch, or cuda_graphs false"),
)
# fmt: on
