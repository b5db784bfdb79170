"""`shardwise verify JOB`: a few steps of the user's own job on its layout, proved against one plain process.

Both start from the same weights and read the same data. Compared are, in every step, loss, each gradient after its
reduction and before clipping, the gradient norm, each parameter after the update and the update itself. Copies that
several ranks hold of a parameter have to be equal bit by bit. What so few steps do not show, the whole schedule, the
order of samples, weights at start and evaluation, has checks of its own (`testing.run_checks`). The reference is
`testing.oracle` (nothing of ours) or, with `against`, another layout of ours. The run stops at the first step that
disagrees and says which tensor was first and which known mistake explains it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.commands.train import plan_job
from shardwise.data.corpus import with_format
from shardwise.data.token_data import TokenData
from shardwise.data.tokenizer import VOCABULARY_FILES
from shardwise.errors import ConfigError, MachineError
from shardwise.job.schema import Job
from shardwise.job.sources import require_job
from shardwise.launch.environment import detect
from shardwise.launch.job_group import job_group, usable_backend
from shardwise.launch.local import refuse_unguarded_script, run_local
from shardwise.model.build import load_config
from shardwise.model.facts import ModelFacts
from shardwise.testing.capture import capture_step, gather
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.oracle import Oracle
from shardwise.testing.oracle_data import FactorySource, Source, TokenSource
from shardwise.testing.oracle_rows import RowSource
from shardwise.testing.reference import OracleReference, RecordedReference, Recording, oracle_dtypes
from shardwise.testing.run_checks import (
    compare_evaluation,
    compare_order,
    compare_schedule,
    compare_start,
    drawn_weights,
)
from shardwise.training.setup import AssembledJob, assemble, prepare_data, study
from shardwise.words import output_console

# Tensors of master dtype that rank 0 holds beside its own shard: the oracle's weights, gradients and two optimizer
# states, three of them once more to step back for a diagnosis, and our gradients and weights.
COPIES = 9
BYTES = {"fp64": 8, "fp32": 4}
FUSED = "its random numbers depend on the layout. model.attention=eager is verified with dropout."


def run_verify(job: Job, blocks: int | None = None, against: Job | None = None, steps: int = 3) -> int:
    """Verify `job` and print what was found; the exit code: 0 where everything agrees, else 1."""
    report = verify(job, blocks, against, steps)
    if report is None:  # a rank other than 0 under a launcher; rank 0 prints and fails
        return 0
    output_console().print(report.render())
    return 0 if report.agrees else 1


def verify(job: Job, blocks: int | None = None, against: Job | None = None, steps: int = 3) -> VerifyReport | None:
    """Compare `steps` steps of `job` with one process, or with the layout of the job `against`.

    Args:
        job: what is verified, on its own local workers or in the world of a launcher.
        blocks: keep only so many blocks of the model; its widths stay.
        against: the same job with another layout; its model and data are taken from `job`.
        steps: at most the job's own.

    Returns:
        The report; None on a launcher's ranks other than 0.

    Raises:
        ShardwiseError: the job cannot run, or one process cannot hold the model.
    """
    refuse_unguarded_script("shardwise.verify")
    job = with_format(require_job(job, "verify"))
    _require_count("steps", steps)
    if blocks is not None:
        _require_count("blocks", blocks)
        job = cut_depth(job, blocks)
    if against is None:
        return _in_workers(job, verify_rank, steps)
    job, other, notes = _layouts(job, require_job(against, "verify's `against`"))
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as directory:
        _in_workers(other, _record, directory, steps)
        return _in_workers(job, _against_recording, directory, steps, notes)


def _require_count(name: str, value: object) -> None:
    """Refuse what the command line's `--steps` and `--blocks` refuse."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: must be a whole number from 1")


class _Callable(ModuleType):
    """`shardwise.verify` is this module once it has been imported, and the function before; both can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> VerifyReport | None:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable


# --- on every rank ---------------------------------------------------------------------------------------------------


def verify_rank(job: Job, device: torch.device, steps: int = 3, facts: ModelFacts | None = None) -> VerifyReport | None:
    """Verify against the oracle inside an existing process group; the report on rank 0. Collective."""
    with drawn_weights() as drawn:
        run = _assemble(job, device, facts or study(job))
    report = VerifyReport(_title(run, "one process"))
    _check_memory(run)
    report.add([*compare_schedule(run), *compare_order(run), *compare_start(run, drawn)])
    weights = gather(run)
    return _compare(run, steps, lambda: OracleReference(run.plan, _oracle(run, weights), report), report)


def _against_recording(
    job: Job, device: torch.device, directory: str, steps: int, notes: list[str]
) -> VerifyReport | None:
    run = _assemble(job, device, study(job))
    report = VerifyReport(_title(run, "another layout"), notes=list(notes))
    return _compare(run, steps, lambda: RecordedReference(run.plan, Path(directory), report), report)


def _record(job: Job, device: torch.device, directory: str, steps: int) -> None:
    run = _assemble(job, device, study(job))
    _compare(run, steps, lambda: Recording(Path(directory)), VerifyReport(""))


def _compare(
    run: AssembledJob, steps: int, make_reference: Callable[[], Any], report: VerifyReport
) -> VerifyReport | None:
    """Step after step until one disagrees; rank 0 judges and tells the others."""
    with fused_dropout_off() as dropped:
        reference = make_reference() if dist.get_rank() == 0 else None
        for step in range(min(steps, run.plan.job.training.steps)):
            ours = capture_step(run, step)
            if reference is not None and ours.repeats:
                report.notes.append(f"step {step}: {ours.repeats} overflows while the fp16 loss scale found its place.")
            agrees = torch.tensor(int(reference is None or reference.judge(step, ours)), device=run.model.device)
            dist.broadcast(agrees, 0)
            if not agrees:
                break
        else:
            report.add(compare_evaluation(run, step))
    if dropped:
        report.notes.append(f"Attention dropout of {dropped[0]:g} in the fused kernel is switched off: {FUSED}")
    return report if dist.get_rank() == 0 else None


def _assemble(job: Job, device: torch.device, facts: ModelFacts) -> AssembledJob:
    return assemble(job, device, facts, prepare_data(job, facts))


def _oracle(run: AssembledJob, weights: dict[str, Tensor]) -> Oracle:
    job, plan = run.plan.job, run.plan
    source = _source(job, run.data)
    # Dropout that is a function of its place runs on both sides, and the model's own has places in eager alone.
    eager = run.facts.has_attention_dropout and plan.exact_dropout
    return Oracle(job, weights, source, plan.sequences_per_step, run.facts.counting, eager=eager, **oracle_dtypes(plan))


def _source(job: Job, data: TokenData) -> Source:
    """Return the oracle's reader of the training samples."""
    if data.directory is None:
        return FactorySource(job)
    return (
        RowSource(job, str(data.tokenizer_directory)) if job.data.has_rows else TokenSource(job, Path(data.directory))
    )


def _title(run: AssembledJob, reference: str) -> str:
    degrees = " x ".join(f"{name} {size}" for name, size in run.plan.degrees.items() if size > 1) or "one rank"
    return (
        f"{run.facts.family}, {run.facts.parameters:,} parameters, {run.plan.dtypes.compute}: {degrees} | {reference}"
    )


def _check_memory(run: AssembledJob) -> None:
    """Refuse a model that one process cannot hold."""
    needed = run.facts.parameters * BYTES[run.plan.dtypes.parameters] * COPIES
    available = psutil.virtual_memory().available
    if needed > available:
        raise MachineError(
            f"verify holds the whole model of {run.facts.parameters:,} parameters in one process and needs about "
            f"{needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free; use --blocks N to keep N of its "
            f"{len(run.facts.blocks)} blocks at full width, or --against PLAN.yaml to compare two layouts"
        )


@contextmanager
def fused_dropout_off() -> Iterator[list[float]]:
    """Inside, scaled_dot_product_attention drops nothing, in every thread (recomputation has its own).

    Yields a list that gets the probabilities that were asked for.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    asked: list[float] = []

    def without(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> Tensor:
        if dropout_p > 0 and dropout_p not in asked:
            asked.append(dropout_p)
        output: Tensor = original(query, key, value, attn_mask=attn_mask, dropout_p=0.0, is_causal=is_causal, **rest)
        return output

    torch.nn.functional.scaled_dot_product_attention = without  # type: ignore[assignment]
    try:
        yield asked
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


# --- before workers start --------------------------------------------------------------------------------------------


def cut_depth(job: Job, blocks: int) -> Job:
    """The same job with only `blocks` blocks, at full width; weights are drawn anew.

    Raises:
        ConfigError: the model is not one of transformers', or has fewer blocks.
    """
    if job.model.factory is not None:
        raise ConfigError(f"--blocks {blocks} cuts a Hugging Face config; give model.factory_arguments a smaller depth")
    config = load_config(job)
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int) or type(config).__module__.startswith("transformers_modules"):
        raise ConfigError(f"--blocks {blocks}: the config of {config.model_type!r} has no num_hidden_layers to cut")
    if blocks > depth:
        raise ConfigError(f"--blocks {blocks} is more than the model's {depth}; use at most {depth}")
    values = {key: _cut(value, depth, blocks) for key, value in config.to_diff_dict().items()}
    values |= {
        "model_type": config.model_type,
        config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): blocks,
    }
    for key in ("transformers_version", "architectures", "dtype"):
        values.pop(key, None)
    tokenizer = job.data.tokenizer
    if (
        tokenizer is None
        and job.model.path
        and any((Path(job.model.path) / name).is_file() for name in VOCABULARY_FILES)
    ):
        tokenizer = job.model.path
    model = job.model.model_copy(update={"path": None, "config": values})
    return job.model_copy(update={"model": model, "data": job.data.model_copy(update={"tokenizer": tokenizer})})


def _cut(value: Any, depth: int, blocks: int) -> Any:
    """A list with one item a layer (layer_types, say) loses those of the layers that go."""
    return value[:blocks] if isinstance(value, list) and len(value) == depth else value


def _layouts(job: Job, against: Job) -> tuple[Job, Job, list[str]]:
    """Both jobs, made to differ in layout and memory alone, with an optimizer that does not magnify rounding."""
    notes = []
    optimizer = job.optimizer
    plan = plan_job(job)
    if plan.dtypes.compute != "fp64" and optimizer.name != "SGD":
        notes.append(
            f"{optimizer.name} magnifies the rounding of {plan.dtypes.compute}, which two layouts do not share: both "
            "runs update with SGD."
        )
        optimizer = optimizer.model_copy(update={"name": "SGD", "options": {}})
    training = job.training.model_copy(
        update={
            "sequences_per_step": plan.sequences_per_step,
            "tokens_per_step": None,
        }
    )
    here = job.model_copy(update={"optimizer": optimizer, "training": training})
    free = training.model_copy(update={"microbatch_size": None, "gradient_accumulation": None})
    other = here.model_copy(update={"parallel": against.parallel, "memory": against.memory, "training": free})
    return here, other, notes


def _in_workers(job: Job, function: Callable[..., Any], *args: Any) -> Any:
    """`function(job, device, *args)` on every rank: a launcher's, or the job's own local workers; rank 0's result."""
    plan = plan_job(job)
    device_type = plan.world.device_type
    call = (job, device_type, usable_backend(plan, _note), function, args)
    if detect() is not None:
        return _worker(*call)
    return run_local(_worker, call, plan.world.size, device_type=device_type)[0]


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _worker(job: Job, device_type: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with job_group(job, device_type, backend) as device:
        return function(job, device, *args)
