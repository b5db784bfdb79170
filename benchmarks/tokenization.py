"""Tokenizing a corpus: shardwise beside the tokenizers library called bare, and `datasets.map`, on all cores.

    python -m benchmarks.tokenization --megabytes 24 --rounds 3 --json result.json

The corpus is Python's own sources and those of the installed packages, a file a document, as many as are asked for;
the tokenizer is a byte-level BPE trained on the same files. Contenders take turns. The bare library reads the files and
calls `encode_batch` once, which makes no ids and writes nothing. `datasets.map` reads the files, calls the tokenizer of
transformers in a process for each core and writes Arrow files. Shardwise writes its cache. Processes are started anew
in each round, and the tokenizer is there before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import header, write_json

VOCABULARY = 4096


def gather(directory: Path, size: int) -> list[Path]:
    """Copy sources until there are `size` bytes of them, and return their places."""
    roots = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")))
    copies: list[Path] = []
    left = size
    for file in (file for root in roots for file in sorted(root.rglob("*.py"))):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            copies.append(directory / f"{len(copies):06}.txt")
            copies[-1].write_text(text, encoding="utf-8")
            left -= len(text.encode())
        if left <= 0:
            break
    return copies


def train(files: list[Path], directory: Path) -> None:
    """Train the tokenizer that all contenders have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files[:400]], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(str(directory))


def bare(files: list[Path], tokenizer: Path, work: Path) -> None:
    """Read the files and call the library once, with its threads on all cores."""
    from tokenizers import Tokenizer

    opened = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    opened.encode_batch([file.read_text(encoding="utf-8") for file in files], add_special_tokens=False)


def mapped(files: list[Path], tokenizer: Path, work: Path) -> None:
    """`datasets.map` in a process for each core, as its documents show for tokenizing."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer

    disable_progress_bars()
    opened = AutoTokenizer.from_pretrained(str(tokenizer))
    data = Dataset.from_dict({"text": [file.read_text(encoding="utf-8") for file in files]})
    data.map(
        lambda rows: {"input_ids": opened(rows["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        batch_size=100,
        num_proc=len(os.sched_getaffinity(0)),
        remove_columns=["text"],
        cache_file_name=str(work / "mapped.arrow"),
    )


def shardwise(files: list[Path], tokenizer: Path, work: Path) -> None:
    """Fill an empty cache."""
    from shardwise.data.prepare import prepare
    from shardwise.job.schema import Job

    data = {"path": str(files[0].parent), "tokenizer": str(tokenizer), "cache_directory": str(work)}
    prepare(Job.model_validate({"data": data}))


CONTENDERS: dict[str, Callable[[list[Path], Path, Path], None]] = {
    "shardwise": shardwise,
    "tokenizers, encode_batch": bare,
    "datasets.map": mapped,
}


def in_child(function: Callable[..., None], *arguments: object) -> float:
    """Return the seconds of a function in a fork of its own: the threads of tokenizers do not outlive a fork."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        began = time.perf_counter()
        function(*arguments)
        os.write(writer, repr(time.perf_counter() - began).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        seconds = answer.read()
    os.waitpid(child, 0)
    return float(seconds)


def timed(name: str, files: list[Path], tokenizer: Path) -> float:
    """Return the seconds of a contender in a process that has imported what all need."""
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    import shardwise.data.prepare  # noqa: F401

    with tempfile.TemporaryDirectory(dir=tokenizer.parent) as work:
        return in_child(CONTENDERS[name], files, tokenizer, Path(work))


def main() -> None:
    """Measure, and print seconds and ratios of each round's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="shardwise-tokenization-") as directory:
        corpus, tokenizer = Path(directory, "corpus"), Path(directory, "tokenizer")
        corpus.mkdir()
        files = gather(corpus, options.megabytes * 10**6)
        in_child(train, files, tokenizer)
        for number in range(options.rounds):
            names = list(CONTENDERS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds[name].append(timed(name, files, tokenizer))
                print(f"round {number}: {name} {seconds[name][-1]:.2f} s", flush=True)
    ratios = {
        name: statistics.median(theirs / own for theirs, own in zip(times, seconds["shardwise"], strict=True))
        for name, times in seconds.items()
    }
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times):.2f} s, shardwise's speed ÷ its {ratios[name]:.2f}")
    if options.json is not None:
        content = {"megabytes": options.megabytes, "files": len(files), "seconds": seconds, "ratios": ratios}
        write_json(options.json, header(("tokenizers", "datasets", "transformers", "shardwise")) | content)


if __name__ == "__main__":
    main()
