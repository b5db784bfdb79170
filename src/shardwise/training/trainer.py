"""Trainer: when things happen. How a step is done is in training/step.py, what is shown in training/recorder.py."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from shardwise.checkpoint.export import export_hugging_face
from shardwise.checkpoint.manifest import Progress
from shardwise.errors import ShardwiseError
from shardwise.job.schema import Job
from shardwise.launch.interrupt import Interrupt
from shardwise.observe.memory import peak_memory_bytes, reset_peak
from shardwise.observe.profile import profiler
from shardwise.planner.constants.hardware import peak_tflops
from shardwise.training.forecast import Forecast, compared, is_out_of_memory, out_of_memory
from shardwise.training.keeper import Keeper
from shardwise.training.optimizer import learning_rate
from shardwise.training.output import MODEL_DIRECTORY
from shardwise.training.recent_loss import RecentLoss
from shardwise.training.recorder import Recorder, state_table
from shardwise.training.sample import generate
from shardwise.training.setup import Run, set_up
from shardwise.training.step import StepResult, evaluate, train_step

MOST_SKIPPED = 50  # non-finite steps in a row after which training cannot be going anywhere
PROMPT_TOKENS = 24


@dataclass
class TrainingResult:
    """What a finished run says, equal on every rank.

    `training_loss` is the mean of the last `averaged_steps` steps, as many as one evaluation has batches, each before
    its update. `stopped` is why the run ended before its last step, if it did.
    """

    validation_loss: float | None
    unigram_entropy: float | None
    training_loss: float | None
    averaged_steps: int
    steps: int
    tokens: int
    seconds: float
    skipped: int
    stopped: str | None = None


def train_rank(job: Job, device: torch.device) -> TrainingResult:
    """Train `job` on this rank; the process group exists and the output directory is claimed. Collective."""
    reset_peak(device)
    run = set_up(job, device)
    keeper = Keeper(run)
    progress, notes = keeper.restore()
    with (
        Recorder(run, progress.step, enabled=dist.get_rank() == 0) as recorder,
        Interrupt(dist.get_rank()) as interrupt,
    ):
        for note in notes:
            recorder.say(note)
        try:
            return Trainer(run, recorder, keeper, interrupt, progress).run_all()
        finally:
            keeper.close()


class Trainer:
    """One rank's training loop."""

    def __init__(self, run: Run, recorder: Recorder, keeper: Keeper, interrupt: Interrupt, progress: Progress) -> None:
        self.run, self.recorder, self.keeper, self.interrupt = run, recorder, keeper, interrupt
        self.progress = progress
        self.plan, self.job = run.plan, run.plan.job
        self.output = Path(self.job.output)
        self.forecast = Forecast.of(run)
        self.recent = RecentLoss(run.evaluation_batches)
        self.peak = self.job.observe.peak_tflops or peak_tflops(self.plan.world.accelerator, self.plan.dtypes.compute)

    def run_all(self) -> TrainingResult:
        """Steps, evaluations, checkpoints; at the end export, sample and report."""
        started, steps, result, validation = time.perf_counter(), self.job.training.steps, None, None
        self.recorder.expect(self.forecast)
        with profiler(self.job, self.output) as profile:
            for step in range(self.progress.step, steps):
                result = self.one_step(step)
                profile.step()
                validation = self.evaluate() if self.evaluation_due() else None
                stopped = self.keeper.after_step(self.progress_with(validation), result, self.interrupt.reason)
                if stopped and self.progress.step < steps:
                    return self.end(started, result, None, stopped)
        return self.end(started, result, self.evaluate() if validation is None else validation)

    def end(
        self, started: float, result: StepResult | None, validation: float | None, stopped: str | None = None
    ) -> TrainingResult:
        """The last words of a run, and its model where it has come to its end."""
        final = TrainingResult(
            validation_loss=validation,
            unigram_entropy=self.run.data.entropy_of(self.evaluated_sequences()),
            training_loss=self.recent.mean,
            averaged_steps=self.recent.steps,
            steps=self.progress.step,
            tokens=self.progress.tokens,
            seconds=time.perf_counter() - started,
            skipped=self.progress.skipped,
            stopped=stopped,
        )
        if stopped:
            self.recorder.finish(vars(final))
            self.recorder.say(f"stopped after step {final.steps}: {stopped}")
        else:
            self.finish(final)
        return final

    def one_step(self, step: int) -> StepResult:
        """Train one step and record it."""
        run, began, before = self.run, time.perf_counter(), self.progress
        rate = learning_rate(self.job.optimizer, step, self.job.training.steps, self.plan.warmup_steps)
        run.optimizer.set_learning_rate(rate)
        batches = run.stream.batches_from(before.samples)
        try:
            result = train_step(
                run.model, run.objective, batches, run.optimizer, run.scaler, step,
                stop=self.interrupt.reason is not None, failed=self.keeper.failed,
            )  # fmt: skip
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise out_of_memory(run, self.forecast, error) from error
            raise
        self.progress = Progress(
            step=step + 1,
            samples=before.samples + self.plan.sequences_per_step,
            tokens=before.tokens + result.count,
            skipped=before.skipped + result.skipped,
            skipped_in_a_row=before.skipped_in_a_row + 1 if result.skipped else 0,
            data_hash=f"{(int(before.data_hash, 16) + result.data_hash) % (1 << 64):016x}",
        )
        self.recent.add(result)
        record = self.describe(step + 1, result, rate, time.perf_counter() - began)
        self.recorder.record(record)
        comparison = self.forecast.watch(record, dist.get_rank())
        if comparison is not None:
            self.recorder.note(comparison, compared(comparison))
        if step == 0 and self.recorder.enabled:
            self.recorder.say(_rendered(state_table(run)))
        if self.progress.skipped_in_a_row == MOST_SKIPPED:
            raise ShardwiseError(
                f"gradients were not finite for {MOST_SKIPPED} steps in a row (loss {result.loss}, loss scale "
                f"{result.loss_scale:g}); lower optimizer.learning_rate or use precision.compute: bf16"
            )
        return result

    def evaluation_due(self) -> bool:
        """Whether the validation loss belongs to the step that has just ended; the last one's always does."""
        every, step = self.job.training.evaluate_every, self.progress.step
        return step == self.job.training.steps or bool(every and step % every == 0)

    def progress_with(self, validation: float | None) -> Progress:
        """The progress as a checkpoint keeps it."""
        return self.progress.model_copy(update={"validation_loss": validation})

    def describe(self, step: int, result: StepResult, rate: float, seconds: float) -> dict[str, Any]:
        """The record of a step. Collective: peak memory is gathered from every rank."""
        plan, facts = self.plan, self.run.facts
        per_second = result.count / seconds
        model_flops = facts.model_flops_per_token(plan.sequence_length)
        tflops = per_second * model_flops / plan.world.size / 1e12
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "tokens": self.progress.tokens,
            "tokens_per_second": per_second,
            "tflops_per_rank": tflops,
            "smp_tflops_per_rank": per_second * facts.smp_flops_per_token() / plan.world.size / 1e12,
            "mfu": tflops / self.peak if self.peak else None,
            "peak_memory_bytes": self.peak_memory(),
            "skipped": result.skipped,
            "data_hash": self.progress.data_hash,
            "seconds": seconds,
        }
        return record | ({"loss_scale": result.loss_scale} if plan.dtypes.compute == "fp16" else {})

    def peak_memory(self) -> list[int]:
        """Peak bytes of every rank."""
        device = self.run.model.device
        mine = torch.tensor([peak_memory_bytes(device)], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self.plan.world.size)]
        dist.all_gather(everyone, mine)
        return [int(value) for value in everyone]

    def evaluate(self) -> float:
        """Validation loss after the steps so far, recorded."""
        run = self.run
        batches = list(run.stream.evaluation(run.data.validation, run.evaluation_batches))
        loss = evaluate(run.model, run.objective, batches)
        compared = {} if self.recent.mean is None else {"training_loss": self.recent.mean}
        self.recorder.record({"step": self.progress.step, "validation_loss": loss, **compared})
        return loss

    def evaluated_sequences(self) -> int:
        """Validation sequences that one evaluation covers."""
        return min(len(self.run.data.validation), self.run.evaluation_batches * self.plan.sequences_per_step)

    def finish(self, result: TrainingResult) -> None:
        """Export, sample, report and the last words."""
        run, say = self.run, self.recorder.say
        export_hugging_face(run.model, self.output / MODEL_DIRECTORY, run.data.tokenizer_directory)
        text = self.sample()
        if text is not None:
            self.recorder.sample(text)
            say(f"sample:\n{text}")
        report = self.recorder.finish(vars(result))
        assert result.validation_loss is not None
        if result.skipped:
            say(f"skipped          {result.skipped} of {result.steps} steps: loss or gradients were not finite")
        unit = "" if self.job.model.factory else " nats a token"  # another's loss is counted in what it likes
        say(f"validation loss  {result.validation_loss:.4f}{unit}")
        if result.training_loss is not None:
            say(f"training loss    {result.training_loss:.4f}{unit}, mean of {self.averaged(result.averaged_steps)}")
        if result.unigram_entropy is not None:
            gain = result.unigram_entropy - result.validation_loss
            where = "below" if gain >= 0 else "above"
            say(f"unigram entropy  {result.unigram_entropy:.4f} nats a token of the same text")
            say(f"                 the model is {abs(gain):.4f} nats {where} it")
        say(f"model            {self.output / MODEL_DIRECTORY}")
        say(f"report           {report}")

    def averaged(self, steps: int) -> str:
        """Name the steps that the training loss is of, and what it holds that a validation loss does not."""
        training = self.job.training
        terms = {"label smoothing": training.label_smoothing, "z-loss": training.z_loss}
        extra = [name for name, weight in terms.items() if weight]
        what = f"the last {steps} steps" if steps > 1 else "the last step"
        return f"{what}, with {' and '.join(extra)}" if extra else what

    def sample(self) -> str | None:
        """Generated text of a causal language model, or None where there is nothing to generate with. Collective."""
        run, observe = self.run, self.job.observe
        directory = run.data.tokenizer_directory
        if (
            not observe.sample
            or directory is None
            or self.job.model.task != "causal_lm"
            or not run.facts.generates_text
        ):
            return None
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        given = observe.sample_prompt
        prompt = tokenizer.encode(given) if given else run.data.prompt(min(PROMPT_TOKENS, self.plan.sequence_length))
        return str(tokenizer.decode(generate(run.model, prompt, observe.sample_tokens, self.job.training.seed)))


def _rendered(renderable: Any) -> str:
    console = Console(width=100, file=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip()
