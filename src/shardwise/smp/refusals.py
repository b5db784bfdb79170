"""The engine's refusals in SMP's words: a script knows SMP's options, and nothing of the keys of a Job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardwise.errors import ConfigError
from shardwise.job.smp_options import option_names

KEY, VALUE = r"[a-z]+(?:\.[a-z][a-z0-9_]*)+", r"(?:\{.*?\}|\[.*?\]|'[^']*'|[^\s,:;]+)"
KEY_AND_VALUE = re.compile(f"({KEY})=({VALUE})")
KEYS_AHEAD = re.compile(f"(?:{KEY}={VALUE}(?:, )?)+: ")  # of a rule's message
# What a script says otherwise than by an option.
WORDS = {
    "training.microbatch_size": "rows of a microbatch",
    "data.sequence_length": "positions of a row",
    "precision.compute": "dtype of the model",
    "parallel.workers": "ranks",
    "parallel.context_parallel_method": "cp_comm_type",
    "parallel.partition": "smp.set_partition",
    "memory.activation_checkpointing": "smp.set_activation_checkpointing",
    "memory.checkpoint_strategy": "strategy of smp.set_activation_checkpointing",
}
SWITCHES = {"sequence_parallel false": "optimize 'speed'", "all_gather or ring": "all_gather or p2p"}


@contextmanager
def smp_words(version: str, origins: Mapping[str, str] | None = None, where: str = "") -> Iterator[None]:
    """Raise refusals from inside in SMP's words.

    Args:
        version: of SMP, `v1` or `v2`.
        origins: our keys and the `option=value` of the script that gave them.
        where: put ahead of the message.

    Raises:
        ConfigError: what was raised inside, with its class.
    """
    try:
        yield
    except ConfigError as error:
        error.args = (where + in_smp_words(str(error), version, origins or {}),)
        raise


def in_smp_words(message: str, version: str, origins: Mapping[str, str]) -> str:
    """Return a message about keys of a Job with SMP's names for them.

    Of the keys that a rule puts ahead, those that no script can set are left out.
    """
    names = option_names(version) | WORDS

    def with_value(key: str, value: str) -> str:
        return origins.get(key) or (f"{names[key]}={value}" if key in names else "")

    ahead = KEYS_AHEAD.match(message)
    said = [with_value(*match.groups()) for match in KEY_AND_VALUE.finditer(ahead[0] if ahead else "")]
    rest = message[ahead.end() if ahead else 0 :]
    rest = KEY_AND_VALUE.sub(lambda match: with_value(*match.groups()) or match[0], rest)
    return ": ".join(part for part in (", ".join(filter(None, said)), _renamed(rest, names)) if part)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return `text` with SMP's names for keys, dotted or without their section."""
    short = {key.partition(".")[2]: name for key, name in names.items()}
    known = {key: name for key, name in short.items() if "_" in key} | dict(names) | SWITCHES
    longest_first = "|".join(re.escape(key) for key in sorted(known, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{longest_first})(?!\w)", lambda match: known[match[0]], text)
