"""`shardwise data prepare JOB`: the corpus of a job as tokens, in the cache or in a directory for other machines."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, OutputError
from shardwise.words import listed, say_note

if TYPE_CHECKING:
    from shardwise.data.token_data import TokenData
    from shardwise.job.data_section import DataSection
    from shardwise.job.schema import Job


def prepare_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `shardwise data prepare`."""
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="the job; left out: the embedded default")
    parser.add_argument(
        "--output", metavar="DIR", help="the directory or URL (s3://…) to make; it must not be there yet"
    )


def run_data_prepare(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    """Tokenize the corpus of a job, and leave it where it is asked for."""
    from shardwise.commands.data import refuse_tensors
    from shardwise.commands.train import plan_with_facts
    from shardwise.data.corpus import with_format
    from shardwise.job.sources import read_job
    from shardwise.training.setup import prepare_data

    job, notes = read_job(options.job, keys)
    job = with_format(job)
    refuse_tensors(job, "which are not tokenized ahead")
    _refuse_data(job.data, options.output)
    if options.output is not None:
        _refuse_taken(options.output)
    for note in notes:
        say_note(note)
    data = prepare_data(job, plan_with_facts(job)[1], say_note)
    if options.output is not None:
        _leave(job, data, options.output)
    for part in [source.data for source in data.sources] or [data]:
        unit = "documents" if part.row_counts is None else "rows"
        print(f"{part.documents:,} {unit}, {part.tokens:,} tokens in {options.output or part.directory}")
    return 0


def _refuse_data(data: DataSection, output: str | None) -> None:
    """Refuse data that are not tokenized ahead, or that one directory does not hold.

    Raises:
        ConfigError: with a way out.
    """
    if data.has_streams:
        names = [source.label for source in data.sources if source.streaming]
        what = f"streaming of data.sources, {listed(names)}," if names else "data.streaming"
        raise ConfigError(f"{what} tokenizes while a model is trained; leave it out to tokenize now")
    if output is not None and data.sources:
        raise ConfigError(
            f"--output={output!r} takes one corpus, and data.sources has {len(data.sources)}; prepare each by itself "
            "as data.path, with one data.tokenizer, and name the directories in data.sources"
        )


def _refuse_taken(output: str) -> None:
    from shardwise.data.remote_tokens import is_taken, is_url

    if is_taken(output) if is_url(output) else Path(output).expanduser().exists():
        raise OutputError(f"--output={output!r} is there already; give another, or remove it")


def _write(job: Job, data: TokenData, target: Path) -> None:
    """Write the tokens of a job into an empty directory, and of rows how they were rendered."""
    from shardwise.data.chat_template import read_template
    from shardwise.data.shared_rows import TEMPLATE, rendering_of
    from shardwise.data.shared_tokens import write_shared

    cached, tokenizer = Path(str(data.directory)), data.tokenizer_directory and Path(data.tokenizer_directory)
    if not tokenizer or not job.data.has_rows:
        return write_shared(cached, tokenizer or None, target)
    template = read_template(job.data)
    write_shared(cached, tokenizer, target, rendering_of(job, tokenizer), {TEMPLATE: template} if template else {})


def _leave(job: Job, data: TokenData, output: str) -> None:
    """Write the directory under another name first; behind a URL its manifest comes last."""
    from shardwise.data.remote_tokens import is_url, upload

    target = Path(output).expanduser().absolute()
    try:
        if is_url(output):
            with tempfile.TemporaryDirectory() as directory:
                _write(job, data, Path(directory))
                return upload(Path(directory), output)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.unfinished-", dir=target.parent) as directory:
            made = Path(directory) / target.name  # with the permissions that any directory has
            made.mkdir()
            _write(job, data, made)
            made.rename(target)
    except OSError as error:
        raise OutputError(f"--output={output!r} cannot be written: {error}; give another place") from error
