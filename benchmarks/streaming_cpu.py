"""Tokens/s of a streamed run beside one whose tokens were made before: one model, one process, rounds in turn.

    python -m benchmarks.streaming_cpu --rounds 9 --steps 40 --json result.json

Both read the same JSON lines, the standard library's sources, with one tokenizer. What the stream makes ahead while the
other one trains is worth less than a twentieth of a turn: its cache holds that much. So tokenizing takes its processor
time from the turns that are measured. `--rounds 1 --steps 2` tries it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import header, write_json
from shardwise.data.corpus import stdlib_files
from shardwise.data.prepare import prepare
from shardwise.job.schema import Job
from shardwise.training.session import Session

SHARDS, CHARACTERS = 16, 24_000_000
LENGTH, SEQUENCES = 256, 8
AHEAD = 20  # a turn's tokens over those that the cache may hold
MODEL = {"model_type": "gpt2", "vocab_size": 4096, "n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": LENGTH}


def write_shards(directory: Path) -> None:
    """Write the standard library's sources as JSON lines, a file a row."""
    directory.mkdir()
    files = [(directory / f"part-{number:02}.jsonl").open("w") for number in range(SHARDS)]
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        left = CHARACTERS
        for number, path in enumerate(stdlib_files()):
            text = path.read_text(errors="ignore")
            files[number % SHARDS].write(json.dumps({"text": text}) + "\n")
            left -= len(text)
            if left < 0:
                break


def job_of(directory: Path, tokenizer: str | None, stream: dict[str, Any]) -> Job:
    """Return the job of one side."""
    data = {"path": str(directory / "shards"), "cache_directory": str(directory / "cache"), "tokenizer": tokenizer}
    return Job(
        output=str(directory / ("streamed" if stream else "tokenized")),
        model={"config": MODEL},
        data=data | {"sequence_length": LENGTH} | stream,
        training={"steps": 1_000_000, "sequences_per_step": SEQUENCES, "microbatch_size": SEQUENCES},
    )  # type: ignore[arg-type]


@contextmanager
def sides(directory: Path, steps: int) -> Iterator[dict[str, tuple[Session, Iterator[Any]]]]:
    """Yield a session of each side and its batches, in one process group."""
    tokenizer = prepare(job_of(directory, None, {}), MODEL["vocab_size"]).tokenizer_directory
    limit = max(4 * LENGTH * SEQUENCES * steps // AHEAD, 1)
    stream = {"streaming": True, "shuffle_buffer_size": 8, "cache_limit": limit, "num_workers": 1}
    with Session(job_of(directory, tokenizer, {})) as tokenized:
        device = tokenized.device
        with Session(job_of(directory, tokenizer, stream), device=device) as streamed:
            yield {name: (one, one.batches()) for name, one in (("tokenized", tokenized), ("streamed", streamed))}


def turn(session: Session, batches: Iterator[Any], steps: int) -> float:
    """Return tokens/s of some steps."""
    began = time.perf_counter()
    for _ in range(steps):
        session.step(next(batches))
    return steps * SEQUENCES * LENGTH / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rates: dict[str, list[float]] = {"tokenized": [], "streamed": []}
    with tempfile.TemporaryDirectory(prefix="shardwise-streaming-") as folder:
        write_shards(Path(folder) / "shards")
        with sides(Path(folder), options.steps) as both:
            for side in both.values():
                turn(*side, max(options.steps // AHEAD, 1))
            for number in range(options.rounds):
                for name in sorted(both, reverse=bool(number % 2)):
                    rates[name].append(turn(*both[name], options.steps))
            [tokens] = both["streamed"][0].assembled.data.streams.values()
            waited = tokens.waited
    ratios = [own / other for own, other in zip(rates["streamed"], rates["tokenized"], strict=True)]
    for name, values in rates.items():
        print(f"{name:10} {statistics.median(values):10,.0f} tokens/s, {min(values):,.0f} to {max(values):,.0f}")
    print(
        f"streamed / tokenized, median of {len(ratios)} rounds: {statistics.median(ratios):.3f}; waited {waited:.1f} s"
    )
    if options.json:
        result = {"rates": rates, "ratio": statistics.median(ratios), "waited": waited}
        write_json(options.json, header(["torch", "tokenizers"]) | result)


if __name__ == "__main__":
    main()
