"""`shardwise doctor`: what this machine offers to a run, which optional packages are there, what a model supports.

What a model supports is what its facts answer; the degrees are those with which the legality table lets a job run.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text
from torch import nn

from shardwise._torch_compat import accelerator
from shardwise.collectives import engine, topology
from shardwise.commands.versions import installed_version, untested_versions
from shardwise.errors import LegalityError, ModelError
from shardwise.errors.exit_codes import DISAGREEMENT, DONE
from shardwise.job.axes import Axis, spec_of
from shardwise.job.devices import CPU, default_device_type, device_kind
from shardwise.job.schema import Job
from shardwise.kernels.products import prefers_onednn
from shardwise.launch.environment import detect
from shardwise.launch.preflight import preflight
from shardwise.launch.process_group import ALONE, process_group
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import Draft, World
from shardwise.plan.rules import check
from shardwise.words import listed, one_of

PACKAGES = ("shardwise", "torch", "transformers", "tokenizers", "datasets", "safetensors")
GIB = 2**30
TYPICAL_LENGTH = 2048  # tokens of a sequence, of a model without a limit
TRACE_LENGTH = 128  # tokens with which a model is traced that cannot be cut otherwise
MEETING_SECONDS = 120  # for all ranks of a launcher to come
MOST_RANKS = 64  # up to which degrees are tried


def examine() -> Table | None:
    """Return a table of versions, devices, backends, host resources and extras, and which ranks share what.

    Under a launcher all ranks meet for the last; those other than 0 get None.

    Raises:
        MachineError: the ranks cannot meet.
    """
    place = detect() or ALONE
    ranks = list(_topology())
    if place.rank:
        return None
    return _table((*_versions(), *_host(), *_devices(), *_backends(), *ranks, *_extras()))


def run_preflight(output: Path) -> int:
    """Print a line for each thing that is wrong on the hosts of a launcher; return the exit code. Collective.

    Raises:
        MachineError: the ranks cannot meet.
    """
    wrong = preflight(output)
    if wrong is None:
        return DONE
    print("\n".join(wrong) or "nothing is wrong")
    return DISAGREEMENT if wrong else DONE


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for key, value in rows:
        table.add_row(key, Text(value))  # Text: brackets in it are no markup
    return table


# --- a model


@dataclass(frozen=True)
class DegreeTrial:
    """A model and the job with which degrees are tried on it.

    Attributes:
        job: sections of that job.
        facts: of the model on one stage.
        staged: of the model on several stages.
        expert_kernels: stack of experts -> the kernel of its products on this machine, and why.
    """

    job: dict[str, Any]
    facts: ModelFacts
    staged: ModelFacts
    expert_kernels: Mapping[str, tuple[str, str]]


def examine_model(where: str) -> Table:
    """Return a table of the axes along which a Hugging Face model can be split, by which degrees, and why not.

    Args:
        where: a model directory or a config.json; weights are not read.

    Raises:
        ModelError: it is not there, or transformers has no language model of its type.
    """
    from shardwise.model.discover import discover
    from shardwise.model.traced_cut import cut_by_trace

    model, job = _built(where)
    facts = discover(model, job)
    staged = cut_by_trace(model, facts, min(facts.max_positions or TRACE_LENGTH, TRACE_LENGTH))
    sections = {
        "model": {"config": where, "task": job.model.task},
        "data": {"sequence_length": min(facts.max_positions or 128, 128)},
        "training": {"sequences_per_step": MOST_RANKS},  # that no degree is refused for want of samples
    }
    return _table(_model_rows(DegreeTrial(sections, facts, staged, _expert_kernels(model))))


def _built(where: str) -> tuple[nn.Module, Job]:
    """Return the model on the meta device, and its job with the first task for which transformers has a head."""
    from shardwise.job.tasks import TASKS
    from shardwise.model.build import build_model, load_config, tasks_of

    config = load_config(Job.model_validate({"model": {"config": where}}), key="--model")
    tasks = tasks_of(config)
    task = next((name for name in tasks if not TASKS[name].reads_files), "causal_lm")
    if tasks and task not in tasks:
        raise ModelError(
            f"--model={where!r}: a model of model.task={tasks[0]!r} is examined with its samples; use `shardwise train "
            "--print-plan` with a job that has some"
        )
    job = Job.model_validate({"model": {"config": where, "task": task}})
    return build_model(job), job


def _expert_kernels(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Return stack of experts -> the kernel of its products on this machine, and why."""
    from torch import device

    from shardwise.kernels.experts import GROUPED_PRODUCTS, OWN_FORWARD, grouped_obstacle
    from shardwise.model.experts import expert_stacks

    kernels: dict[str, tuple[str, str]] = {}
    for name in expert_stacks(model):
        obstacle = grouped_obstacle(model.get_submodule(name), device(default_device_type()))
        grouped = GROUPED_PRODUCTS.name, "experts_implementation is grouped_mm, which does not compute in fp64"
        kernels[name] = (OWN_FORWARD.name, obstacle) if obstacle else grouped
    return kernels


def _model_rows(model: DegreeTrial) -> Iterator[tuple[str, str]]:
    facts = model.facts
    blocks = f"{len(facts.blocks)} blocks" if facts.blocks else "no repeated blocks"
    yield "model", f"{facts.family}, {facts.parameters:,} parameters, {blocks}"
    for axis, row in AXIS_ROWS.items():
        yield row.label, row.says(model, axis)
    yield "sequence", _sequence_degrees(model)
    yield "loss", "in chunks, logits never whole" if facts.chunkable_head else "of whole logits: the head is not last"
    yield from _attention(model)
    yield from _expert_products(model)
    if facts.probe_failure:
        yield "note", facts.probe_failure


def _any_degree(model: DegreeTrial, axis: Axis) -> str:
    return "any degree"


def _shard_units(model: DegreeTrial, axis: Axis) -> str:
    return f"any degree, {'block by block' if model.facts.blocks else 'as one unit'}"


def _degrees(model: DegreeTrial, axis: Axis) -> str:
    capability = model.facts.supports(axis)
    return _legal_degrees(model.job, model.facts, axis) if capability.ok else f"no: {capability.reason}"


def _tensor_degrees(model: DegreeTrial, axis: Axis) -> str:
    facts, degrees = model.facts, _degrees(model, axis)
    if facts.heads_whole and (facts.fewest_gathered or not facts.mixers):
        degrees += f", by outputs: {facts.heads_whole}"
    if not facts.mixers:
        return degrees
    tried = range(2, MOST_RANKS + 1)
    shared = [n for n in tried if all(mixer.shares_heads(n) for mixer in facts.mixers.values())]
    return f"{degrees}; mixers of states by heads or channels at {_listed_degrees(shared)}" if shared else degrees


def _stage_degrees(model: DegreeTrial, axis: Axis) -> str:
    staged = replace(model, facts=model.staged)
    return _degrees(staged, axis) + (", stages cut from its traced forward" if staged.facts.stages.traced else "")


class AxisRow(NamedTuple):
    """The row of an axis: its label, and the function that says what a model supports."""

    label: str
    says: Callable[[DegreeTrial, Axis], str]


AXIS_ROWS: dict[Axis, AxisRow] = {
    Axis.REPLICA: AxisRow("replicas", _any_degree),
    Axis.SHARD: AxisRow("sharding", _shard_units),
    Axis.TENSOR: AxisRow("tensor", _tensor_degrees),
    Axis.CONTEXT: AxisRow("context", _degrees),
    Axis.PIPELINE: AxisRow("pipeline", _stage_degrees),
    Axis.EXPERT: AxisRow("experts", _degrees),
}


def _sequence_degrees(model: DegreeTrial) -> str:
    """Return the tensor degrees whose ranks can share the sequence."""
    for capability in (model.facts.supports(Axis.TENSOR), model.facts.sequence_parallel):
        if not capability.ok:
            return f"no: {capability.reason}"
    return _legal_degrees(model.job, model.facts, Axis.TENSOR, sequence_parallel=True)


def _attention(model: DegreeTrial) -> Iterator[tuple[str, str]]:
    """Yield the kernel of each attention layer on this machine, layers with the same kernel and reason together."""
    facts = model.facts
    if not facts.attention_kernels.ok:
        yield "attention", f"transformers' own: {facts.attention_kernels.reason}"
        return
    device, length = default_device_type(), facts.max_positions or TYPICAL_LENGTH
    job = Job.model_validate({**model.job, "data": {"sequence_length": length}})
    rows: dict[tuple[str, str], list[str]] = {}
    for layer, choice in Draft(job, World(1, device, 1), facts).attention_choices:
        kernel, reason = (choice.kernel.name, choice.reason) if choice else ("none", "no kernel can do this")
        rows.setdefault((kernel, reason), []).append(layer.name)
    for (kernel, reason), names in rows.items():
        yield "attention", f"{kernel} on {device} for {listed(names)} at {length} tokens: {reason}"


def _expert_products(model: DegreeTrial) -> Iterator[tuple[str, str]]:
    """Yield the kernel of shared experts' products on this machine, stacks with the same one and reason together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for stack, kernel in model.expert_kernels.items():
        rows.setdefault(kernel, []).append(stack)
    for (name, reason), stacks in rows.items():
        yield "products", f"{name} on {default_device_type()} for {listed(stacks)}: {reason}"


def _legal_degrees(job: dict[str, Any], facts: ModelFacts, axis: Axis, **settings: Any) -> str:
    """Return the degrees of an axis that are legal with `settings` of the parallel section, or why 2 is not."""
    key = spec_of(axis).degree_key.removeprefix("parallel.")
    degrees = range(2, MOST_RANKS + 1)
    refusals = {degree: _refusal(job, facts, degree, {key: degree, **settings}) for degree in degrees}
    legal = [degree for degree, refusal in refusals.items() if not refusal]
    if not legal:
        return f"no: {refusals[2]}"
    return "any degree" if len(legal) == len(refusals) else _listed_degrees(legal)


def _listed_degrees(legal: list[int]) -> str:
    in_a_row = len(legal) > 3 and legal[-1] - legal[0] == len(legal) - 1
    return f"degree {legal[0]} to {legal[-1]}" if in_a_row else f"degree {one_of(legal)}"


def _refusal(job: dict[str, Any], facts: ModelFacts, ranks: int, parallel: dict[str, Any]) -> str:
    """Return what the legality table says against it, without the keys; empty where nothing."""
    try:
        check(Draft(Job.model_validate({**job, "parallel": parallel}), World(ranks, "cpu", ranks), facts))
    except LegalityError as error:
        return str(error).partition(": ")[2] or str(error)
    return ""


# --- the machine


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in PACKAGES:
        yield name, installed_version(name) or "not installed"
    for note in untested_versions():
        yield "", note


def _host() -> Iterator[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{usable} usable of {os.cpu_count()}"
    yield "memory", f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"


def _devices() -> Iterator[tuple[str, str]]:
    kind = device_kind(default_device_type())
    if kind.name == CPU:
        yield "devices", "cpu (no GPU that torch knows)"
        yield (
            "products",
            "fp32 by " + ("oneDNN, quicker than MKL here" if prefers_onednn() else "torch's default library"),
        )
    for index in range(accelerator.count(kind.name)):
        device = accelerator.module_of(kind.name).get_device_properties(index)
        yield f"{kind.name}:{index}", f"{device.name}, {device.total_memory / GIB:.0f} GiB"
    for feature in kind.lacks:
        yield "lacks", f"{feature}: {kind.supports(feature).reason}"


def _backends() -> Iterator[tuple[str, str]]:
    from torch import distributed

    available = [name for name in ("gloo", "nccl", "mpi") if distributed.is_backend_available(name)]
    yield "backends", ", ".join(available) or "none"
    yield "engine", engine.obstacle() or ("built" if engine.library().is_file() else "compiled when it is first used")


def _topology() -> Iterator[tuple[str, str]]:
    """Yield the hosts of all ranks that a launcher has started, and the devices that ranks share. Collective."""
    from torch import distributed

    place = detect() or ALONE
    with process_group("cpu", "gloo", MEETING_SECONDS):
        store = distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
        places = topology.discover_topology(store, place.rank, place.world_size, _device(place.local_rank))
        distributed.barrier()  # nobody ends the store that others still read
    for node, (ranks, identity) in enumerate(zip(places.hosts, places.identities, strict=True)):
        members = ", ".join(f"{rank} (local {local})" for local, rank in enumerate(ranks))
        yield f"node {node}", f"{json.loads(identity)[0]}: rank {members}"
        for sharers in dict.fromkeys(places.sharers(rank) for rank in ranks):
            noun = "ranks" if len(sharers) > 1 else "rank"
            yield "", f"{places.devices[sharers[0]]}: {noun} {', '.join(map(str, sharers))}"


def _device(local_rank: int) -> str:
    """Return the device of a rank; GPUs are dealt out in turns, so that several ranks may share one."""
    kind = default_device_type()
    return CPU if kind == CPU else topology.gpu_identity(kind, local_rank % accelerator.count(kind))


def _extras() -> Iterator[tuple[str, str]]:
    """Yield the extras of this package and what is missing of each, from the package's own metadata."""
    wanted: dict[str, list[str]] = {}
    for requirement in metadata.requires("shardwise") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if extra and package:
            wanted.setdefault(extra[1], []).append(package[0])
    for name, packages in sorted(wanted.items()):
        missing = [package for package in packages if installed_version(package) is None]
        hint = f"missing {', '.join(missing)}: pip install 'shardwise[{name}]'"
        yield f"extra {name}", hint if missing else "installed"
