"""Write preferences about sums for dpo.yaml, one a line: `python examples/preference_rows.py runs/pairs.jsonl`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROWS = 400
QUESTIONS = ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "Please tell me {a} plus {b}.")


def preference(draw: random.Random) -> dict[str, object]:
    """Return a question with a right answer, which is preferred, and one that is off by a little."""
    a, b, off = draw.randrange(10), draw.randrange(10), draw.choice((-2, -1, 1, 2))
    answers = [{"role": "assistant", "content": f"{a} + {b} = {total}"} for total in (a + b, (a + b + off) % 20)]
    question = {"role": "user", "content": draw.choice(QUESTIONS).format(a=a, b=b)}
    return {"prompt": [question], "chosen": answers[:1], "rejected": answers[1:]}


if __name__ == "__main__":
    path, draw = Path(sys.argv[1]), random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(preference(draw)) + "\n" for _ in range(ROWS)))
