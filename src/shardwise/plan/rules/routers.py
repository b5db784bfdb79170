"""Rules about the routers of experts: what they are asked for needs routers that can be watched."""

from __future__ import annotations

from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle

BALANCING, COEFFICIENT = "router.balancing_loss", "router.balancing_coefficient"
LOSSES = (BALANCING, "router.z_loss")
LOCAL = ("model", "sequence")


def _has_losses(d: Draft) -> bool:
    return d.balances or d.job.router.z_loss > 0


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("router-model", LOSSES, "the model has to have routers whose logits transformers records, of as many experts "
         "in every layer",
         lambda d: _has_losses(d) and not d.facts.routers,
         fix="use balancing_loss none and z_loss 0",
         because=lambda d: f"{d.facts.family} has no router that transformers records beside experts that take its "
         "weights, or other numbers of experts in other layers"),
    Rule("router-coefficient", (BALANCING, COEFFICIENT), "the balancing loss needs a factor",
         lambda d: d.balances and d.job.router.balancing_coefficient is None and not d.facts.balancing_coefficient,
         fix="set router.balancing_coefficient, 0.01 say"),
    Rule("router-whole-sequences", (BALANCING, "parallel.context_parallel_degree", "parallel.sequence_parallel"),
         "losses of sequences and microbatches are taken where their tokens are whole",
         lambda d: d.job.router.balancing_loss in LOCAL and (d.parallel.context_parallel_degree > 1
                                                             or d.parallel.sequence_parallel),
         fix="use balancing_loss layer or global"),
    Rule("router-all-layers", (BALANCING, "parallel.pipeline_parallel_degree"),
         "transformers takes its loss over all layers of a microbatch, which no stage has",
         lambda d: d.job.router.balancing_loss == "model" and d.parallel.pipeline_parallel_degree > 1,
         fix="use balancing_loss sequence, layer or global"),
    Rule("router-microbatch", (BALANCING, "training.microbatch_size"),
         "the model's own loss depends on which sequences share a microbatch, so that its size has to be given",
         lambda d: d.job.router.balancing_loss == "model" and d.training.microbatch_size is None,
         fix="set training.microbatch_size, or use balancing_loss layer or global"),
    idle("router-idle", COEFFICIENT, "there is no balancing loss", lambda d: not d.balances,
         "set router.balancing_loss layer, or leave it out"),
    Rule("router-bias", ("router.bias_update_rate",), "the model has to have routers with a bias on their scores",
         lambda d: d.job.router.bias_update_rate and not d.facts.router_biases,
         fix="leave it out",
         because=lambda d: f"{d.facts.family} has no router with e_score_correction_bias that transformers records"),
)
# fmt: on
