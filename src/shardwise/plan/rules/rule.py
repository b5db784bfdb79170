"""A row of the legality table, and the ways of writing one that recur."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.job.schema import Section
from shardwise.plan.draft import Draft, changed, lookup
from shardwise.words import nearest


@dataclass(frozen=True)
class Rule:
    """One row: `keys` take part, `sentence` has to hold and is broken when `when` says so, `fix` is the way out.

    `because` and `use` say the sentence and the fix with the numbers of the job at hand.
    """

    id: str
    keys: tuple[str, ...]
    sentence: str
    when: Callable[[Draft], Any]
    fix: str
    because: Callable[[Draft], str] | None = None
    use: Callable[[Draft], str] | None = None

    def message(self, draft: Draft) -> str:
        """`key=value, key=value: why; the nearest fix`."""
        values = ", ".join(f"{key}={_shown(lookup(draft.job, key))}" for key in self.keys)
        because = self.because(draft) if self.because else self.sentence
        return f"{values}: {because}; {self.use(draft) if self.use else self.fix}"


def _shown(value: Any) -> Any:
    """Return a section's keys that were set, also of sections in a list, and any other value itself."""
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value


def idle(id: str, key: str, sentence: str, when: Callable[[Draft], Any], fix: str = "leave it out") -> Rule:
    """Return a row for a key that was set although it would do nothing."""
    return Rule(id, (key,), sentence, lambda d: changed(d.job, key) and when(d), fix)


def spelling(word: str, known: list[str]) -> str:
    hint = nearest(word, known).strip()
    return hint[0].lower() + hint[1:]
