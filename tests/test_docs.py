"""The documents against the code: the reference is what the generator writes, and what pages show exists."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import shardwise
from shardwise import errors
from shardwise.commands.cli import COMMANDS, as_command, build_parser
from shardwise.errors import ConfigError
from shardwise.job.keys import leaf_keys, leaf_of, sections
from shardwise.job.smp_options import OPTIONS
from shardwise.job.sources import load_job, read_value, take_overrides
from shardwise.plan.rules import rules
from tools.reference.pages import PAGES, pages, write
from tools.reference.tables import METRICS, SUBJECTS
from tools.structure import doc_words

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
WRITTEN = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if p.parent != REFERENCE)])
EVERY_PAGE = [*WRITTEN, *sorted(REFERENCE.glob("*.md"))]
# tests/tools/test_collectives_table.py and tests/benchmarks/test_coverage.py have them
MADE_BY_A_RUN = {"collectives.md", "coverage.md"}
ITEMS = 14  # of the subject matter that the reference has to cover
HOMES = (ROOT, ROOT / "src" / "shardwise", ROOT / "src" / "shardwise" / "planner")  # of paths on pages
MOST_WORDS, MOST_WITH_CODE, LINE_LENGTH, LONGEST_SENTENCE = 35_000, 40_000, 120, 25


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    text: str


def blocks(*languages: str) -> Iterator[Block]:
    for page in WRITTEN:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if language in languages:
                yield Block(page, language, text)


def commands() -> Iterator[tuple[Path, list[str], bool]]:
    """(page, words after `shardwise`, does the page show that it is refused) of every command that a page shows."""
    for page, language, text in blocks("bash", "console"):
        for line, after in pairwise([*text.splitlines(), ""]):
            typed = line if language == "bash" else line.removeprefix("$ ") if line.startswith("$ ") else ""
            if match := re.search(r"(?:^|\s)shardwise (.*)", typed):
                yield page, shlex.split(match[1], comments=True), after.startswith("error:")


def parses(words: list[str]) -> bool:
    try:
        rest, found = take_overrides(as_command(words))
        for key, text in found:
            load_job({}, {key: read_value(key, text)}, environ={})
        options, unknown = build_parser().parse_known_args(rest)
    except ConfigError:
        return False
    return options.command in COMMANDS and not unknown


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_what_the_code_says(tmp_path: Path) -> None:
    paths = write(tmp_path / "reference", ROOT)
    there = {path.name for path in REFERENCE.iterdir()} - MADE_BY_A_RUN
    assert {path.name for path in paths} == there == {*PAGES, "package.md"}
    for path in paths:
        how = "run `python -m tools.reference.pages docs/reference`"
        assert (REFERENCE / path.name).read_text() == path.read_text(), how


def test_every_item_has_its_place() -> None:
    assert [int(name.partition(".")[0]) for name, _ in SUBJECTS] == list(range(1, ITEMS + 1))
    found = pages(ROOT)
    for name, where in SUBJECTS:
        text = "".join(found.get(page, "") for page in re.findall(r"\(([\w-]+\.md)", where))
        missing = [term for term in re.findall(r"`([^`]+)`", name) if term not in text]
        assert not missing, f"{name}: {where} say nothing of {missing}"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("job.md", list(leaf_keys())),
        ("legality.md", [rule.id for rule in rules()]),
        ("smp-options.md", [option.name for option in OPTIONS]),
        ("errors.md", [name for name in vars(errors) if name.endswith("Error")]),
    ],
)
def test_every_row_is_there(page: str, names: list[str]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", pages(ROOT)[page], re.MULTILINE)
    assert [name for name in names if name not in rows] == []
    assert len(names) > 5


def test_every_command_and_public_name_is_there() -> None:
    found = pages(ROOT)
    assert re.findall(r"^## shardwise (.*)", found["command-line.md"], re.MULTILINE) == list(COMMANDS)
    named = re.findall(r"^## shardwise\.(.*)", found["python.md"], re.MULTILINE)
    assert ["__version__", *named] == shardwise.__all__


def test_every_environment_variable_is_there() -> None:
    """Names in capitals that the sources of the launch and data rooms look up."""
    page = pages(ROOT)["environment.md"]
    private = {"SHARDWISE_FAILURE_DIRECTORY", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TOKENIZERS_PARALLELISM"}  # set by us
    package = Path(shardwise.__file__).parent
    sources = [package / "cache.py", package / "words.py", *package.glob("launch/*.py"), *package.glob("data/*.py")]
    pattern = r'"((?:[A-Z]+_)+[A-Za-z_]+|RANK)"'
    names = {name for source in sources for name in re.findall(pattern, source.read_text())}
    assert len(names) > 5
    assert {name for name in names if name not in private and name not in page} == set()


# --- what people wrote -----------------------------------------------------------------------------------------------


def test_there_are_pages() -> None:
    names = {path.name for path in WRITTEN}
    assert {"README.md", "tutorial.md", "architecture.md", "glossary.md", "structure.md", "sharding.md"} <= names


def test_commands_parse() -> None:
    found = list(commands())
    assert len(found) > 15
    wrong = [(page.name, words) for page, words, refused in found if not refused and not parses(words)]
    assert wrong == []


@pytest.mark.parametrize("words", [["tarin"], ["train", "--training.stepz", "3"], ["train", "--outputs", "x"]])
def test_a_wrong_command_would_be_found(words: list[str]) -> None:
    assert not parses(words)


def test_jobs_are_jobs() -> None:
    found = list(blocks("yaml"))
    assert len(found) > 5
    for page, _, text in found:
        try:
            load_job(yaml.safe_load(text), environ={})
        except ConfigError as error:
            pytest.fail(f"{page}: {error}\n{text}")


def test_python_compiles() -> None:
    for page, _, text in blocks("python"):
        compile(text, str(page), "exec")


def test_keys_exist() -> None:
    """Every `section.key` in backticks is a key of the job."""
    first = "|".join({name.partition(".")[0] for name in sections()} - {""})
    for page in WRITTEN:
        for key in re.findall(rf"`((?:{first})\.[a-z_.]+[a-z])(?::[^`]*)?`", page.read_text()):
            if not key.endswith((".md", ".py", ".yaml", ".safetensors")) and key not in sections():
                leaf_of(key)


def test_records_of_metrics_have_keys_that_runs_write() -> None:
    records = [json.loads(text) for _, _, text in blocks("json") if '"step"' in text]
    assert len(records) >= 1
    assert {key for record in records for key in record} <= set(METRICS)


def test_links_resolve() -> None:
    broken = []
    for page in EVERY_PAGE:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if "://" in target:
                continue
            path = (page.parent / target) if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


# --- rules of pages ---------------------------------------------------------------------------------------------------


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) outside of fenced blocks and tables."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("|"):
            yield number, line


def sentences(page: Path) -> Iterator[str]:
    """The sentences of a page's paragraphs and list items, without links' targets."""
    text = "\n".join(line for _, line in prose(page) if not line.startswith(("#", "    ", "<!--", "!")))
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text):
        yield from re.split(r"(?<=[.:;?!])\s+", " ".join(paragraph.split()))


def test_pages_keep_to_their_length() -> None:
    short = "docs/ is read only while it is short: cut a page before adding one"
    assert doc_words(ROOT / "docs") <= MOST_WORDS, short
    assert doc_words(ROOT / "docs", with_code=True) <= MOST_WITH_CODE, short


def test_lines_are_short() -> None:
    long = [f"{page.relative_to(ROOT)}:{n}" for page in WRITTEN for n, line in prose(page) if len(line) > LINE_LENGTH]
    assert long == []


def test_sentences_are_short() -> None:
    long = [
        f"{page.relative_to(ROOT)}: {sentence}"
        for page in WRITTEN
        for sentence in sentences(page)
        if len(sentence.split()) > LONGEST_SENTENCE
    ]
    assert long == []


def first_cells(page: Path, heading: str) -> list[str]:
    """The first cell of each row of the table under a heading, head and rule left out."""
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)[1:]


def test_architecture_lists_every_room() -> None:
    cells = first_cells(ROOT / "docs" / "architecture.md", "Rooms")
    listed = sorted(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    package = Path(shardwise.__file__).parent
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert listed == sorted(folders | modules)


def test_architecture_lists_rooms_in_the_order_of_imports() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"][::-1]
    height = {room: index for index, layer in enumerate(layers) for room in re.findall(r"\w+", layer)}
    cells = first_cells(ROOT / "docs" / "architecture.md", "Rooms")
    heights = [height[re.findall(r"\w+", cell)[0]] for cell in cells]
    assert heights == sorted(heights)


def test_paths_on_pages_exist() -> None:
    """`room/file.py` is in the package or in the repository."""
    missing = []
    for page in WRITTEN:
        if page.name in ("CHANGELOG.md", "extend.md"):  # what was there, and files that a reader is to write
            continue
        for path in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|cpp|h))`", page.read_text()):
            if not path.startswith("gpt") and not any((root / path).exists() for root in HOMES):
                missing.append(f"{page.relative_to(ROOT)}: {path}")
    assert missing == []


def test_classes_of_the_glossary_exist() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]?\w*)`", (ROOT / "docs" / "glossary.md").read_text()))
    source = "\n".join(path.read_text() for path in Path(shardwise.__file__).parent.rglob("*.py"))
    defined = set(re.findall(r"^class (\w+)", source, re.MULTILINE))
    assert len(named) > 20
    assert sorted(named - defined) == []


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
