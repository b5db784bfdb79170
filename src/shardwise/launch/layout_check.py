"""Checks that a job's layout fits the cluster that it is launched on, before anything is written.

The model is studied where it can be built here; a model directory that only the nodes have leaves the rules that need
no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise.job.schema import Job
from shardwise.plan.plan import precheck, resolve
from shardwise.planner.formulas.prediction import Cluster
from shardwise.planner.search.search import world_of


def check_layout(job: Job, cluster: Cluster) -> Iterator[str]:
    """Yield notes on a layout that may run on `cluster`.

    Raises:
        LegalityError: it may not; the message says why and what would.
        ModelError: the model is here, and cannot be built.
    """
    world = world_of(cluster)
    precheck(job, world)
    if absent := _absent_model(job):
        yield f"{absent} is not on this machine: the layout was checked without the model."
        return
    from shardwise.model.build import build_model
    from shardwise.model.discover import discover

    yield from resolve(job, world, discover(build_model(job), job)).notes


def _absent_model(job: Job) -> str:
    """Return the key and value of a model that this machine does not have; empty where it does."""
    if job.model.path is not None and isinstance(job.model.config, dict):
        return ""  # its fields stand for the directory
    for key in ("path", "config"):
        value = getattr(job.model, key)
        if isinstance(value, str) and not Path(value).exists():
            return f"model.{key}={value}"
    return f"model.factory={job.model.factory}" if job.model.factory is not None else ""
