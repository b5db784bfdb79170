"""Checks that a job's layout fits the cluster that it is launched on, before anything is written.

The model is studied where it can be built here; a model directory that only the nodes have leaves the rules that need
no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import precheck, resolve
from shardwise.planner.formulas.prediction import Cluster
from shardwise.planner.search.search import world_of


def check_layout(job: Job, clusters: Sequence[Cluster]) -> Iterator[str]:
    """Yield notes on a layout that may run on each of `clusters`, as they are on the first.

    Raises:
        LegalityError: it may not; the message says why and what would.
        ModelError: the model is here, and cannot be built.
    """
    facts, absent = None, _absent_model(job)
    if absent:
        yield f"{absent} is not on this machine: the layout was checked without the model."
    else:
        from shardwise.model.build import build_model
        from shardwise.model.discover import discover

        precheck(job, world_of(clusters[0]))  # before a large model is built
        facts = discover(build_model(job), job)
    for number, cluster in enumerate(clusters):
        try:
            notes = _notes_on(job, cluster, facts)
        except LegalityError as error:
            if not number:
                raise
            raise LegalityError(f"with {cluster.nodes} node(s), {cluster.size} ranks: {error}", error.rule) from error
        yield from () if number else notes


def _notes_on(job: Job, cluster: Cluster, facts: ModelFacts | None) -> Sequence[str]:
    world = world_of(cluster)
    if facts is not None:
        return resolve(job, world, facts).notes
    precheck(job, world)
    return ()


def _absent_model(job: Job) -> str:
    """Return the key and value of a model that this machine does not have; empty where it does."""
    if job.model.path is not None and isinstance(job.model.config, dict):
        return ""  # its fields stand for the directory
    for key in ("path", "config"):
        value = getattr(job.model, key)
        if isinstance(value, str) and not Path(value).exists():
            return f"model.{key}={value}"
    return f"model.factory={job.model.factory}" if job.model.factory is not None else ""
