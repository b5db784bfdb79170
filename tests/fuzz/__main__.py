"""Try the drawn modules of some seeds: `python -m tests.fuzz FIRST [END]`; exit code 1 if one is wrong."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from shardwise.testing.world import WorldPool
from tests.fuzz.recipes import draw
from tests.fuzz.trials import try_all

CHUNK = 10


def main(first: int, end: int) -> int:
    """Print every outcome that is wrong, every refusal, and how many of each there were."""
    outcomes: Counter[str] = Counter()
    is_alone = end - first == 1
    with tempfile.TemporaryDirectory() as directory, WorldPool() as pool:
        for start in range(first, end, CHUNK):
            recipes = [draw(seed) for seed in range(start, min(start + CHUNK, end))]
            for outcome in try_all(pool, recipes, Path(directory)):
                outcomes["wrong" if outcome.fault else "refused" if outcome.refusal else "right"] += 1
                if outcome.fault or outcome.refusal or is_alone:
                    print(outcome if is_alone else outcome.summary, flush=True)
            print(dict(outcomes), flush=True)
    return int(bool(outcomes["wrong"]))


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    sys.exit(main(numbers[0], numbers[-1] if len(numbers) > 1 else numbers[0] + 1))
