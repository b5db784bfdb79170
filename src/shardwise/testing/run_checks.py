"""Checks of what a few steps do not show: the whole schedule, the order of samples, weights at start, evaluation.

Each returns differences of a quantity of its own, on every rank; rank 0 reports them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from shardwise.data.mixture import Mixture, source_seed
from shardwise.data.order import order
from shardwise.data.packing import is_stream
from shardwise.job.schema import Job
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.testing.capture import Captured
from shardwise.testing.comparison import Difference
from shardwise.testing.copies import buffer_digests, digest_of, gathered
from shardwise.testing.oracle import scheduled_rate
from shardwise.testing.oracle_data import shuffled_index
from shardwise.testing.oracle_mixture import DefinedMixture
from shardwise.training.session import Session
from shardwise.training.setup import AssembledJob

MOST_STEPS = 200_000  # of a schedule that are compared, spread evenly over a longer one
MOST_DEFINED = 2_000  # of two epochs whose order is compared with its definition
MOST_SAMPLES = 20_000  # of an epoch whose order is looked at; of a longer one the first


def compare_schedule(session: Session) -> list[Difference]:
    """Compare the learning rate of every step of the session with the oracle's formula; the worst step is named."""
    settings, steps, progress = session.job.optimizer, session.plan.steps, session.progress
    worst, error = 0, 0.0
    for step in range(0, steps, -(-steps // MOST_STEPS)):
        session.progress = progress.model_copy(update={"step": step})
        ours = session.scheduled_rate()
        apart = abs(ours - scheduled_rate(settings, step, steps)) / (abs(settings.learning_rate) or 1.0)
        if not apart <= error:
            worst, error = step, apart
    session.progress = progress
    return [Difference(0, "schedule", str(worst) if error else "", error, 1e-12)]


def compare_order(run: AssembledJob) -> list[Difference]:
    """Look for samples that an epoch repeats or leaves out, and for others than the definition's in two epochs."""
    if run.data.streams and not run.data.sources:  # its order is that of its tokens, which are read again
        return []
    if isinstance(run.data.train, Mixture):
        return _compare_mixture(run.data.train, run.plan.job)
    return _compare_permutation(run.plan.job.training.seed, len(run.data.train))


def _compare_permutation(seed: int, size: int) -> list[Difference]:
    count = min(size, MOST_SAMPLES)
    read = [order(seed, counter, size) for counter in range(count)]
    repeated = count - len(set(read))
    outside = sum(not 0 <= index < size for index in read)
    name = f"{repeated} of its first {count} repeat others" if repeated else ""
    few = range(min(size, MOST_DEFINED))
    counters = [*few, *(size + counter for counter in few)]
    other = next((c for c in counters if order(seed, c, size) != shuffled_index(seed, c, size)), None)
    sentence = "" if other is None else f"sample {other} of the run is not the one that the order defines"
    return [
        Difference(0, "order", name, math.inf if repeated or outside else 0.0, 0.0),
        Difference(0, "defined order", sentence, math.inf if sentence else 0.0, 0.0),
    ]


def _compare_mixture(mixture: Mixture, job: Job) -> list[Difference]:
    """Do so for each source, and look for samples of another source, or place in it, than the definition's."""
    differences = []
    for name, split in zip(mixture.names, mixture.splits, strict=True):
        if is_stream(split):
            continue
        differences += _compare_permutation(source_seed(job.training.seed, name), len(split))
    right = DefinedMixture(job, dict(zip(mixture.names, map(len, mixture.splits), strict=True)))
    others = (c for c in range(MOST_DEFINED) if mixture.place_of(c) != right.place_of(c))
    other = next(others, None)
    sentence = "" if other is None else f"sample {other} of the run is of another source or place than is defined"
    return [*differences, Difference(0, "defined order", sentence, math.inf if sentence else 0.0, 0.0)]


@contextmanager
def drawn_weights() -> Iterator[dict[str, bytes]]:
    """Yield a dict that gets a digest of every whole tensor from which this rank stores its part."""
    digests: dict[str, bytes] = {}
    original = ParameterEntry.store

    def store(self: ParameterEntry, whole: Tensor) -> None:
        digests[self.name] = digest_of(whole)
        original(self, whole)

    with mock.patch.object(ParameterEntry, "store", store):
        yield digests


def compare_start(run: AssembledJob, drawn: dict[str, bytes]) -> list[Difference]:
    """Compare what each rank drew whole for a parameter, and the buffers of equal tensor ranks. Collective."""
    own: dict[tuple[str, int], bytes] = {(name, -1): digest for name, digest in drawn.items()}
    own |= buffer_digests(run)
    first: dict[tuple[str, int], bytes] = {}
    differing: dict[str, bool] = {}
    for digests in gathered(own):
        for key, digest in digests.items():
            differing[key[0]] = differing.get(key[0], False) or first.setdefault(key, digest) != digest
    return [Difference(0, "start", name, math.inf if differs else 0.0, 0.0) for name, differs in differing.items()]


def compare_buffers(ours: Captured) -> list[Difference]:
    """Compare the buffers of ranks that hold the same part of the model, after a step."""
    first: dict[tuple[str, int], bytes] = {}
    differs: dict[str, bool] = {}
    for digests in ours.buffers:
        for key, digest in digests.items():
            differs[key[0]] = differs.get(key[0], False) or first.setdefault(key, digest) != digest
    return [Difference(ours.step, "buffers", name, math.inf if apart else 0.0, 0.0) for name, apart in differs.items()]


def compare_evaluation(ours: Captured) -> list[Difference]:
    """Judge the mode of all modules during and after the evaluation that followed a step, if one did."""
    modes_of_ranks = [modes for modes in ours.evaluation_modes if modes is not None]
    if not modes_of_ranks:
        return []
    return [
        Difference(ours.step, quantity, "", math.inf if any(rank_modes) else 0.0, 0.0)
        for quantity, rank_modes in zip(("evaluation", "mode"), zip(*modes_of_ranks, strict=True), strict=True)
    ]
