"""A step of Muon over ranks that shard every matrix, beside public Muons for FSDP2's parameters.

    python -m benchmarks.muon_cpu --json result.json

Every contender updates matrices of the same shapes, sharded alike over the ranks of one Gloo group, with five
Newton-Schulz iterations in bf16; nesterov momentum and weight decay are on. A round gives each of them one step in
turn, so that a slow minute hits all; the slowest rank's time counts. Peers are optional packages: muon-fsdp2, which
gathers each matrix on one rank, and torch's own class on gathered gradients, which every rank orthogonalizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.record import header, write_json
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.plan.plan import resolve
from shardwise.testing.world import WorldPool
from shardwise.training.init import initialize
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.optimizers.combined import CombinedOptimizer
from shardwise.training.optimizers.muon import Muon
from shardwise.training.setup import current_world

PACKAGES = ("torch", "transformers", "shardwise", "muon-fsdp2")
OURS = "shardwise"
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 when a peer is faster."""
    options, by_rank = run_ranks("muon_cpu", __doc__, measure, arguments, rounds=15)
    seconds = {
        name: [max(rounds) for rounds in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]
    }
    Console(width=None if sys.stdout.isatty() else 120).print(render(seconds))
    if options.json:
        record = {"options": {**vars(options), "json": None}, "seconds": seconds}
        write_json(options.json, {**header(PACKAGES), **record})
    return int(any(ratio(seconds, peer) < 1.0 for peer in seconds))


def run_ranks(
    name: str, doc: str | None, measure: Callable[..., Any], arguments: Sequence[str] | None, rounds: int
) -> tuple[argparse.Namespace, list[Any]]:
    """Return the options of benchmark `name`, and what `measure(layers, width, rounds)` returned on each rank."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=(doc or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    options = parser.parse_args(arguments)
    with WorldPool(limit=options.ranks, timeout=1800.0) as pool:
        return options, pool.run(options.ranks, measure, options.layers, options.width, options.rounds)


def measure(layers: int, width: int, rounds: int) -> dict[str, list[float]]:
    """Return this rank's seconds of every round, by contender. Collective."""
    model = sharded_model(layers, width, "bf16")
    names = list(model.plan.orthogonalized)
    torch.manual_seed(dist.get_rank())
    gradients = [torch.randn_like(model.tensor_map[name].local) for name in names]
    steps = contenders(model, names, gradients)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):  # the first two make state, and kernels where a peer compiles some
        for name in sorted(steps, key=lambda name: (list(steps).index(name) + number) % len(steps)):
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name] += [time.perf_counter() - began] if number > 1 else []
    return seconds


def sharded_model(layers: int, width: int, compute: str) -> ParallelModel:
    """Return a llama whose parameters lie in shards on all ranks."""
    config = {
        "model_type": "llama", "hidden_size": width, "num_attention_heads": 8, "num_key_value_heads": 4,
        "num_hidden_layers": layers, "intermediate_size": 4 * width, "vocab_size": 512,
    }  # fmt: skip
    sections: dict[str, Any] = {
        "model": {"config": config}, "precision": {"compute": compute}, "parallel": {"ddp_dist_backend": "gloo"},
        "optimizer": {"name": "Muon", "learning_rate": OPTIONS["lr"], "weight_decay": OPTIONS["weight_decay"]},
    }  # fmt: skip
    job, device = Job.model_validate(sections), torch.device("cpu")
    built = build_model(job)
    facts = discover(built, job)
    plan = resolve(job, current_world(device), facts)
    model = parallelize(built, plan, Layout.from_plan(plan, dist.get_rank()), facts, device)
    initialize(model, 0)
    return model


def contenders(model: ParallelModel, names: list[str], gradients: list[Tensor]) -> dict[str, Callable[[], None]]:
    """Return a step of each contender that is installed; each has parameters of its own."""
    steps: dict[str, Callable[[], None]] = {OURS: own_step(model, names, gradients)}
    steps["torch, every rank"] = gathered_step(copies(model, names), gradients)
    if importlib.util.find_spec("muon_fsdp2") is not None:
        steps["muon-fsdp2"] = fsdp2_step(copies(model, names), gradients)
    return steps


def copies(model: ParallelModel, names: list[str]) -> list[nn.Parameter]:
    """Return parameters as FSDP2 has them, equal to the model's."""
    found = []
    for name in names:
        parameter = model.tensor_map[name].parameter
        assert isinstance(parameter, DTensor)
        found.append(nn.Parameter(parameter.detach().clone()))
    return found


def own_step(model: ParallelModel, names: list[str], gradients: list[Tensor]) -> Callable[[], None]:
    """Return a step of this package's class, without AdamW beside it."""
    optimizer = ShardedOptimizer.of(model)
    assert isinstance(optimizer.inner, CombinedOptimizer)
    muon = next(member for member in optimizer.inner.members if isinstance(member, Muon))
    locals_ = {entry.name: local for entry, local in optimizer.locals}

    def step() -> None:
        for name, gradient in zip(names, gradients, strict=True):
            locals_[name].grad = gradient.clone()
        muon.step()

    return step


def given(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    """Give parameters their gradients, as FSDP2 does."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        parameter.grad = DTensor.from_local(gradient.clone(), mesh, placements, shape=shape, stride=stride)


def gathered_step(parameters: list[nn.Parameter], gradients: list[Tensor]) -> Callable[[], None]:
    """Return a step of torch.optim.Muon on DTensors, whose products gather matrices on every rank."""
    optimizer = torch.optim.Muon(parameters, **OPTIONS)

    def step() -> None:
        given(parameters, gradients)
        optimizer.step()

    return step


def fsdp2_step(parameters: list[nn.Parameter], gradients: list[Tensor]) -> Callable[[], None]:
    """Return a step of muon-fsdp2: a gather and a scatter for each matrix, on one rank after the other."""
    from muon_fsdp2 import Muon as PeerMuon

    optimizer = PeerMuon([{"params": parameters, "use_muon": True, "rms_scale": False, **OPTIONS}])

    def step() -> None:
        given(parameters, gradients)
        optimizer.step()

    return step


def ratio(seconds: dict[str, list[float]], peer: str) -> float:
    """Return how often our step fits into a peer's, the median of the rounds."""
    return statistics.median(theirs / own for own, theirs in zip(seconds[OURS], seconds[peer], strict=True))


def render(seconds: dict[str, list[float]]) -> Table:
    """Return a table of median seconds, and of each peer's against ours in the same round."""
    table = Table(box=None)
    for heading in ("contender", "ms a step, median", "against shardwise, median of rounds"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, values in seconds.items():
        table.add_row(name, f"{statistics.median(values) * 1e3:.1f}", f"{ratio(seconds, name):.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
