"""Cases of the rules in `plan/rules/packed_base.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.tensor_split import TensorSplit
from tests.plan.rules.cases.adapters import STACKED, adapter_case
from tests.plan.rules.jobs import FACTS, case

BLOCKS = replace(
    FACTS,
    parameter_shapes={"layers.0.down.weight": (64, 192)},
    linears={"layers.0.down": (192, 64)},
    tensor_splits={"layers.0.down": TensorSplit("row", dim=1)},
)
PACKED = {"base": "nf4", "rank": 2}
WITH_PATH: dict[str, Any] = {"model": {"path": "base"}}
CASES = {
    "adapter-base": case({"adapter": {"base": "nf4"}}, {}, "there is no adapter"),
    "adapter-base-path": adapter_case(PACKED, {}, "model.path=None: only weights of a directory", BLOCKS),
    "adapter-base-stacks": adapter_case(PACKED, {}, "stacks of experts have no packed form", STACKED, **WITH_PATH),
    "adapter-base-fp8": adapter_case(
        PACKED, {}, "are multiplied in the compute dtype", BLOCKS,
        precision={"fp8": "emulate", "fp8_layers": "all"}, **WITH_PATH,
    ),
    "adapter-base-blocks": adapter_case(
        PACKED, {"rank": 2}, "rows of layers.0.down.weight have 96 elements as one of 2 tensor ranks has them", BLOCKS,
        parallel={"tensor_parallel_degree": 2}, **WITH_PATH,
    ),
}  # fmt: skip
