"""The sweep over transformers' types: its cells, its record, its table, and a sample of it."""

from __future__ import annotations

import os
import random
import re
from datetime import date
from pathlib import Path

import pytest
import transformers

from benchmarks import coverage
from benchmarks.coverage import AGREES, FAULTS, HANG, NO_TOY, RAW, REFUSED, CoverageCell
from benchmarks.coverage_page import SHOWN, page
from shardwise.testing.world import RankOutcome, WorldError, WorldPool
from shardwise.training.setup import study

SEED, DRAWN = 20261126, 3
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coverage.md"


def a_cell(layout: str, outcome: str, reason: str = "", version: str = transformers.__version__) -> CoverageCell:
    return CoverageCell("causal_lm", "llama", layout, outcome, reason, version)


def test_a_table_counts_outcomes_and_names_faults() -> None:
    text = coverage.table(
        [a_cell("tensor 2", AGREES), a_cell("tensor 2", REFUSED, "no plan"), a_cell("context 2", HANG)]
    )
    assert "| tensor 2 | 1 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "- causal_lm llama, context 2: hang" in text and "no plan" not in text


def test_a_record_is_gone_on_with_for_one_version_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([a_cell("sharded 2", RAW), a_cell("sharded 2", AGREES)])
    monkeypatch.setattr(coverage, "cells_of", lambda *_: [next(made)])
    record = tmp_path / "record.jsonl"
    for again, outcome in (((), RAW), ((), RAW), ((RAW,), AGREES)):
        cells = coverage.sweep([("causal_lm", "llama")], ["sharded 2"], record, 1, again)
        assert cells == [a_cell("sharded 2", outcome)]
    assert len(record.read_text().splitlines()) == 2
    assert coverage.lacking(record, [("causal_lm", "llama")], ["sharded 2", "tensor 2"], ()) == {
        ("causal_lm", "llama"): ["tensor 2"]
    }
    monkeypatch.setattr("benchmarks.coverage.transformers.__version__", "0")
    assert coverage.read_record(record) == []


def test_samples_are_drawn_by_a_seed() -> None:
    assert coverage.drawn_types(5, SEED) == coverage.drawn_types(5, SEED) != coverage.drawn_types(5, SEED + 1)
    assert len(coverage.drawn_types(None, 0)) > 200


@pytest.mark.parametrize("what, outcome", [("raised KeyError", RAW), ("hangs", HANG)])
def test_worlds_that_fail_are_faults(what: str, outcome: str) -> None:
    error = WorldError("verify_toy", 2, {1: RankOutcome(what, "Traceback\nKeyError: 'x'\n", 1.0)})
    assert coverage.fault_of(error) == (outcome, f"{what}: KeyError: 'x'")


def test_cells_of_a_type(world_pool: WorldPool, tmp_path: Path) -> None:
    coverage.write_corpora(tmp_path)
    cells = list(coverage.cells_of(world_pool, tmp_path, "causal_lm", "llama", ["sharded 2", "expert 2"]))
    assert [cell.outcome for cell in cells] == [AGREES, REFUSED], cells
    assert "expert" in cells[1].reason
    (unable,) = coverage.cells_of(world_pool, tmp_path, "causal_lm", "gemma4_assistant", ["sharded 2"])
    assert unable.outcome == NO_TOY and unable.reason
    (other,) = coverage.cells_of(world_pool, tmp_path, "ctc", "wav2vec2", ["sharded 2"])
    assert other.outcome == REFUSED and "model.factory" in other.reason


@pytest.mark.parametrize("number", range(DRAWN))
def test_types_that_today_draws(world_pool: WorldPool, tmp_path: Path, number: int) -> None:
    """Each day draws others; with SHARDWISE_TEST_SEED, which a failure prints, a day's come again."""
    seed = int(os.environ.get("SHARDWISE_TEST_SEED") or date.today().toordinal())
    case = coverage.drawn_types(DRAWN, seed)[number]
    layout = random.Random(seed + number).choice([name for name in coverage.LAYOUTS if name != coverage.CONTROL])
    print(f"SHARDWISE_TEST_SEED={seed}: {case}, {layout}")
    coverage.write_corpora(tmp_path)
    cells = list(coverage.cells_of(world_pool, tmp_path, *case, [layout]))
    assert cells and not [cell for cell in cells if cell.outcome in FAULTS]


SEEN_OR_HEARD = {
    "image_classification": ("vit", "convnext"),
    "speech_seq2seq": ("whisper",),
    "image_text_to_text": ("llava", "qwen2_vl", "gemma3", "kimi_k25", "florence2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("task, model_type", [(task, name) for task, names in SEEN_OR_HEARD.items() for name in names])
def test_toys_that_see_or_hear(world_pool: WorldPool, tmp_path: Path, task: str, model_type: str) -> None:
    (cell,) = coverage.cells_of(world_pool, tmp_path, task, model_type, ["sharded 2"])
    assert cell.outcome == AGREES, cell


@pytest.mark.parametrize("model_type", ["gpt2", "albert"])  # a chain of blocks, and one whose stages are traced
def test_stages_are_cut_from_what_is_known_of_the_whole(tmp_path: Path, model_type: str) -> None:
    coverage.write_corpora(tmp_path)
    task = "causal_lm" if model_type == "gpt2" else "masked_lm"
    whole, staged = (
        coverage.toy_job(tmp_path, task, model_type, layout) for layout in (coverage.CONTROL, "pipeline 2")
    )
    assert study(staged, study(whole)) == study(staged)


def test_a_page_says_what_ran_and_nothing_else() -> None:
    cells = [a_cell("sharded 2", AGREES), a_cell("expert 2", REFUSED, "expert_parallel_degree=2: no experts")]
    older = [a_cell("tensor 2", outcome, version="1.0") for outcome in (RAW, AGREES)]
    lines, _, other = page({transformers.__version__: cells, "1.0": older[:1]}).partition(
        "## transformers 1.0: 1 types"
    )
    assert other.count("| tensor 2 | 0 | 0 | 0 | 1 | 0 | 0 | 0 |") == 2
    assert "| causal_lm | `llama` | tensor 2 | raw error |" in other
    assert "raw error |\n| causal_lm" not in page({"1.0": older[1:]})
    of_task = lines.partition("### causal_lm")[2].partition("### ")[0]
    (row,) = [line for line in of_task.splitlines() if line.startswith("| `llama` |")]
    assert row == "| `llama` |  | yes |  |  |  | no |  |"
    assert "| expert 2 | no experts | `llama` |" in lines
    (counts,) = [line for line in lines.partition("popular ones")[2].splitlines() if line.startswith("| sharded 2 |")]
    assert re.fullmatch(r"\| sharded 2 \| 1 \| 0 \| 0 \| 0 \| 0 \| 0 \| \d+ \|", counts)


NO_PAGE = pytest.mark.skipif(not PAGE.exists(), reason="no whole run has written the page yet")


@NO_PAGE
def test_no_popular_type_is_at_fault() -> None:
    popular = PAGE.read_text(encoding="utf-8").partition("popular ones")[2].partition("\n## ")[0]
    tables = re.findall(
        r"^\| (?:one process|\w+ 2.*?) \| \d+ \| \d+ \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", popular, re.M
    )
    assert len(tables) == len(coverage.LAYOUTS)
    assert {count for row in tables for count in row} == {"0"}


@NO_PAGE
def test_the_readme_says_what_the_page_counts() -> None:
    text = PAGE.read_text(encoding="utf-8")
    popular = text.partition("popular ones")[2].partition("\n## ")[0]
    counts = dict(re.findall(r"^\| (\w+ 2|one process) \| (\d+) \|", popular, re.M))
    said = re.search(
        r"Of (\d+) popular types of transformers (\d+) run sharded, (\d+) on stages, (\d+) on tensor, (\d+) on context "
        r"and (\d+) on expert ranks, .* of (\d+) rarer ones (none|\d+) fails?",
        (PAGE.parents[2] / "README.md").read_text(encoding="utf-8"),
    )
    assert said is not None
    layouts = ("one process", "sharded 2", "pipeline 2", "tensor 2", "context 2", "expert 2")
    assert said.groups()[:-2] == tuple(counts[layout] for layout in layouts)
    everything = re.search(r"^## All (\d+)$", text, re.M)
    assert everything is not None
    assert int(said.group(7)) == int(everything.group(1)) - int(said.group(1))
    failing = re.findall(r"^\| `[\w.-]+` \|.*\*\*", text, re.M)
    assert said.group(8) == (str(len(failing)) if failing else "none")


@NO_PAGE
@pytest.mark.slow
def test_cells_of_the_page_are_what_a_run_gives(world_pool: WorldPool, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the page is of another version of transformers")
    coverage.write_corpora(tmp_path)
    rows = re.findall(r"^\| `([\w.-]+)` \|((?: (?:yes|no|) \|){7})$", text.partition("### causal_lm")[2], re.M)
    for model_type, row in random.Random(SEED).sample(
        rows[: len(coverage.drawn_types(None, 0, ["causal_lm"])) // 2], 4
    ):
        said = dict(zip(coverage.LAYOUTS, (word.strip() for word in row.split("|")), strict=False))
        names = [layout for layout, word in said.items() if word]
        cells = coverage.cells_of(world_pool, tmp_path, "causal_lm", model_type, names)
        assert {cell.layout: SHOWN.get(cell.outcome) for cell in cells} == {name: said[name] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "fuyu",  # rows of another length than data.sequence_length
        "inkling2",  # microbatches with images of two sizes: what crosses its cuts is of two sizes
    ],
)
def test_rows_of_a_data_set_have_a_length_of_their_own_on_stages(
    world_pool: WorldPool, tmp_path: Path, model_type: str
) -> None:
    """Both hung: a stage waited for what the stage before did not send."""
    coverage.write_corpora(tmp_path)
    [cell] = coverage.cells_of(world_pool, tmp_path, "image_text_to_text", model_type, ["pipeline 2"])
    assert (cell.outcome, cell.reason) == ("agrees", "")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline 2", "tensor 2"])
def test_batch_norms_inside_of_blocks_that_are_a_chain(world_pool: WorldPool, tmp_path: Path, layout: str) -> None:
    """CvT's statistics are those of one stage alone; and torch gave its batch norms a wrong gradient."""
    coverage.write_corpora(tmp_path)
    [cell] = coverage.cells_of(world_pool, tmp_path, "image_classification", "cvt", [layout])
    assert (cell.outcome, cell.reason) == ("agrees", "")


@pytest.mark.parametrize(
    "task, model_type, says",
    [
        ("speech_seq2seq", "voxtral", "no encoder-decoder"),
        ("seq2seq_lm", "qwen2_audio", "no encoder-decoder"),
        ("speech_seq2seq", "dia", "begins in a way of its own"),
    ],
)
def test_types_that_transformers_lists_for_a_task_they_are_not_of(task: str, model_type: str, says: str) -> None:
    refusal = coverage.refusal_of_head(task, model_type)
    assert refusal is not None and says in refusal.reason and "model.factory" in refusal.reason
    assert coverage.refusal_of_head(task, "whisper" if task == "speech_seq2seq" else "bart") is None


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_a_forward_that_casts_to_the_dtype_of_a_config_runs_in_that_of_the_job(
    world_pool: WorldPool, tmp_path: Path, compute: str
) -> None:
    """Nemotron-H Omni casts images to fp32, the dtype in which its tower was built."""
    if "nemotron_h_omni" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no Nemotron-H Omni")
    job = coverage.toy_job(tmp_path, "image_text_to_text", "nemotron_h_omni", "sharded 2", compute)
    outcome = coverage.outcome_of(world_pool, coverage.judge_toy(job, "sharded 2", {}), 2)
    assert outcome == ("agrees", "")
