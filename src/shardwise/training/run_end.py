"""The end of a run: its model in Hugging Face's format, a sample of text, and its last words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.adapters import export_adapter
from shardwise.checkpoint.export import export_hugging_face
from shardwise.checkpoint.writing import copy_chat_template, copy_processor
from shardwise.data.tokenizer import TokenizerSource, load_tokenizer
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.observe.callback import Callback, ObservedSession, reported
from shardwise.observe.metrics import Record
from shardwise.observe.output_disk import writing
from shardwise.training.output import (
    ADAPTER_DIRECTORY,
    EMA_ADAPTER_DIRECTORY,
    EMA_MODEL_DIRECTORY,
    MODEL_DIRECTORY,
    REPORT_FILE,
    SAMPLE_FILE,
)
from shardwise.training.sample import generate
from shardwise.training.setup import AssembledJob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_TOKENS = 24


def writes_model(assembled: AssembledJob) -> bool:
    """Return True if a run's end writes the whole model: not where adapters suffice, whose model is in a directory."""
    return not assembled.facts.adapters or assembled.plan.job.model.path is None


class ModelExport(Callback):
    """Writes the trained model after the last step, before anything else that could fail. Collective.

    Adapters are written in peft's format; the model under them, with the adapters merged, where it is in no directory.
    """

    def __init__(self, assembled: AssembledJob) -> None:
        self._assembled = assembled
        self._is_written = False

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Export the model after the last step, before it is evaluated."""
        if session.steps_done == session.plan.steps:
            self._export(session)

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Export the model of a run that was resumed at its last step."""
        if result["stopped"] is None and not self._is_written:
            self._export(session)

    def _export(self, session: ObservedSession) -> None:
        """Write the model as it is evaluated, and beside it the one of the averaged weights if there is one."""
        self._is_written = True
        with session.averaged():
            self._write(session, ADAPTER_DIRECTORY, MODEL_DIRECTORY)
        if session.model.ema is not None:
            with session.ema_in_place():
                self._write(session, EMA_ADAPTER_DIRECTORY, EMA_MODEL_DIRECTORY)

    def _write(self, session: ObservedSession, adapter: str, model: str) -> None:
        """Write the model with its tokenizer, and the chat template that it was trained with."""
        output = Path(session.job.output)
        tokenizer = self._assembled.data.tokenizer_directory
        if self._assembled.facts.adapters:
            export_adapter(session.model, output / adapter, tokenizer)
        if writes_model(self._assembled):
            export_hugging_face(session.model, output / model, tokenizer, session.note)
        if session.rank == 0 and (output / model).is_dir():
            with writing(output):
                job = session.job
                copy_processor(job.data.processor, job.model.path, output / model)
                copy_chat_template(job.data.chat_template, output / model)


def open_tokenizer(assembled: AssembledJob) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the job's data; None where these are token ids alone, or a caller's own.

    Raises:
        DataError: it cannot be opened.
    """
    job, directory = assembled.plan.job, assembled.data.tokenizer_directory
    if directory is None:
        return None
    key = "data.tokenizer" if job.data.tokenizer is not None else "model.path"
    may_run_code = key == "model.path" and job.model.trust_remote_code
    return load_tokenizer(TokenizerSource(Path(directory), "", may_run_code, key))


class TextSample(Callback):
    """Writes a text sample of a causal language model. Collective."""

    def __init__(self, assembled: AssembledJob) -> None:
        self._assembled = assembled
        self._tokenizer: PreTrainedTokenizerBase | None = None  # of a model and a job that there are samples of
        self._prompt: list[int] = []

    def on_start(self, session: ObservedSession) -> None:
        """Open the tokenizer, while it costs nothing that it cannot be.

        Raises:
            DataError: with the way out.
        """
        job = session.job
        is_language_model = job.model.task == "causal_lm" and self._assembled.facts.generates_text
        self._tokenizer = open_tokenizer(self._assembled) if job.observe.sample and is_language_model else None
        if self._tokenizer is not None:
            self._prompt = self._tokens_of_prompt(self._tokenizer)

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Generate, say and keep the sample. The run has its model: what fails here is reported, not raised."""
        if result["stopped"] or self._tokenizer is None:
            return
        job, output = session.job, Path(session.job.output)
        with reported(session, "no sample"):  # the tokenizer may have code of its own
            tokens = generate(self._assembled.model, self._prompt, job.observe.sample_tokens, job.training.seed)
            text = str(self._tokenizer.decode(tokens))
            if session.rank == 0:
                with writing(output):
                    (output / SAMPLE_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")
            session.note(f"sample:\n{text}")

    def _tokens_of_prompt(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        given = self._assembled.plan.job.observe.sample_prompt
        if given:
            return list(tokenizer.encode(given))
        return self._assembled.data.prompt(min(PROMPT_TOKENS, self._assembled.plan.sequence_length))


class Summary(Callback):
    """Says the last words of a run, once its report is written."""

    rank_zero_only = True

    def __init__(self, assembled: AssembledJob) -> None:
        self._assembled = assembled

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Say why it stopped, or what it has come to and where that is."""
        if result["stopped"]:
            session.note(f"stopped after step {result['steps']}: {result['stopped']}")
            return
        if result["early_stop"]:
            session.note(f"early stop       after step {result['steps']}: {result['early_stop']}")
        if result["skipped"]:
            session.note(
                f"skipped          {result['skipped']} of {result['steps']} steps: loss or gradients were not finite, "
                "or no label was counted"
            )
        is_cross_entropy = not session.job.model.factory and not session.job.reads_pairs
        counted = TASKS[session.job.model.task].counted
        unit = f" nats a {counted}" if is_cross_entropy else ""  # another loss is counted in what it likes
        session.note(f"validation loss  {result['validation_loss']:.4f}{unit}")
        for name, value in result["metrics"].items():
            if name not in ("validation_loss", "training_loss"):
                session.note(f"{name:<16} {value:.4f}")
        if result["training_loss"] is not None:
            steps = _averaged(session.job, result["averaged_steps"])
            session.note(f"training loss    {result['training_loss']:.4f}{unit}, mean of {steps}")
        self._compare(session, result)
        output = Path(session.job.output)
        if self._assembled.facts.adapters:
            session.note(f"adapter          {output / ADAPTER_DIRECTORY}")
        if writes_model(self._assembled):
            session.note(f"model            {output / MODEL_DIRECTORY}")
        if session.model.ema is not None:
            directory = EMA_MODEL_DIRECTORY if writes_model(self._assembled) else EMA_ADAPTER_DIRECTORY
            session.note(f"averaged weights {output / directory}")
        session.note(f"report           {output / REPORT_FILE}")

    def _compare(self, session: ObservedSession, result: Record) -> None:
        """Say how far below the entropy of single tokens the loss lies."""
        if result["unigram_entropy"] is None:
            return
        gain = result["unigram_entropy"] - result["validation_loss"]
        where = "below" if gain >= 0 else "above"
        session.note(f"unigram entropy  {result['unigram_entropy']:.4f} nats a token of the same text")
        session.note(f"                 the model is {abs(gain):.4f} nats {where} it")


def _averaged(job: Job, steps: int) -> str:
    """Name the steps that the training loss is of, and what it holds that a validation loss does not."""
    terms = {"label smoothing": job.training.label_smoothing, "z-loss": job.training.z_loss}
    extra = [name for name, weight in terms.items() if weight]
    words = f"the last {steps} steps" if steps > 1 else "the last step"
    return f"{words}, with {' and '.join(extra)}" if extra else words
