"""Outcomes: what became of the keys of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shardwise.job.secret_forms import SECRET_VALUE, names_secret

Effect = Literal["acts", "no effect", "refused"]
HIDDEN = "use_wandb"  # which may hold the key of an account
SHOWN = 60  # characters of a value in a line


@dataclass(frozen=True)
class KeyOutcome:
    """Outcome of one key of a recipe.

    Attributes:
        says: the keys that it became, or why it has no effect or is refused.
        is_default: whether the recipe leaves it out, and this is what its own program takes then.
    """

    name: str
    value: Any
    effect: Effect
    says: str
    is_default: bool = False

    @property
    def shown(self) -> str:
        """The value in a line; nothing of a secret."""
        text = "null" if self.value is None else str(self.value)
        last = self.name.rpartition(".")[2]
        if self.value not in (None, "") and (last == HIDDEN or names_secret(last) or SECRET_VALUE.search(text)):
            return "***"
        return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
