"""What pages show is what their commands print: each page's commands run in order in one empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.page_commands import WIDTH, PageFile, ShownCommand, agrees, differences, link_checkout, read_page

ROOT = Path(__file__).parent.parent
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    if "```console" in page.read_text()
}


@pytest.fixture
def page_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a cache of its own, beside links to the checkout's folders."""
    directory = tmp_path / "page"
    directory.mkdir()
    link_checkout(directory)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("COLUMNS", WIDTH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    return directory


def commands(page: Path) -> list[ShownCommand]:
    return [part for part in read_page(page.read_text()) if isinstance(part, ShownCommand)]


def check(page: Path, with_workers: bool) -> None:
    different = [f"$ {shown.text}\n{printed}" for shown, printed in differences(page, with_workers)]
    assert not different, f"python -m tools.page_commands --write {page}\n" + "\n".join(different)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("page", PAGES)
def test_what_needs_no_workers_prints_what_the_page_shows(page: str, page_directory: Path) -> None:
    assert commands(PAGES[page])
    check(PAGES[page], with_workers=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", [name for name, page in PAGES.items() if any(shown.needs_workers for shown in commands(page))]
)
def test_the_whole_page_prints_what_it_shows(page: str, page_directory: Path) -> None:
    check(PAGES[page], with_workers=True)


def test_shown_outputs_are_all_run() -> None:
    """A prompt outside of a `console` block would never be compared."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        outside = page.read_text()
        for part in commands(page):
            outside = outside.replace(f"$ {part.text}\n{part.output}", "")
        assert "\n$ " not in outside, page


def shown(text: str) -> ShownCommand:
    (part,) = read_page(f"```console\n{text}```\n")
    assert isinstance(part, ShownCommand)
    return part


def test_figures_are_masked_and_words_are_not() -> None:
    page = shown("$ shardwise train\nstep 1/40  loss 6.9472  lr 3.00e-03\n")
    assert page.needs_workers and not page.fails
    assert agrees(page, "step 1/40 loss 6.1 lr 3.10e-04\n")
    assert not agrees(page, "step 1/40 mean loss 6.1 lr 3.10e-04\n")
    assert not agrees(page, "step 1/40 loss 6.1 lr 3.10e-04\nstep 2/40 loss 6.1 lr 3.10e-04\n")


def test_errors_are_compared_to_the_letter() -> None:
    page = shown("$ shardwise train --a 3\nerror: a=3: use 1 or 2\n")
    assert not page.needs_workers
    assert agrees(page, "error: a=3: use 1 or 2\n") and not agrees(page, "error: a=3: use 1 or 4\n")


def test_an_ellipsis_stands_for_lines_and_for_text() -> None:
    page = shown("$ shardwise doctor\nfirst …\n…\nlast\n")
    assert agrees(page, "first word\nlast\n") and agrees(page, "first\none\ntwo\nlast\n".replace("first", "first x"))
    assert not agrees(page, "other\nlast\n") and not agrees(page, "first word\nlast\nmore\n")


def test_files_of_a_page_come_before_its_commands() -> None:
    files = "```yaml\n# job.yaml\noutput: x\n```\n<!-- file a/b.json\n{}\n-->\n"
    text = files + "<!-- after a run -->\n```console\n$ shardwise export x y\n```\n"
    first, second, third = read_page(text)
    assert first == PageFile("job.yaml", "output: x\n") and second == PageFile("a/b.json", "{}\n")
    assert isinstance(third, ShownCommand) and third.needs_workers
