"""Write conversations about sums, one a line, for chat.yaml: `python examples/chat_rows.py runs/chats.jsonl`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROWS = 600
QUESTIONS = ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "Please tell me {a} plus {b}.")


def conversation(draw: random.Random) -> dict[str, object]:
    """Return one to three questions, each with its answer; some begin with a system message."""
    messages = [{"role": "system", "content": "You add numbers."}] * draw.randrange(2)
    for _ in range(draw.randint(1, 3)):
        a, b = draw.randrange(10), draw.randrange(10)
        messages.append({"role": "user", "content": draw.choice(QUESTIONS).format(a=a, b=b)})
        messages.append({"role": "assistant", "content": f"{a} + {b} = {a + b}"})
    return {"messages": messages}


if __name__ == "__main__":
    path, draw = Path(sys.argv[1]), random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(conversation(draw)) + "\n" for _ in range(ROWS)))
