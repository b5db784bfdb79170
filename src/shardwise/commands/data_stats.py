"""`shardwise data stats JOB`: what is in a job's corpus, as a table or JSON."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.words import output_console, say_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stats_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `shardwise data stats`."""
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="the job; left out: the embedded default")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_data_stats(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Print the numbers of each corpus of a job."""
    from shardwise.commands.data import opened_tokenizer, refuse_tensors
    from shardwise.commands.train import plan_with_facts
    from shardwise.data.corpus import with_format
    from shardwise.data.statistics import statistics
    from shardwise.job.sources import read_job
    from shardwise.training.setup import prepare_data

    job, notes = read_job(options.job, keys)
    job = with_format(job)
    refuse_tensors(job, "of which no tokens are counted")
    for note in notes:
        say_note(note)
    data = prepare_data(job, plan_with_facts(job)[1], say_note)
    parts = statistics([(source.name, source.data) for source in data.sources] or [("data", data)])
    if options.json:
        print(json.dumps(parts, indent=1))
        return 0
    output_console().print(_table(parts, opened_tokenizer(job, data)))
    return 0


def _table(parts: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase | None) -> Table:
    """Return a table with a column for each part."""
    table = Table("", *(escape(part["name"]) for part in parts))
    columns = [_cells(part, tokenizer) for part in parts]
    for name in columns[0]:
        table.add_row(name, *(Text(cells.get(name, "")) for cells in columns))
    return table


def _cells(part: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    lengths = part["lengths"]
    cells = {
        "corpus": part["corpus"],
        "documents": f"{part['documents']:,}",
        "tokens": f"{part['tokens']:,}",
        "lengths, percentiles": ", ".join(f"{share}: {length:,}" for share, length in lengths.items()),
        f"longer than {part['sequence_length']:,}": f"{part['longer_share']:.1%}",
    }
    for name, share in (("cut", "cut_share"), ("left out", "left_out_share")):
        if share in part:
            cells[name] = f"{part[share]:.1%}"
    used, size = part["vocabulary_seen"], part["vocabulary_size"]
    cells["duplicates"] = f"{part['duplicates']:,} ({part['duplicate_share']:.1%})"
    cells["vocabulary that occurs"] = f"{used:,} of {size:,} ({part['vocabulary_share']:.1%})"
    total = part["tokens"]
    frequent = (f"{_shown(token, tokenizer)} {count / total:.1%}" for token, count in part["most_frequent"])
    return cells | {"most frequent": ", ".join(frequent)}


def _shown(token: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    return str(token) if tokenizer is None else repr(str(tokenizer.decode([token])))
