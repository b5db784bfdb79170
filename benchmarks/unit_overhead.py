"""Processor time of what shardwise adds to each unit of FSDP2: its use, its containers and its collectives' names.

    python -m benchmarks.unit_overhead --rounds 100

One process, one rank, the model of `benchmarks/training_cpu.py`. Two copies are sharded, one with the additions and one
without. They take steps of few tokens in turns, so that the difference of their processor time is that of the
additions, which do not depend on the number of tokens. It is held against a step of the whole workload.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.workload import Workload
from shardwise.collectives import engine
from shardwise.parallel.transforms import sharding
from shardwise.parallel.unit_use import UnitUse

WORKLOAD = Workload()
FEW = 8  # tokens of a step that shows the additions


class Without:
    """In the place of a class of additions: does nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def watch(self, *_: Any) -> None:
        pass


@contextmanager
def without_additions() -> Iterator[None]:
    """Shard inside as FSDP2 alone does."""
    with mock.patch.object(sharding, "CallerContainers", Without), mock.patch.object(sharding, "name_collectives"):
        yield


def sharded_model(additions: bool) -> nn.Module:
    """Return the model in units of its blocks."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=WORKLOAD.layers, n_embd=WORKLOAD.width, n_head=WORKLOAD.heads, vocab_size=WORKLOAD.vocabulary,
        n_positions=WORKLOAD.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    section = SimpleNamespace(reshard_after_forward=False, prefetch_depth=0)
    plan: Any = SimpleNamespace(
        holds_whole=False, keeps_last_unit=False, keeps_float_arguments=False, gathers_float8=False,
        degrees={}, backend="gloo",
        dtypes=SimpleNamespace(compute="fp32", parameters="fp32", reduction="fp32"),
        world=SimpleNamespace(device_type="cpu", hosts=1),
        job=SimpleNamespace(parallel=section, memory=SimpleNamespace(offload_parameters=False)),
    )  # fmt: skip
    layout: Any = SimpleNamespace(shard_mesh=lambda: init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    groups = [[block] for block in model.transformer.h]
    if additions:
        model.use = UnitUse(sharding.shard_model(model, groups, plan, layout), True)  # type: ignore[assignment]
    else:
        with without_additions():
            sharding.shard_model(model, groups, plan, layout)
    return model


def step_time(model: nn.Module, ids: Tensor) -> float:
    """Return the processor seconds of forward and backward."""
    began = time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    if isinstance(use := getattr(model, "use", None), UnitUse):
        use.reset()
    return time.process_time() - began


def main() -> None:
    """Print the additions' processor time of a step, and its share of a step of the workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    engine.load_engine()  # which is told each name from now on, as by ranks that use it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = {additions: sharded_model(additions) for additions in (False, True)}
    few = torch.randint(WORKLOAD.vocabulary, (1, FEW))
    for model in models.values():
        step_time(model, few)
    differences = []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        times = {additions: step_time(models[additions], few) for additions in order}
        differences.append(times[True] - times[False])
    many = torch.randint(WORKLOAD.vocabulary, (WORKLOAD.batch, WORKLOAD.sequence))
    whole = statistics.median(step_time(models[True], many) for _ in range(3))
    added = statistics.median(differences)
    low, _, high = statistics.quantiles(differences, n=4)
    print(f"added to a step of {WORKLOAD.layers + 1} units: {1e6 * added:.0f} µs ({1e6 * low:.0f} to {1e6 * high:.0f})")
    print(f"a step of {WORKLOAD.tokens} tokens: {1e3 * whole:.0f} ms; added {100 * added / whole:.3f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
