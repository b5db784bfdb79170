"""`shardwise data show JOB`: samples as the model gets them, with what is trained on, boundaries and padding.

What is trained on is green on a terminal and stands between « and » elsewhere. Samples come in the order of training,
from the cache that a run reads too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from shardwise.commands.arguments import whole_number
from shardwise.errors import ConfigError
from shardwise.job.tasks import TASKS
from shardwise.words import output_console, say_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardwise.data.batch import Batch
    from shardwise.data.token_data import TokenData
    from shardwise.job.schema import Job

SHOWN = 2  # samples, unless asked for more
BEGIN, END = "«", "»"  # around what is trained on, where there are no colours
TRAINED, PADDING = "bold green", "dim"


class SampleRow(NamedTuple):
    """A row or document of a sample: its first position, token ids, and whether each is a target of the loss."""

    start: int
    ids: list[int]
    trained: list[bool]
    is_padding: bool
    completion: str = ""  # of a pair of preferences: chosen or rejected

    @property
    def name(self) -> str:
        """Its positions, and how many of them are targets."""
        what = "padding" if self.is_padding else f"{sum(self.trained)} trained on"
        which = f"{self.completion}, " if self.completion else ""
        return f"{which}positions {self.start}-{self.start + len(self.ids) - 1}, {what}"


def show_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `shardwise data show`."""
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="the job; left out: the embedded default")
    parser.add_argument(
        "--samples", type=whole_number, default=SHOWN, metavar="N", help=f"how many are shown (default: {SHOWN})"
    )
    parser.add_argument("--tokens", action="store_true", help="a table with a token a line, instead of the text")


def run_data_show(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Show the first samples of a job's training."""
    from shardwise.commands.train import plan_with_facts
    from shardwise.data.corpus import with_format
    from shardwise.job.sources import read_job
    from shardwise.training.setup import prepare_data

    job, notes = read_job(options.job, keys)
    job = with_format(job)
    if job.data.factory is not None or TASKS[job.model.task].samples != "chat":  # whose tensors hold tokens
        refuse_tensors(job, "which have no text to show")
    for note in notes:
        say_note(note)
    data = prepare_data(job, plan_with_facts(job)[1], say_note)
    for note in data.notes():
        say_note(note)
    console, tokenizer = output_console(), opened_tokenizer(job, data)
    for counter in range(options.samples):
        rows = list(sample_rows(data, job, counter))
        targets, padding = sum(sum(row.trained) for row in rows), sum(len(row.ids) for row in rows if row.is_padding)
        console.print(
            f"sample {counter}: {sum(len(row.ids) for row in rows)} positions, {targets} trained on, {padding} padding",
            style="bold",
            highlight=False,
        )
        console.print(_table(rows, tokenizer) if options.tokens else _texts(rows, tokenizer, console.is_terminal))
    return 0


def refuse_tensors(job: Job, rule: str) -> None:
    """Refuse data that become tensors without tokens; `rule` says why.

    Raises:
        ConfigError: with what makes tensors of them.
    """
    from shardwise.data.file_samples import gives_samples  # torch, which the command line starts without

    if gives_samples(job):
        factory, task = job.data.factory, job.model.task
        what = f"model.task={task!r} makes" if factory is None else f"data.factory={factory!r} gives"
        raise ConfigError(f"{what} tensors, {rule}; train on them as they are")


def opened_tokenizer(job: Job, data: TokenData) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that the tokens of a job are of; None where there is none."""
    from shardwise.data.tokenizer import TokenizerSource, load_tokenizer

    if data.tokenizer_directory is None:
        return None
    return load_tokenizer(TokenizerSource(Path(data.tokenizer_directory), "", job.model.trust_remote_code))


def sample_rows(data: TokenData, job: Job, counter: int) -> Iterator[SampleRow]:
    """Yield the rows or documents of the sample `counter` of a job's training, and padding as one of its own."""
    from shardwise.data.loader import training_index
    from shardwise.data.mixture import Mixture
    from shardwise.job.tasks import IGNORED

    split, index = data.train, training_index(data.train, job.training.seed, counter)
    if isinstance(split, Mixture):
        source, index = split.place_of(counter)
        data = data.sources[source].data
        split = data.train
    batch = split.batch([index], [counter], job.training.seed)
    assert batch.labels is not None
    ids, labels = batch.inputs["input_ids"][0].tolist(), batch.labels[0].tolist()
    if TASKS[job.model.task].labels == "next":  # a label stands before its token
        labels = [IGNORED, *labels[:-1]]
    elif TASKS[job.model.task].labels == "decoder":  # or is the decoder's
        labels = [IGNORED] * len(ids)
    starts = _starts(data, index, batch)
    for number, (start, end) in enumerate(pairwise([*starts, len(ids)])):
        is_padding = data.row_counts is not None and start == starts[-1]
        completion = "" if batch.completions is None or is_padding else ("chosen", "rejected")[number % 2]
        trained = [label != IGNORED for label in labels[start:end]]
        if start < end:
            yield SampleRow(start, ids[start:end], trained, is_padding, completion)


def _starts(data: TokenData, index: int, batch: Batch) -> list[int]:
    """Return the first positions of a sample's documents; of rows also that of the padding behind them."""
    from shardwise.data.packed_rows import PackedRows  # torch, which the command line starts without

    if isinstance(data.train, PackedRows):
        return [0, *accumulate(len(data.train.row(row)[0]) for row in data.train.sequences[index])]
    if batch.document_ids is None:
        return [0]
    return [0, *(batch.document_ids[0].diff().nonzero().flatten() + 1).tolist()]


def _texts(rows: list[SampleRow], tokenizer: PreTrainedTokenizerBase | None, in_colour: bool) -> Text:
    """Return the rows as text, each below a line with its positions."""
    text = Text()
    for row in rows:
        text.append(f"-- {row.name}\n", style=PADDING)
        for trained, pairs in groupby(zip(row.ids, row.trained, strict=True), key=lambda pair: pair[1]):
            piece = _decoded([token for token, _ in pairs], tokenizer)
            if not row.is_padding:
                text.append(piece if in_colour or not trained else f"{BEGIN}{piece}{END}", TRAINED if trained else "")
        text.append("" if row.is_padding else "\n")
    text.rstrip()
    return text


def _table(rows: list[SampleRow], tokenizer: PreTrainedTokenizerBase | None) -> Table:
    """Return a table with a line for each token."""
    table = Table("position", "row", "in row", "id", "token", "trained on")
    for number, row in enumerate(rows):
        for place, (token, trained) in enumerate(zip(row.ids, row.trained, strict=True)):
            cells = (row.start + place, "padding" if row.is_padding else number, place, token)
            style = TRAINED if trained else PADDING if row.is_padding else ""
            shown = Text(repr(_decoded([token], tokenizer)))
            table.add_row(*map(str, cells), shown, "yes" if trained else "", style=style)
        table.add_section()
    return table


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the text of tokens; their ids where there is no tokenizer."""
    return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))
