"""Cases of the rules in `plan/rules/offload.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import FULL, case

CASES = {
    "offload-parameters": case(
        {"memory": {"offload_parameters": True}, "parallel": {"shard_optimizer_state": True}},
        {"memory": {"offload_parameters": True}},
        "sharded_data_parallel_degree",
    ),
    "offload-activations": case(
        {"memory": {"offload_activations": True}},
        {"memory": {"offload_activations": True, **FULL}},
        "activation_checkpointing to full",
    ),
}
