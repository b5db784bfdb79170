"""Outcomes: what became of the keys of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Effect = Literal["acts", "no effect", "refused"]
HIDDEN = ("access_token", "api_key", "password", "secret", "use_wandb")  # ends of names whose values are shown nowhere
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
        if self.name.endswith(HIDDEN) and self.value not in (None, ""):
            return "***"
        text = "null" if self.value is None else str(self.value)
        return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
