"""`shardwise verify`: its own workers, its two references, what it refuses, and the oracle's independence."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

import shardwise
from shardwise._torch_compat.tracing import FakeTensorMode
from shardwise.commands.verify import _layouts, cut_depth, run_verify
from shardwise.errors import ConfigError, MachineError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.model.build import load_config
from shardwise.testing.comparison import Difference, Tolerance, VerifyReport, compare_tensors, relative_error
from shardwise.testing.fused_dropout import fused_dropout_off
from shardwise.training.setup import study
from tests.fork_server import call
from tests.parity.jobs import make_job, make_module_job, write_tokens

# --- numbers


def test_errors() -> None:
    one, other = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -2.0])
    assert relative_error(one, other) == 1.0 and relative_error(one, other, least=8.0) == 0.25
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0


def test_nothing_unusual_counts_as_agreement() -> None:
    tolerance = Tolerance(1e-9)
    whole = {"a": torch.ones(2), "b": torch.ones(3)}
    for ours in ({"a": torch.ones(2)}, {**whole, "c": torch.ones(1)}, {**whole, "b": torch.ones(1, 3)}):
        assert not all(d.agrees for d in compare_tensors(0, "gradient", ours, whole, tolerance))
    nan = compare_tensors(0, "gradient", {**whole, "b": torch.full((3,), math.nan)}, whole, tolerance)
    report = VerifyReport("", nan)
    assert not report.agrees and report.max_relative_error == math.inf and report.first == nan[1]
    assert not VerifyReport("").agrees  # nothing was compared


def test_a_tensor_of_rounding_is_held_to_the_largest_one() -> None:
    reference = {"big": torch.ones(2, dtype=torch.float64), "noise": torch.tensor([1e-17], dtype=torch.float64)}
    ours = {"big": reference["big"], "noise": -reference["noise"]}
    assert all(d.agrees for d in compare_tensors(0, "gradient", ours, reference, Tolerance(1e-9)))
    ours["noise"] = torch.tensor([1e-11], dtype=torch.float64)
    assert not all(d.agrees for d in compare_tensors(0, "gradient", ours, reference, Tolerance(1e-9)))


def test_first_is_by_step_and_then_in_the_order_of_comparison() -> None:
    good, bad = Difference(0, "loss", "", 0.0, 1.0), Difference(1, "gradient", "w", 2.0, 1.0)
    assert VerifyReport("", [good, bad, Difference(1, "norm", "", 9.0, 1.0)]).first == bad


# --- whole runs with workers of their own


def test_agrees_and_prints(corpora: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(corpora, layers=1, attention="sdpa", dropout=0.1, parallel={"workers": 2})
    assert call(run_verify, job, steps=2) == 0
    printed = capfd.readouterr().out
    assert "max_relative_error" in printed and "switched off" in printed and "shard 2" in printed


def test_a_job_whose_steps_all_overflow_is_not_said_to_agree(corpora: Path) -> None:
    """In fp64, which goes ahead, it does agree; in fp16 no step is left to compare."""
    precision = {"compute": "fp16", "loss_scale": {"init_scale": 2.0**60}}
    with pytest.raises(ConfigError, match=r"init_scale=1.15292e\+18: all 2 steps of the job overflowed, and none was"):
        call(shardwise.verify, make_job(corpora, layers=1, precision=precision, training={"steps": 2}))


def test_an_optimizer_class_of_ones_own_is_verified(corpora: Path) -> None:
    optimizer = {"name": "tests.training.user_code:SignDescent", "learning_rate": 0.01, "weight_decay": 0}
    job = make_job(corpora, layers=1, optimizer=optimizer, parallel={"workers": 2})
    report = call(shardwise.verify, job, steps=2)
    assert report.agrees and report.max_relative_error < 1e-9
    assert {difference.step for difference in report.differences if difference.quantity == "update"} == {0, 1}


@pytest.mark.slow  # two more worlds of processes; the next test starts two as well
def test_another_layout_as_reference(corpora: Path) -> None:
    """Other number of workers, other batch arithmetic; both update with SGD, and it is said."""
    job = make_job(corpora, layers=1, precision={"compute": "fp32"}, parallel={"workers": 2})
    layout: dict[str, Any] = {"parallel": {"workers": 3}, "memory": {"activation_checkpointing": "full"}}
    against = make_job(corpora, layers=1, precision={"compute": "fp32"}, **layout)
    report = shardwise.verify(job, against=against, steps=2)
    assert report is not None and report.agrees and 0 < report.max_relative_error < 1e-5
    assert any("SGD" in note for note in report.notes)
    assert [d.error for d in report.differences if d.quantity == "data"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model.attention": "eager"}, "model.attention differ from the job's; two layouts of one job"),
        ({"optimizer.learning_rate": 5.0}, "optimizer.learning_rate differ"),
        ({"training.sequences_per_step": 3, "training.tokens_per_step": None}, "training.sequences_per_step"),
        ({"training.sequences_per_step": 16, "training.tokens_per_step": None, "output": "elsewhere"}, ""),
    ],
)
def test_a_second_layout_says_no_more_than_a_layout(keys: dict[str, Any], said: str) -> None:
    job = Job.model_validate({"training": {"tokens_per_step": 16 * 32}, "data": {"sequence_length": 32}})
    against = load_job(job, {"parallel.workers": 1, **keys})
    if said:
        with pytest.raises(ConfigError, match=said):
            _layouts(job, against)
    else:
        _, other, _ = _layouts(job, against)
        assert other.parallel.workers == 1


def test_a_second_layout_has_its_own_microbatches() -> None:
    job = Job.model_validate({"training": {"sequences_per_step": 8, "microbatch_size": 4}})
    for size, taken in ((4, None), (2, 2)):
        assert _layouts(job, load_job(job, {"training.microbatch_size": size}))[1].training.microbatch_size == taken


def verify_changed(job: Job, against: Job, corpus: Path) -> VerifyReport | None:
    """Compare two runs between which the lines of the corpus are turned around."""
    module = sys.modules["shardwise.commands.verify"]
    in_workers = module.in_workers

    def with_a_change_in_between(job: Job, function: Callable[..., Any], *args: Any) -> Any:
        found = in_workers(job, function, *args)
        lines = corpus.read_text().splitlines()
        corpus.write_text("\n".join(reversed(lines)))
        return found

    with mock.patch.object(module, "in_workers", with_a_change_in_between):
        return shardwise.verify(job, against=against, steps=2)


def test_another_layout_that_read_other_data(tmp_path: Path) -> None:
    """The table says so before it speaks of losses."""
    corpus = write_tokens(tmp_path)
    jobs = [make_job(tmp_path, layers=1, parallel={"workers": workers}) for workers in (2, 1)]
    report = call(verify_changed, *jobs, Path(corpus))
    assert report is not None and report.first is not None and not report.agrees
    assert (report.first.step, report.first.quantity) == (0, "data") and "read other samples" in report.diagnosis


def test_disagreement_ends_with_exit_code_one(
    corpora: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = VerifyReport(
        "t", [Difference(2, "parameter", "wte.weight", 0.5, 1e-9)], diagnosis="gradients are clipped twice"
    )
    monkeypatch.setattr(sys.modules["shardwise.commands.verify"], "verify", lambda *_: bad)
    assert run_verify(make_job(corpora)) == 1
    printed = capsys.readouterr().out
    assert "step 2, parameter wte.weight" in printed and "clipped twice" in printed and "DISAGREES" in printed


def test_one_process_too_small_names_both_ways_out(
    corpora: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shardwise.commands.verify import _check_memory

    job = make_job(corpora)
    plan = SimpleNamespace(dtypes=SimpleNamespace(parameters="fp64"), reference=None)
    run = SimpleNamespace(facts=study(job), plan=plan)
    _check_memory(run)  # type: ignore[arg-type]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    with pytest.raises(MachineError, match=r"--blocks N .* --against PLAN.yaml"):
        _check_memory(run)  # type: ignore[arg-type]


# --- cutting depth


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "bert"])
def test_blocks_keeps_widths_and_cuts_depth(corpora: Path, family: str) -> None:
    job = make_job(corpora, family)
    facts = study(cut_depth(job, 1))
    whole = study(job)
    assert (len(facts.blocks), facts.hidden_size) == (1, whole.hidden_size)
    assert facts.blocks[0] == whole.blocks[0] and facts.parameters < whole.parameters


def test_blocks_cuts_lists_of_layers_and_keeps_the_models_tokenizer(corpora: Path, tmp_path: Path) -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=97, max_position_embeddings=16, layer_types=["full_attention"] * 3,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    job = cut_depth(make_job(corpora, model={"config": None, "path": str(tmp_path)}), 2)
    assert job.model.path is None and job.data.tokenizer == str(tmp_path)
    cut = load_config(job)
    assert cut.num_hidden_layers == 2 and len(cut.layer_types) == 2 and cut.hidden_size == 8


def test_blocks_refuses_what_it_cannot_cut(corpora: Path) -> None:
    with pytest.raises(ConfigError, match="at most 3"):
        cut_depth(make_job(corpora), 4)
    with pytest.raises(ConfigError, match="factory_arguments"):
        cut_depth(make_module_job(corpora), 1)


def test_fused_dropout_is_off_inside_and_back_outside() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 5, 4)
    with fused_dropout_off(exact=True) as rates:
        assert torch.equal(
            torch.nn.functional.scaled_dot_product_attention(q, q, q, None, 0.9), attend(q, q, q, None, 0.0)
        )
    assert torch.nn.functional.scaled_dot_product_attention is attend
    assert set(rates.ours) == {0.9} and abs(rates.ours[0.9] - 0.9) < 0.02


def test_no_rate_is_measured_where_a_forward_computes_nothing() -> None:
    """Shapes of boundaries are read off such a forward; one rank failed there, and UMT5's stages hung."""
    with fused_dropout_off(exact=True) as rates, FakeTensorMode():
        q = torch.randn(1, 2, 5, 4)
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q, None, 0.9).shape == q.shape
    assert not rates.ours
