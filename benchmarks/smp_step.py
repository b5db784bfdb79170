"""What a script of SMP, version 1, costs: its `@smp.step` and optimizer beside the engine's own step, at one layout.

    python -m benchmarks.smp_step --rounds 9 --steps 2 --json result.json

Over Gloo, and over the native engine (`--axes shard`, `--axes engine` for one of them).
Both load the same weights and take the same batch on four CPU ranks over which parameters are sharded, in the same
rounds, and must show the same losses. The ratio is shardwise's speed over the script's, the median of the rounds: up to
1.05 is what a script may cost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import parallelism_cpu
from benchmarks.harness import Contender, Step
from benchmarks.parallelism_cpu import RANKS, Axis
from benchmarks.parallelism_peers import load_model
from benchmarks.workload import Workload, parameter_groups, token_ids
from shardwise.collectives import registration

SCRIPT = Contender("smp script", "benchmarks.smp_step:script", "shardwise", "@smp.step, DistributedOptimizer")
SHARDED = Axis("shard", {"sharded_data_parallel_degree": RANKS}, (SCRIPT,), reshard=True)  # the default of both
ON_ENGINE = replace(SHARDED, peers=(replace(SCRIPT, backend=registration.BACKEND),), backend=registration.BACKEND)
AXES = {"shard": SHARDED, "engine": ON_ENGINE}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when losses disagree or a contender did not run."""
    return parallelism_cpu.main(arguments, AXES)


def script(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """The step of a script; it clips no gradients, as its peer does not."""
    import shardwise.smp as smp
    from shardwise.launch.heap import keep_freed_memory

    keep_freed_memory()  # as where a script's own smp.init joins the ranks; here the benchmark has
    smp.init({"ddp": True, "sharded_data_parallel_degree": world, "sdp_gradient_clipping": 0.0})
    model = smp.DistributedModel(load_model(directory))
    groups = parameter_groups(model, workload)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=workload.learning_rate, fused=True))
    ids = token_ids(workload, 0).chunk(world)[rank]

    @smp.step
    def forward_backward(model: smp.DistributedModel, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = forward_backward(model, ids).reduce_mean()
        optimizer.step()
        return loss

    return step


if __name__ == "__main__":
    raise SystemExit(main())
