"""The end of a run: its model in Hugging Face's format, a sample of text, and its last words."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.export import export_hugging_face
from shardwise.job.schema import Job
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record
from shardwise.observe.output_disk import writing
from shardwise.training.output import MODEL_DIRECTORY, REPORT_FILE, SAMPLE_FILE
from shardwise.training.sample import generate
from shardwise.training.setup import AssembledJob

PROMPT_TOKENS = 24


class ModelExport(Callback):
    """Writes the trained model where a run has come to its end. Collective."""

    def __init__(self, assembled: AssembledJob) -> None:
        self._assembled = assembled

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Export the model with its tokenizer."""
        if result["stopped"] is None:
            directory = Path(session.job.output) / MODEL_DIRECTORY
            export_hugging_face(session.model, directory, self._assembled.data.tokenizer_directory)


class TextSample(Callback):
    """Writes a text sample of a causal language model. Collective."""

    def __init__(self, assembled: AssembledJob) -> None:
        self._assembled = assembled

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Generate, say and keep the sample."""
        text = None if result["stopped"] else self._generate()
        if text is None:
            return
        output = Path(session.job.output)
        if session.rank == 0:
            with writing(output):
                (output / SAMPLE_FILE).write_text(text)
        session.note(f"sample:\n{text}")

    def _generate(self) -> str | None:
        """Return generated text, or None where there is nothing to generate with."""
        assembled, job = self._assembled, self._assembled.plan.job
        directory = assembled.data.tokenizer_directory
        is_language_model = job.model.task == "causal_lm" and assembled.facts.generates_text
        if not job.observe.sample or directory is None or not is_language_model:
            return None
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        given, length = job.observe.sample_prompt, assembled.plan.sequence_length
        prompt = tokenizer.encode(given) if given else assembled.data.prompt(min(PROMPT_TOKENS, length))
        return str(tokenizer.decode(generate(assembled.model, prompt, job.observe.sample_tokens, job.training.seed)))


class Summary(Callback):
    """Says the last words of a run, once its report is written."""

    rank_zero_only = True

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Say why it stopped, or what it has come to and where that is."""
        if result["stopped"]:
            session.note(f"stopped after step {result['steps']}: {result['stopped']}")
            return
        if result["skipped"]:
            session.note(
                f"skipped          {result['skipped']} of {result['steps']} steps: loss or gradients were not finite"
            )
        unit = "" if session.job.model.factory else " nats a token"  # another's loss is counted in what it likes
        session.note(f"validation loss  {result['validation_loss']:.4f}{unit}")
        if result["training_loss"] is not None:
            steps = _averaged(session.job, result["averaged_steps"])
            session.note(f"training loss    {result['training_loss']:.4f}{unit}, mean of {steps}")
        self._compare(session, result)
        output = Path(session.job.output)
        session.note(f"model            {output / MODEL_DIRECTORY}")
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
