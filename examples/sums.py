"""Conversations about sums for chat_lora.yaml: 300 to train on, and 100 with questions that none of them asks."""

from __future__ import annotations

import random
from itertools import product

HELD_OUT = 100
QUESTIONS = ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "Please tell me {a} plus {b}.")


def every_conversation() -> list[dict[str, list[dict[str, str]]]]:
    """Return a conversation for each way to ask for each sum of two digits, in an order drawn once."""
    draw, rows = random.Random(0), []
    for question, a, b in product(QUESTIONS, range(10), range(10)):
        messages = [{"role": "system", "content": "You add numbers."}] * draw.randrange(2)
        messages.append({"role": "user", "content": question.format(a=a, b=b)})
        messages.append({"role": "assistant", "content": str(a + b)})
        rows.append({"messages": messages})
    draw.shuffle(rows)
    return rows


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Return those that are trained on."""
    return every_conversation()[HELD_OUT:]


def held_out() -> list[dict[str, list[dict[str, str]]]]:
    """Return those whose questions the model has never seen."""
    return every_conversation()[:HELD_OUT]
