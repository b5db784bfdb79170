"""Names the calls of a model's blocks, of which one may run several times in a forward, as ALBERT's does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

NUMBER = "#"  # of a later call, behind the module's name


def call_names(modules: Iterable[str]) -> Iterator[str]:
    """Yield the name of each call: its module's, and from the second one on with its number, as `name#2`."""
    counts: Counter[str] = Counter()
    for name in modules:
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}{NUMBER}{counts[name]}"


def called_module(call: str) -> str:
    """Return the name of the module that is called."""
    return call.partition(NUMBER)[0]
