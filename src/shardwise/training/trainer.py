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
from shardwise.config import Job
from shardwise.errors import ShardwiseError
from shardwise.observe.memory import peak_memory_bytes, reset_peak
from shardwise.observe.profile import profiler
from shardwise.planner.hardware import peak_tflops
from shardwise.training.optimizer import learning_rate
from shardwise.training.output import MODEL_DIRECTORY
from shardwise.training.recorder import Recorder, state_table
from shardwise.training.sample import generate
from shardwise.training.setup import Run, set_up
from shardwise.training.step import StepResult, evaluate, train_step

MOST_SKIPPED = 50  # non-finite steps in a row after which training cannot be going anywhere
PROMPT_TOKENS = 24


@dataclass
class TrainingResult:
    """What a finished run says, equal on every rank."""

    validation_loss: float
    unigram_entropy: float | None
    training_loss: float
    steps: int
    tokens: int
    seconds: float
    skipped: int


def train_rank(job: Job, device: torch.device) -> TrainingResult:
    """Train `job` on this rank; the process group exists and the output directory is claimed. Collective."""
    reset_peak(device)
    run = set_up(job, device)
    with Recorder(run, enabled=dist.get_rank() == 0) as recorder:
        return Trainer(run, recorder).run_all()


class Trainer:
    """One rank's training loop."""

    def __init__(self, run: Run, recorder: Recorder) -> None:
        self.run, self.recorder = run, recorder
        self.plan, self.job = run.plan, run.plan.job
        self.output = Path(self.job.output)
        self.tokens = self.skipped = self.skipped_in_a_row = 0
        self.peak = self.job.observe.peak_tflops or peak_tflops(self.plan.world.accelerator, self.plan.dtypes.compute)

    def run_all(self) -> TrainingResult:
        """Steps, evaluations, export, sample and report."""
        started, result = time.perf_counter(), None
        with profiler(self.job, self.output) as profile:
            for step in range(self.job.training.steps):
                result = self.one_step(step)
                profile.step()
                every = self.job.training.evaluate_every
                if every and (step + 1) % every == 0 and step + 1 < self.job.training.steps:
                    self.evaluate(step + 1)
        assert result is not None
        validation = self.evaluate(self.job.training.steps)
        final = TrainingResult(
            validation_loss=validation,
            unigram_entropy=self.run.data.entropy_of(self.evaluated_sequences()),
            training_loss=result.loss,
            steps=self.job.training.steps,
            tokens=self.tokens,
            seconds=time.perf_counter() - started,
            skipped=self.skipped,
        )
        self.finish(final)
        return final

    def one_step(self, step: int) -> StepResult:
        """Train one step and record it."""
        run, began = self.run, time.perf_counter()
        rate = learning_rate(self.job.optimizer, step, self.job.training.steps)
        run.optimizer.set_learning_rate(rate)
        batches = run.stream.batches(step)
        result = train_step(run.model, run.program, batches, run.optimizer, run.scaler, step)
        self.tokens += result.count
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        self.recorder.record(self.describe(step + 1, result, rate, time.perf_counter() - began))
        if step == 0 and self.recorder.enabled:
            self.recorder.say(_rendered(state_table(run)))
        if self.skipped_in_a_row == MOST_SKIPPED:
            raise ShardwiseError(
                f"gradients were not finite for {MOST_SKIPPED} steps in a row (loss {result.loss}, loss scale "
                f"{result.loss_scale:g}); lower optimizer.learning_rate or use precision.compute: bf16"
            )
        return result

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
            "tokens": self.tokens,
            "tokens_per_second": per_second,
            "tflops_per_rank": tflops,
            "smp_tflops_per_rank": per_second * facts.smp_flops_per_token() / plan.world.size / 1e12,
            "mfu": tflops / self.peak if self.peak else None,
            "peak_memory_bytes": self.peak_memory(),
            "skipped": result.skipped,
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

    def evaluate(self, step: int) -> float:
        """Validation loss after `step` steps, recorded."""
        run = self.run
        batches = list(run.stream.evaluation(run.data.validation, run.evaluation_batches))
        loss = evaluate(run.model, run.program, batches)
        self.recorder.record({"step": step, "validation_loss": loss})
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
        say(f"validation loss  {result.validation_loss:.4f} nats a token")
        if result.unigram_entropy is not None:
            gain = result.unigram_entropy - result.validation_loss
            where = "below" if gain >= 0 else "above"
            say(f"unigram entropy  {result.unigram_entropy:.4f} nats a token of the same text")
            say(f"                 the model is {abs(gain):.4f} nats {where} it")
        say(f"model            {self.output / MODEL_DIRECTORY}")
        say(f"report           {report}")

    def sample(self) -> str | None:
        """Generated text of a causal language model, or None where there is nothing to generate with. Collective."""
        run, observe = self.run, self.job.observe
        directory = run.data.tokenizer_directory
        if (
            not observe.sample
            or directory is None
            or self.job.model.task != "causal_lm"
            or not run.facts.is_hugging_face
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
