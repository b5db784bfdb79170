"""Rules about all ranks together: device, backend, the product of the degrees and their placement."""

from __future__ import annotations

from shardwise.job.axes import same_rows_ranks, splitting_specs
from shardwise.plan.draft import placement_order
from shardwise.plan.rules.rule import Rule
from shardwise.words import divisors, one_of

SPLITTING_KEYS = tuple(spec.degree_key for spec in splitting_specs())

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("device", ("parallel.device",), "the ranks have to run on the device that the job names",
         lambda d: d.parallel.device not in ("auto", d.world.device_type),
         fix="use auto",
         because=lambda d: f"the ranks run on {d.world.device_type}"),
    Rule("backend", ("parallel.ddp_dist_backend",), "NCCL moves CUDA tensors, Gloo CPU tensors; the engine moves both",
         lambda d: d.parallel.ddp_dist_backend == {"cpu": "nccl", "cuda": "gloo"}[d.world.device_type],
         fix="use auto",
         because=lambda d: f"NCCL is for CUDA, Gloo for a CPU; the ranks run on {d.world.device_type}"),
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
