"""Run the commands that a page shows and compare what they print: `python -m tools.page_commands docs/tutorial.md`.

A page shows a command and its output in a block of the language `console`:

    ```console
    $ shardwise train job.yaml --training.stepz 3
    error: unknown key training.stepz. Did you mean 'training.steps'?
    ```

Blocks run in order in one directory that holds links to the checkout's folders. A `yaml` block whose first line is
`# NAME.yaml` is written there first, and so is a comment `<!-- file NAME` with the text up to `-->`. A line `…` of
the output stands for any number of lines, and `…` inside a line for any text. Where a command succeeds, figures and
the widths of tables are not compared; an error is compared to the letter. With `--write` the outputs that differ
are replaced on the page by those of this machine.

A block that trains, or that stands behind the comment `<!-- after a run -->`, takes workers and seconds to minutes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from shardwise.commands.cli import main as shardwise

ROOT = Path(__file__).parent.parent
AFTER_A_RUN = "<!-- after a run -->"
WORKING = ("train", "verify", "run")
ELLIPSIS = "…"
WIDTH = "100"  # columns of what is printed
BLOCK = re.compile(
    r"^<!-- file (?P<file>\S+)\n(?P<hidden>.*?)^-->"
    r"|^```yaml\n# (?P<yaml>[\w./-]+\.yaml)\n(?P<shown>.*?)^```"
    r"|^(?P<after><!-- after a run -->\n)?```console\n(?P<console>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class ShownCommand(NamedTuple):
    """A command and the output that a page shows for it."""

    words: list[str]
    text: str
    output: str
    after_a_run: bool

    @property
    def fails(self) -> bool:
        """Return whether the page shows an error."""
        return self.output.startswith("error:")

    @property
    def needs_workers(self) -> bool:
        """Return whether the command trains, or needs what an earlier one has trained."""
        trains = self.words[0] == "shardwise" and self.words[1] in WORKING
        return (trains and "--print-plan" not in self.words and not self.fails) or self.after_a_run


class PageFile(NamedTuple):
    """A file that a page's commands read."""

    name: str
    text: str


def read_page(text: str) -> Iterator[ShownCommand | PageFile]:
    """Yield the files and commands of a page in their order."""
    for match in BLOCK.finditer(text):
        if match["file"]:
            yield PageFile(match["file"], match["hidden"])
        elif match["yaml"]:
            yield PageFile(match["yaml"], match["shown"])
        else:
            yield from shown_commands(match["console"], bool(match["after"]))


def shown_commands(console: str, after_a_run: bool) -> Iterator[ShownCommand]:
    """Yield the commands of one block with their outputs."""
    for text, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE):
        yield ShownCommand(shlex.split(text), text, output, after_a_run)


@contextmanager
def captured(file: TextIO) -> Iterator[None]:
    """Lead everything that this process and its workers print to `file`, both streams in their order."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), "utf-8", write_through=True)
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stdout, sys.stderr = streams
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def printed_by(words: list[str]) -> str:
    """Return what a command prints in the working directory; shardwise runs in this process."""
    if words[0] != "shardwise":
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        with captured(file), suppress(SystemExit):  # argparse's way to end
            shardwise(words[1:])
        file.seek(0)
        return "".join(f"{line.rstrip()}\n" for line in file.read().splitlines())


def comparable(text: str, exact: bool) -> str:
    """Return the text without what differs from machine to machine: figures, and widths of tables."""
    if not exact:
        text = re.sub(r"\b[0-9a-f]{16}\b", "#", text)
        text = re.sub(r"\d[\d,.]*(?:e[+-]?\d+)?", "#", text)
        text = re.sub(r"(─|━|═)+", r"\1", text)
        text = re.sub(r" +", " ", text)
    return "\n".join(line.strip() for line in text.strip().splitlines())


def agrees(shown: ShownCommand, printed: str) -> bool:
    """Return whether the output on the page is what was printed."""
    lines = comparable(printed, shown.fails).splitlines()
    return lines_agree(comparable(shown.output, shown.fails).splitlines(), lines)


def lines_agree(expected: list[str], lines: list[str]) -> bool:
    """Return whether lines are the expected ones, of which `…` stands for any number."""
    first, *middle = split_at_ellipses(expected)
    if not middle:
        return len(first) == len(lines) and run_agrees(first, lines)
    last = middle.pop()
    if len(lines) < len(first) + len(last) or not run_agrees(first, lines[: len(first)]):
        return False
    if not run_agrees(last, lines[len(lines) - len(last) :]):
        return False
    rest = lines[len(first) : len(lines) - len(last)]
    for part in middle:
        places = [at for at in range(len(rest) - len(part) + 1) if run_agrees(part, rest[at : at + len(part)])]
        if not places:
            return False
        rest = rest[places[0] + len(part) :]
    return True


def split_at_ellipses(lines: list[str]) -> list[list[str]]:
    """Return the runs of lines between lines that are `…` alone."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line == ELLIPSIS:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def run_agrees(expected: list[str], lines: list[str]) -> bool:
    """Return whether as many lines agree one by one, `…` inside of a line standing for any text."""
    patterns = (re.escape(line).replace(ELLIPSIS, ".*") for line in expected)
    return all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True))


def link_checkout(directory: Path) -> None:
    """Link the folders of the checkout that commands on pages name into their working directory."""
    for name in ("docs", "examples", "src"):
        (directory / name).symlink_to(ROOT / name)


def differences(page: Path, with_workers: bool) -> Iterator[tuple[ShownCommand, str]]:
    """Run a page in the working directory, and yield each command that printed something else, with what it printed."""
    for part in read_page(page.read_text(encoding="utf-8")):
        if isinstance(part, PageFile):
            Path(part.name).parent.mkdir(parents=True, exist_ok=True)
            Path(part.name).write_text(part.text, encoding="utf-8")
        elif with_workers or not part.needs_workers:
            printed = printed_by(part.words)
            if not agrees(part, printed):
                yield part, printed


def main() -> int:
    """Run pages, print what differs, and write it into them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the outputs that differ")
    parser.add_argument("--quick", action="store_true", help="leave out what takes workers")
    arguments = parser.parse_args()
    os.environ["COLUMNS"] = WIDTH
    different = 0
    for page in [path.resolve() for path in arguments.pages]:
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            link_checkout(Path(directory))
            for shown, printed in list(differences(page, not arguments.quick)):
                different += 1
                print(f"{page}: $ {shown.text}\n{printed}")
                if arguments.write:
                    before = f"$ {shown.text}\n{shown.output}"
                    page.write_text(page.read_text("utf-8").replace(before, f"$ {shown.text}\n{printed}"), "utf-8")
            os.chdir(ROOT)
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
