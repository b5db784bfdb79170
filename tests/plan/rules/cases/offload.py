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
    "offload-optimizer": case(
        {"memory": {"offload_optimizer": True, "offload_parameters": True}},
        {"memory": {"offload_optimizer": True}},
        "leave one of them out",
    ),
    "offload-optimizer-class": case(
        {"memory": {"offload_optimizer": 0.5}, "optimizer": {"name": "Adafactor"}},
        {"memory": {"offload_optimizer": 0.5}},
        "leave memory.offload_optimizer out, or use",
    ),
    "offload-optimizer-capturable": case(
        {"memory": {"offload_optimizer": True}, "optimizer": {"options": {"capturable": True}}},
        {"memory": {"offload_optimizer": True}},
        "leave capturable out",
    ),
}
