"""Rows of conversations in a directory for other machines: how they were rendered, which a job has to say too.

A job says its template, what is trained on and its objective whether it renders rows or takes them: what it exports,
evaluates and mixes with them follows the same keys. So the directory is refused where they differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.data.chat_template import read_template
from shardwise.data.shared_manifest import SharedTokens
from shardwise.data.shared_tokens import TOKENIZER, vocabulary_hash
from shardwise.data.store import digest
from shardwise.data.tokenizer import TokenizerSource, load_tokenizer
from shardwise.errors import ConfigError
from shardwise.job.schema import Job

TEMPLATE = "chat_template.jinja"  # that of data.chat_template, beside the columns


def rendering_of(job: Job, tokenizer: Path) -> dict[str, Any]:
    """Return how a job renders its rows, with the tokenizer in a directory: what the manifest says of them."""
    template = read_template(job.data)
    own = load_tokenizer(TokenizerSource(tokenizer, "", job.model.trust_remote_code)).chat_template
    return {
        "format": job.data.format,
        "train_on": job.data.trained_part,
        "pairs": job.reads_pairs,
        "template": digest(own if template is None else template),
    }


def check_rendering(shared: SharedTokens, job: Job) -> None:
    """Refuse a job that would render the rows of a directory otherwise.

    Raises:
        ConfigError: with the key that differs.
    """
    paths = [Path(path) for path in (job.data.tokenizer, job.model.path) if path is not None]
    tokenizer = next((path for path in paths if vocabulary_hash(path)), shared.directory / TOKENIZER)
    given, made = rendering_of(job, tokenizer), shared.rows
    assert made is not None
    where = f"data.path={str(shared.directory)!r} holds rows"
    if given["train_on"] != made["train_on"]:
        raise ConfigError(
            f"{where} of which {made['train_on']} is trained on, and this job's data.train_on is {given['train_on']}; "
            f"set data.train_on: {made['train_on']}, or give the corpus"
        )
    if given["pairs"] != made["pairs"]:
        raise ConfigError(
            f"{where} {'in' if made['pairs'] else 'without their'} pairs of completions, and this job's "
            f"training.objective={job.objective} takes them {'in pairs' if given['pairs'] else 'one by one'}; set the "
            "objective with which they were prepared, or give the corpus"
        )
    if given["template"] != made["template"]:
        is_beside = (shared.directory / TEMPLATE).is_file()
        key, place = ("data.chat_template", TEMPLATE) if is_beside else ("data.tokenizer", TOKENIZER)
        other = f"data.chat_template={job.data.chat_template!r}" if job.data.chat_template else f"that in {tokenizer}"
        clear = "" if is_beside or not job.data.chat_template else "leave data.chat_template out and "
        raise ConfigError(
            f"{where} rendered by another chat template than {other}; {clear}set {key} to "
            f"{shared.directory / place}, or give the corpus"
        )
