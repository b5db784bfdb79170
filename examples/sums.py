"""Conversations about sums for chat_lora.yaml: each sum of two digits is asked in four ways.

One way of each is held out, drawn once: none of the 100 held-out questions is among the 300 that are trained on.
"""

from __future__ import annotations

import random
from itertools import product

QUESTIONS = ("What is {a}+{b}?", "How much is {a}+{b}?", "Please add {a}+{b}.", "Tell me {a}+{b}.")
Conversation = dict[str, list[dict[str, str]]]


def conversation(question: str, a: int, b: int) -> Conversation:
    """Return the question for one sum, and the answer."""
    asked = {"role": "user", "content": question.format(a=a, b=b)}
    return {"messages": [asked, {"role": "assistant", "content": str(a + b)}]}


def split() -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations that are trained on and those that are held out."""
    draw, trained, unseen = random.Random(0), [], []
    for a, b in product(range(10), range(10)):
        left_out = draw.choice(QUESTIONS)
        trained += [conversation(question, a, b) for question in QUESTIONS if question != left_out]
        unseen.append(conversation(left_out, a, b))
    return trained, unseen


def conversations() -> list[Conversation]:
    """Return those that are trained on."""
    return split()[0]


def held_out() -> list[Conversation]:
    """Return those whose questions the model has never seen."""
    return split()[1]
