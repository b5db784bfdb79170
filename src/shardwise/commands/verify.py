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
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.commands.train import plan_job
from shardwise.commands.workers import in_workers
from shardwise.data.corpus import with_format
from shardwise.data.token_data import TokenData
from shardwise.errors import ConfigError, LegalityError, MachineError, ShardwiseError
from shardwise.errors.exit_codes import DISAGREEMENT, DONE
from shardwise.job.axes import Axis
from shardwise.job.schema import EvaluationSection, Job, PrecisionSection
from shardwise.job.sources import require_job
from shardwise.job.tasks import TASKS
from shardwise.job.warmup_stages import SCHEDULES, WarmupStage
from shardwise.launch.interrupt import Interrupt
from shardwise.launch.local import refuse_unguarded_script
from shardwise.model.adapter_config import with_adapter
from shardwise.model.class_loss import NEXT
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import Draft
from shardwise.plan.plan import resolve
from shardwise.testing.capture import capture_step, gather
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.copies import gathered
from shardwise.testing.depth import cut_depth
from shardwise.testing.fused_dropout import fused_dropout_off
from shardwise.testing.module_trace import trace_step
from shardwise.testing.oracle import Oracle
from shardwise.testing.oracle_corpus import compare_corpus
from shardwise.testing.oracle_data import FactorySource, Source, TokenSource
from shardwise.testing.oracle_files import FileSource
from shardwise.testing.oracle_mixture import CorpusReader, MixtureSource
from shardwise.testing.oracle_rows import RowSource
from shardwise.testing.oracle_start import known_start
from shardwise.testing.oracle_stream import StreamSource
from shardwise.testing.reference import (
    SIXTEEN,
    OracleReference,
    RecordedReference,
    Recording,
    oracle_dtypes,
    refuse_changing_forwards,
)
from shardwise.testing.run_checks import (
    compare_buffers,
    compare_evaluation,
    compare_order,
    compare_schedule,
    compare_start,
    drawn_weights,
)
from shardwise.testing.start_check import (
    compare_known_start,
    compare_start_buffers,
    compare_start_values,
    distributions,
)
from shardwise.training.output import UNLIKE
from shardwise.training.session import Session
from shardwise.training.setup import AssembledJob, assemble, current_world, prepare_data, study
from shardwise.training.trainer import Trainer
from shardwise.words import listed, output_console

# Tensors of master dtype that rank 0 holds beside its own shard: the oracle's weights, gradients and two optimizer
# states, three of them once more to step back for a diagnosis, and our gradients and weights. A preference loss's
# reference is one more.
COPIES = 9
BYTES = {"fp64": 8, "fp32": 4}
LAYOUT_STEPS = 2  # in which a 16-bit job's layout is proved in fp64: the second shows what the first update has left
MICROBATCHES = ("microbatch_size", "gradient_accumulation")  # keys that a second layout may have of its own
MOST_OVERFLOWS = 40  # fp16 steps passed over while the loss scale finds its place
FUSED = "its random numbers depend on the layout. model.attention=eager is verified with dropout."


def run_verify(job: Job, blocks: int | None = None, against: Job | None = None, steps: int = 3) -> int:
    """Verify `job` and print what was found; the exit code: 0 where everything agrees, else 1."""
    report = verify(job, blocks, against, steps)
    if report is None:  # a rank other than 0 under a launcher; rank 0 prints and fails
        return 0
    output_console().print(report.render())
    return DONE if report.agrees else DISAGREEMENT


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
    job = with_adapter(with_format(require_job(job, "verify")))
    _require_count("steps", steps)
    if blocks is not None:
        _require_count("blocks", blocks)
        job = cut_depth(job, blocks)
    if against is None:
        return in_workers(job, verify_rank, steps)
    job, other, notes = _layouts(job, require_job(against, "verify's `against`"))
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as directory:
        in_workers(other, _record, directory, steps)
        return in_workers(job, _against_recording, directory, steps, notes)


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
    """Verify against the oracle inside an existing process group; the report on rank 0. Collective.

    A job in 16 bits is verified twice: its layout in fp64, where nothing hides, then in its own precision.
    """
    facts = facts or study(job)
    data = prepare_data(job, facts)
    report = VerifyReport("")
    wide_facts = replace(facts, weight_dtypes={})
    layout_job = wide_job(job, device, wide_facts, report)
    if layout_job is not None:
        _verify_precision(layout_job, device, wide_facts, data, min(steps, LAYOUT_STEPS), report, True)
        report.label(str(layout_job.precision.compute))
    if layout_job is None or _agreed(report.agrees, device):
        _verify_precision(job, device, facts, data, steps, report, layout_job is None)
    report.notes += _stage_notes(job, steps)
    return report if dist.get_rank() == 0 else None


def wide_job(job: Job, device: torch.device, facts: ModelFacts, report: VerifyReport) -> Job | None:
    """Return a 16-bit job in fp64, or fp32 where fp64 is refused; None for others."""
    world = current_world(device)
    if resolve(job, world, facts).dtypes.compute not in SIXTEEN:
        return None
    for compute in ("fp64", "fp32"):
        model = job.model.model_copy(update={"dtype": None})
        wide = job.model_copy(update={"precision": PrecisionSection(compute=compute), "model": model})
        try:
            resolve(wide, world, facts)
        except LegalityError as error:
            refusal = str(error)
        else:
            return wide
    report.notes.append(f"The layout is not proved in a wider precision, which is refused: {refusal}")
    return None


def _agreed(agrees: bool, device: torch.device) -> bool:
    """Return rank 0's verdict. Collective."""
    flag = torch.tensor(int(agrees), device=device)
    dist.broadcast(flag, 0)
    return bool(flag)


def _verify_precision(
    job: Job, device: torch.device, facts: ModelFacts, data: TokenData, steps: int, report: VerifyReport, is_first: bool
) -> None:
    """Verify in the job's own precision, and add to the report; the first time also what it starts from."""
    with drawn_weights() as drawn:
        session = _session(job, device, facts, data, steps)
    run = session.assembled
    report.title = _title(run, "one process")
    _check_memory(run)
    common = [*compare_schedule(session), *compare_order(run)] if session.rank == 0 else []  # other ranks find the same
    report.add([*common, *compare_start(run, drawn)])
    weights = gather(run)
    buffers = {name: buffer.cpu() for part in run.model.parts for name, buffer in part.module.named_buffers()}

    oracles: list[Oracle] = []

    def reference() -> OracleReference:
        oracle = _oracle(run, weights)
        oracles.append(oracle)
        if job.model.factory is not None:
            refuse_changing_forwards(oracle, facts.definition)
        if is_first:
            for own, data in [(source.job, source.data) for source in run.data.sources] or [(job, run.data)]:
                report.add(compare_corpus(own, data.directory, data.tokenizer_directory))
            report.add(compare_known_start({**weights, **buffers}, known_start(job), facts.weight_dtypes))
        if is_first and job.model.path is None and job.model.weights is None:  # else they are not drawn
            report.add(compare_start_values(distributions(weights), oracle.plain))
        if job.model.path is None and job.model.weights is None:
            report.add(compare_start_buffers(buffers, oracle.plain_buffers, oracle.rebuilt_buffers))
        return OracleReference(run.plan, oracle, report, _norms_see_parts(run), run.facts.keeps_statistics)

    _compare(session, steps, reference, report)
    report.notes += [note for oracle in oracles for note in oracle.routers.notes()]


def _norms_see_parts(run: AssembledJob) -> bool:
    """Return whether norms of key heads see a part of a gradient, since several tensor ranks hold the same head."""
    facts = run.model.facts
    has_norms = any(split.kind == "partial" for split in facts.tensor_splits.values())
    return has_norms and facts.key_value_copies(run.plan.degrees[Axis.TENSOR]) > 1


def _against_recording(
    job: Job, device: torch.device, directory: str, steps: int, notes: list[str]
) -> VerifyReport | None:
    facts = study(job)
    session = _session(job, device, facts, prepare_data(job, facts), steps)
    report = VerifyReport(_title(session.assembled, "another layout"), notes=list(notes))
    _compare(session, steps, lambda: RecordedReference(session.plan, Path(directory), report), report)
    report.notes += _stage_notes(job, steps)
    return report if dist.get_rank() == 0 else None


def _record(job: Job, device: torch.device, directory: str, steps: int) -> None:
    facts = study(job)
    session = _session(job, device, facts, prepare_data(job, facts), steps)
    _compare(session, steps, lambda: Recording(Path(directory)), VerifyReport(""))


def _session(job: Job, device: torch.device, facts: ModelFacts, data: TokenData, steps: int) -> Session:
    """Return a session of the job as it trains, which evaluates once, on two batches as far as there are two.

    Late: an evaluation gathers weights anew, and what the first update leaves behind would not show.
    """
    training: dict[str, Any] = {"evaluate_every": steps if steps < 3 else steps - 1, "evaluate_batches": 2}
    size = Draft(job, current_world(device)).sequences.value
    training |= {"callbacks": [], **_one_step_each(job, size)}
    changed = {"training": job.training.model_copy(update=training), "evaluation": EvaluationSection()}
    job = job.model_copy(update=changed)
    return Session.of(assemble(job, device, facts, replace(data, sets={})))


def _one_step_each(job: Job, size: int) -> dict[str, list[WarmupStage]]:
    """Return the stages of the job's warm-ups, each for one step, so that few steps show how it changes.

    `size` are the sequences of a step behind them.
    """
    sizes = [stage.sequences_per_step for stage in job.training.batch_size_schedule]
    ends = [*accumulate([*sizes, *[size] * len(job.training.sequence_length_schedule)])]
    return {key: [_until(end, stage) for stage, end in zip(getattr(job.training, key), ends)] for key in SCHEDULES}


def _until(samples: int, stage: WarmupStage) -> WarmupStage:
    return stage.model_copy(update={"until_samples": samples, "until_tokens": None})


def _stage_notes(job: Job, steps: int) -> Iterator[str]:
    for key in SCHEDULES:
        if stages := len(getattr(job.training, key)):
            further = f"; --steps {stages + 1} compares them all, and a step behind them" if stages >= steps else ""
            yield f"Each stage of training.{key} lasts one step here{further}."


def _compare(session: Session, steps: int, make_reference: Callable[[], Any], report: VerifyReport) -> None:
    """Let the trainer take steps until one disagrees; rank 0 judges and tells the others.

    Raises:
        ConfigError: every step of the job overflowed, so that none was compared.
    """
    trainer = Trainer(session, Interrupt(session.rank))
    overflows = compared = 0
    with fused_dropout_off(session.plan.exact_dropout) as rates:
        reference = _made_on_rank_0(make_reference)
        for batches in session.batches():
            ours = capture_step(trainer, batches)
            if ours.skipped and _scale_can_shrink(session.assembled) and overflows < MOST_OVERFLOWS:
                overflows += 1
                continue
            report.add(compare_evaluation(ours))
            compared += 1
            with rates.of_oracle():
                is_right = reference is None or reference.judge(ours)
                if reference is not None and is_right:
                    averages = reference.compare_averages(ours)
                    report.add([*compare_buffers(ours), *averages, *reference.compare_evaluation_loss(ours)])
            report.add(rates.compare(ours.step))
            if not _agreed(is_right, session.device):
                trace, undropped = trace_step(session, batches, ours)
                traces = gathered(trace)
                if reference is not None:
                    with rates.of_oracle():
                        reference.diagnose(traces, undropped)
                break
            if compared == steps:
                break
    if overflows and not compared:
        raise ConfigError(
            f"precision.loss_scale.init_scale={session.job.precision.loss_scale.init_scale:g}: all {overflows} steps "
            f"of the job overflowed, and none was compared; lower it, or set training.steps to more than {overflows}"
        )
    if overflows:
        report.notes.append(f"{overflows} steps overflowed while the fp16 loss scale found its place.")
    for probability in rates.ours:
        report.notes.append(f"Attention dropout of {probability:g} in the fused kernel is switched off: {FUSED}")


def _made_on_rank_0(make: Callable[[], Any]) -> Any:
    """Return what rank 0 makes, None elsewhere; every rank raises what it raises. Collective."""
    made: Any = None
    failure: list[ShardwiseError | None] = [None]
    if dist.get_rank() == 0:
        try:
            made = make()
        except ShardwiseError as error:
            failure = [error]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
    return made


def _scale_can_shrink(run: AssembledJob) -> bool:
    return run.plan.dtypes.compute == "fp16" and run.scaler.settings.static is None and not run.scaler.exhausted()


def _oracle(run: AssembledJob, weights: dict[str, Tensor]) -> Oracle:
    job, plan = run.plan.job, run.plan
    source = _source(job, run.data, run.facts)
    # Dropout that is a function of its place runs on both sides, and the model's own has places in eager alone.
    eager = run.facts.has_attention_dropout and plan.exact_dropout
    is_coupled = run.facts.rows_together or run.facts.keeps_statistics or run.facts.may_draw
    seeds: Any = "together" if run.facts.stages.traced else "by module"
    return Oracle(
        job, weights, source, plan.sequences_per_step, plan.steps, plan.total_sequences, run.facts.counting, eager,
        **oracle_dtypes(plan), rows_together=plan.microbatch if is_coupled else None,
        draws=seeds if run.facts.may_draw else None,
    )  # fmt: skip


def _source(job: Job, data: TokenData, facts: ModelFacts) -> Source:
    """Return the oracle's reader of the training samples."""
    if data.sources:
        return MixtureSource(job, {source.name: _reader(source.job, source.data) for source in data.sources})
    if job.data.factory is not None:
        return FactorySource(job, facts.given_labels == NEXT)
    if TASKS[job.model.task].reads_files:
        return FileSource(job)
    return _reader(job, data)


def _reader(job: Job, data: TokenData) -> CorpusReader:
    """Return the oracle's reader of one corpus."""
    if data.streams:
        return StreamSource(job, data.tokenizer_directory)
    if job.data.has_rows:
        return RowSource(job, str(data.tokenizer_directory))
    return TokenSource(job, Path(str(data.directory)))


def _title(run: AssembledJob, reference: str) -> str:
    degrees = " x ".join(f"{name} {size}" for name, size in run.plan.degrees.items() if size > 1) or "one rank"
    return (
        f"{run.facts.family}, {run.facts.parameters:,} parameters, {run.plan.dtypes.compute}: {degrees} | {reference}"
    )


def _check_memory(run: AssembledJob) -> None:
    """Refuse a model that one process cannot hold."""
    copies = COPIES + bool(run.plan.reference)
    needed = run.facts.parameters * BYTES[run.plan.dtypes.parameters] * copies
    available = psutil.virtual_memory().available
    if needed > available:
        raise MachineError(
            f"verify holds the whole model of {run.facts.parameters:,} parameters in one process and needs about "
            f"{needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free; use --blocks N to keep N of its "
            f"{len(run.facts.blocks)} blocks at full width, or --against PLAN.yaml to compare two layouts"
        )


# --- before workers start --------------------------------------------------------------------------------------------


def _layouts(job: Job, against: Job) -> tuple[Job, Job, list[str]]:
    """Both jobs, made to differ in layout and memory alone, with an optimizer that does not magnify rounding.

    Raises:
        ConfigError: they differ in more.
    """
    notes = []
    optimizer = job.optimizer
    plan = plan_job(job)
    _check_same_job(job, against, plan.sequences_per_step)
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
    own = job.model_copy(update={"optimizer": optimizer, "training": training})
    sizes = ((key, getattr(against.training, key)) for key in MICROBATCHES)
    free = {key: None if value == getattr(job.training, key) else value for key, value in sizes}
    update = {"parallel": against.parallel, "memory": against.memory, "training": training.model_copy(update=free)}
    return own, own.model_copy(update=update), notes


def _check_same_job(job: Job, against: Job, sequences: int) -> None:
    """Refuse a second layout with keys that say more than a layout.

    Args:
        sequences: of a step of `job`, which a plan may say in its words.
    """
    free = {**UNLIKE, "parallel": True, "memory": True, "training": UNLIKE["training"] | {*MICROBATCHES}}
    one, other = (side.model_dump(mode="json", exclude=free) for side in (job, against))
    if against.training.sequences_per_step == sequences:
        keys = ("sequences_per_step", "tokens_per_step")
        other["training"] |= {key: one["training"][key] for key in keys}
    unlike = [f"{section}.{key}" for section, keys in one.items() for key in keys if keys[key] != other[section][key]]
    if unlike:
        raise ConfigError(
            f"--against: {listed(unlike)} differ from the job's; two layouts of one job are compared, which differ in "
            "parallel, memory and the size of microbatches alone; leave the rest out, or put it into JOB"
        )
