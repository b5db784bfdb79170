"""Processor time of what shardwise adds to each unit of FSDP2: its collectives' names, its use, its containers.

    python -m benchmarks.unit_overhead --rounds 300

One process is rank 0 of two, whose other rank is not there: collectives return at once. Copies of one model are sharded
as FSDP2 alone does it, with names, and with all that a job adds, for a model of transformers and for a user's module.
They take a forward and a backward each in every round, in another order each time. The median over the rounds of the
difference to the first copy is what is added.

What is added depends on the number of units and parameters alone. The copies are therefore narrow, which leaves little
noise, and have the layers of `benchmarks/training_cpu.py`. It is held against that workload's forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from benchmarks.workload import Workload
from shardwise._torch_compat.groups import fake_store
from shardwise.collectives import engine
from shardwise.collectives.rank_record import open_record
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.parallel.layout import Layout
from shardwise.parallel.transforms import sharding
from shardwise.parallel.unit_use import UnitUse
from shardwise.plan.plan import Plan, World, resolve

WORKLOAD = Workload()
NARROW = replace(WORKLOAD, width=64, heads=2, vocabulary=64, sequence=8, batch=1)
WHOLE_STEPS = 5  # of the workload, whose time varies by less than what is added matters


@dataclass(frozen=True)
class Additions:
    """Additions to FSDP2's units.

    Attributes:
        names: collectives have names, which the engine and the rank's record are told.
        use: the units' use is watched, and the caller's containers are kept.
        traits: a forward may freeze or hook parameters: of a user's module.
    """

    names: bool = False
    use: bool = False
    traits: bool = False


BARE = Additions()
KINDS = {
    "FSDP2 alone": BARE,
    "names of collectives": Additions(names=True),
    "a job of transformers": Additions(names=True, use=True),
    "a job of a user's module": Additions(names=True, use=True, traits=True),
}


class Nothing:
    """In the place of `CallerContainers`: does nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def watch(self, *_: Any) -> None:
        pass


@contextmanager
def only(additions: Additions) -> Iterator[None]:
    """Shard inside with these additions to what FSDP2 does."""
    with mock.patch.multiple(
        sharding,
        CallerContainers=sharding.CallerContainers if additions.use else Nothing,
        name_collectives=sharding.name_collectives if additions.names else lambda modules: None,
    ):
        yield


class TimedModel:
    """A sharded copy of the workload's model, whose forward and backward are timed."""

    def __init__(self, workload: Workload, additions: Additions) -> None:
        plan = plan_of(workload)
        torch.manual_seed(workload.seed)
        self.module: nn.Module = GPT2LMHeadModel(build_model(plan.job).config)
        blocks: Any = self.module.transformer.h  # type: ignore[union-attr]
        with only(additions):
            units = sharding.shard_model(
                self.module, [[block] for block in blocks], plan, Layout.from_plan(plan, 0),
                keeps_tensors=additions.traits,
            )  # fmt: skip
        self.use = UnitUse(units, True, additions.traits) if additions.use else None
        self.ids: Tensor = torch.randint(workload.vocabulary, (workload.batch, workload.sequence))

    def seconds(self) -> float:
        """Return the processor time of a forward, a backward, and what a step asks of the units' use."""
        began = time.process_time()
        self.module(input_ids=self.ids, labels=self.ids).loss.backward()
        if self.use is not None:
            self.use.meet()
            self.use.never_used()
            self.use.reset()
        seconds = time.process_time() - began
        self.module.zero_grad()
        return seconds


def plan_of(workload: Workload) -> Plan:
    """Return the plan that shards the workload over two ranks on CPUs, its parameters gathered until backward."""
    config = {
        "model_type": "gpt2", "n_layer": workload.layers, "n_embd": workload.width, "n_head": workload.heads,
        "vocab_size": workload.vocabulary, "n_positions": workload.sequence, "use_cache": False,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    job = Job.model_validate({
        "model": {"config": config}, "precision": {"compute": "fp32"}, "data": {"sequence_length": workload.sequence},
        "parallel": {"device": "cpu", "reshard_after_forward": workload.reshard},
    })  # fmt: skip
    return resolve(job, World(2, "cpu", 2), discover(build_model(job), job))


def added_seconds(rounds: int, workload: Workload = NARROW) -> dict[str, list[float]]:
    """Return by kind the differences of the rounds' times to FSDP2 alone."""
    models = {name: TimedModel(workload, additions) for name, additions in KINDS.items()}
    for model in models.values():
        model.seconds()  # the first forward makes what the others use again
    names = list(models)
    differences: dict[str, list[float]] = {name: [] for name in names[1:]}
    for number in range(rounds):
        turn = number % len(names)
        seconds = {name: models[name].seconds() for name in names[turn:] + names[:turn]}
        for name, added in differences.items():
            added.append(seconds[name] - seconds[names[0]])
    return differences


def main() -> None:
    """Print what is added to a step, and its share of a step of the workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    engine.load_engine()  # which is told each name from now on, as the rank's record is
    open_record(0)
    with two_ranks():
        differences = added_seconds(rounds)
        whole_model = TimedModel(WORKLOAD, BARE)
        whole_model.seconds()
        whole = statistics.median(whole_model.seconds() for _ in range(WHOLE_STEPS))
    print(f"forward and backward of {WORKLOAD.tokens} tokens: {1e3 * whole:.0f} ms of processor time, {rounds} rounds")
    for name, added in differences.items():
        low, middle, high = statistics.quantiles(added, n=4)
        print(
            f"{name}: {1e6 * middle:.0f} µs more in {WORKLOAD.layers + 1} units (quartiles {1e6 * low:.0f} and "
            f"{1e6 * high:.0f}), {100 * middle / whole:.3f} % ({100 * low / whole:.3f} to {100 * high / whole:.3f})"
        )


@contextmanager
def two_ranks() -> Iterator[None]:
    """Be rank 0 of two."""
    dist.init_process_group("fake", rank=0, world_size=2, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
