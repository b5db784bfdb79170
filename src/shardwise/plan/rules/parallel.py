"""Rules about all ranks together: device, backend, the product of the degrees and their placement."""

from __future__ import annotations

from shardwise.job.axes import same_rows_ranks, splitting_specs
from shardwise.job.devices import Feature
from shardwise.plan.draft import Draft, placement_order
from shardwise.plan.rules.rule import Rule
from shardwise.words import divisors, one_of

SPLITTING_KEYS = tuple(spec.degree_key for spec in splitting_specs())

BACKENDS = {
    "nccl": "NCCL is for CUDA",
    "gloo": "Gloo is for a CPU",
    "xccl": "XCCL is for Intel's GPUs",
    "shardwise": "the engine is for CUDA and a CPU",
}


def _cannot_move(d: Draft) -> bool:
    asked, kind = d.parallel.ddp_dist_backend, d.world.kind
    if asked == "shardwise":
        return not kind.supports(Feature.ENGINE)
    return asked not in ("auto", kind.backend)


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("device", ("parallel.device",), "the ranks have to run on the device that the job names",
         lambda d: d.parallel.device not in ("auto", d.world.device_type),
         fix="use auto",
         because=lambda d: f"the ranks run on {d.world.device_type}"),
    Rule("device-ranks", ("parallel.device", "parallel.workers"), "something has to move tensors between the ranks",
         lambda d: d.world.size > 1 and not d.world.kind.supports(Feature.RANKS),
         fix="use workers 1, or device cpu",
         because=lambda d: d.world.kind.refusal(Feature.RANKS)),
    Rule("device-fp64", ("parallel.device", "precision.compute"), "the device has to compute in fp64",
         lambda d: d.compute == "fp64" and not d.world.kind.supports(Feature.FP64),
         fix="use fp32, or device cpu",
         because=lambda d: d.world.kind.refusal(Feature.FP64)),
    Rule("device-units", ("parallel.device", "precision.compute", "memory.offload_parameters"),
         "FSDP2 holds the parameters where compute has a dtype of its own or they lie on the host",
         lambda d: (d.compute in ("bf16", "fp16") or d.memory.offload_parameters)
         and not d.world.kind.supports(Feature.UNITS),
         fix="use fp32 without offload_parameters, or device cpu",
         because=lambda d: d.world.kind.refusal(Feature.UNITS)),
    Rule("device-dropout", ("parallel.device", "memory.activation_checkpointing", "model.attention"),
         "a checkpoint has to drop the same scores of attention again",
         lambda d: not d.world.kind.supports(Feature.REDRAWN) and d.memory.activation_checkpointing != "none"
         and d.facts.has_attention_dropout and not d.exact_dropout,
         fix="use activation_checkpointing none, or model.attention eager",
         because=lambda d: d.world.kind.refusal(Feature.REDRAWN)),
    Rule("backend", ("parallel.ddp_dist_backend",),
         "NCCL moves CUDA tensors, XCCL Intel's, Gloo a CPU's; the engine moves CUDA's and a CPU's", _cannot_move,
         fix="use auto",
         because=lambda d: f"{BACKENDS[d.parallel.ddp_dist_backend]}; the ranks run on {d.world.device_type}"),
    Rule("two-levels", ("parallel.collective_algorithm", "parallel.device"), "something has to carry both levels",
         lambda d: d.parallel.collective_algorithm not in ("auto", "flat")
         and not d.world.kind.supports(Feature.TWO_LEVELS),
         fix="use auto",
         because=lambda d: d.world.kind.refusal(Feature.TWO_LEVELS)),
    Rule("nccl-shared", ("parallel.ddp_dist_backend",), "NCCL joins one rank of each GPU",
         lambda d: d.parallel.ddp_dist_backend == "nccl" and d.world.shares_gpus,
         fix="use auto",
         because=lambda d: f"{d.world.nccl_refusal}; the engine moves their tensors through the host's memory",
         use=lambda d: f"use auto or shardwise, or {d.world.gpus} rank(s) a host"),
    Rule("world", SPLITTING_KEYS, "the product of the degrees has to divide the number of ranks",
         lambda d: d.world.size % same_rows_ranks(d.job),
         fix="use degrees whose product divides the number of ranks",
         because=lambda d: f"their product {same_rows_ranks(d.job)} does not divide the {d.world.size} ranks",
         use=lambda d: f"use a product of {one_of(divisors(d.world.size))}"),
    Rule("placement", ("parallel.placement_strategy",), "has to hold D, P and T once each",
         lambda d: placement_order(d.parallel.placement_strategy) is None,
         fix="use cluster (DPT), spread (TPD) or another permutation of D, P and T"),
)
# fmt: on
