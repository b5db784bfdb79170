"""Tokens that a job adds to its tokenizer, and the embeddings that its model needs for them.

A model is built before its data are read. So its tokenizer is opened here for the number of its tokens;
`data/tokenizer.py` saves the one with which text is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedConfig

from shardwise.errors import DataError
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> int:
    """Add those of `tokens` to a tokenizer that it lacks; return the rows of embeddings that all its tokens need.

    Text is searched for them as it is written. They are no special tokens: decoded text shows them.
    """
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


def grow_vocabulary(config: PreTrainedConfig, job: Job) -> None:
    """Raise the vocabulary of a config to the tokens of the job's tokenizer with those that it adds, if it is smaller.

    Raises:
        DataError: the tokenizer cannot be opened.
    """
    directory = job.data.tokenizer or job.model.path
    if not job.data.added_tokens or directory is None:
        return
    text: Any = config.get_text_config()
    if Path(directory).is_dir():
        may_run_code = job.data.tokenizer is None and job.model.trust_remote_code
        needed = _extended_size(directory, tuple(job.data.added_tokens), may_run_code)
    else:  # a plan of a model that is elsewhere: its tokenizer is taken for as large as its vocabulary
        needed = text.vocab_size + len(job.data.added_tokens)
    text.vocab_size = max(text.vocab_size, needed)


def frozen_embeddings(facts: ModelFacts) -> list[str]:
    """Return the parameters with a row for each token that are not trained."""
    rows = facts.vocabulary_size
    return [name for name, shape in facts.base_shapes.items() if rows and shape[0] == rows and name in facts.frozen]


@cache
def _extended_size(directory: str, tokens: tuple[str, ...], may_run_code: bool) -> int:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=may_run_code)
    except Exception as error:  # tokenizers raises bare Exception for a corrupt file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"data.added_tokens: the tokenizer in {directory} cannot be opened: {reason}") from error
    return add_tokens(tokenizer, tokens)
