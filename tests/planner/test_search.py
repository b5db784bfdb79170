"""The search: every layout it ranks is legal and leaves the job's own keys alone, none it looked at is better, and what
it says adds up."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from PIL import Image
from rich.console import Console

from shardwise.commands import plan as commands_plan
from shardwise.commands.cli import main
from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.launch import expected_world
from shardwise.model import parameter_optimizers
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.matrices import is_hidden_matrix
from shardwise.plan.draft import lookup
from shardwise.plan.plan import resolve
from shardwise.plan.sequence_lengths import LengthStage, SequenceLengths
from shardwise.plan.step_sizes import SizeStage, StepSizes
from shardwise.planner.constants.hardware import GIB
from shardwise.planner.constants.inventory import cluster, presets
from shardwise.planner.constants.presets import preset_config
from shardwise.planner.formulas.configure import configuration_of
from shardwise.planner.formulas.local import MachineConstants, constants_path, keep_constants
from shardwise.planner.formulas.memory import estimate, moments
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import Prediction
from shardwise.planner.search.explain import (
    Budget,
    candidate_data,
    may_not_fit,
    times_of,
    training_seconds,
    why_not_fit,
    why_slower,
)
from shardwise.planner.search.remedies import remedies
from shardwise.planner.search.search import (
    SHOWN,
    SearchQuestion,
    SearchResult,
    distinct,
    matching,
    of_changes,
    on_nodes,
    search,
    with_exact_memory,
    world_of,
)
from shardwise.planner.search.search_report import layout_explanation, ranking_table, search_remarks
from shardwise.planner.search.space import SearchSpace, changed_job, thinned
from shardwise.testing.toy_configs import toy_config

ON_DEVICE = ("--memory.offload_parameters", "false", "--memory.offload_optimizer", "0")
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 4096, "max_position_embeddings": 2048,
}  # fmt: skip


@cache
def facts_of(name: str) -> ModelFacts:
    job = Job.model_validate({"model": {"config": LLAMA if name == "small" else preset_config(presets()[name])}})
    return discover(build_model(job), job)


def question(where: str = "h100:8", model: str = "small", **sections: dict[str, Any]) -> SearchQuestion:
    job = {"data": {"sequence_length": 512}, "training": {"sequences_per_step": 32}}
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    return SearchQuestion(Job.model_validate(job), facts_of(model), cluster(where))


@cache
def found() -> SearchResult:
    return search(question())


def test_every_ranked_layout_is_what_training_would_resolve() -> None:
    for candidate in (*found().ranked[:40], *found().misfits[:10]):
        world = world_of(found().question.cluster)
        assert resolve(candidate.job, world, found().question.facts) == candidate.plan
    assert all(candidate.exact for candidate in found().ranked[:SHOWN])
    assert found().looked_at == len(found().ranked) + len(found().misfits) + sum(found().illegal.values())


def test_what_is_shown_is_measured() -> None:
    """Behind the fastest it had quick sums, by which layouts that fit were said not to, and the other way round."""
    where = cluster("h100:16")
    part = replace(where.accelerator, memory_bytes=int(2.3 * GIB))
    result = search(question("h100:16")._replace(cluster=replace(where, accelerator=part)))
    assert all(candidate.exact and candidate.fits for candidate in distinct(result.ranked, SHOWN))
    assert result.unfit and all(candidate.exact and not candidate.fits for candidate in result.unfit)
    key = "memory.checkpoint_every"
    given = next(candidate for candidate in result.ranked if not candidate.exact and key in candidate.changes)
    explained = commands_plan._asked(result, f"{key}={given.changes[key]}")
    assert explained.exact


def test_no_combination_of_the_space_that_fits_is_faster() -> None:
    asked, world = found().question, world_of(found().question.cluster)
    space = SearchSpace(asked.job, asked.facts, world.size, 32)
    best, counted = found().ranked[0], 0
    for changes in space.jobs():
        try:
            plan = resolve(changed_job(asked.job, changes), world, asked.facts)
        except LegalityError:
            continue
        counted += 1
        prediction = predict(configuration_of(plan, asked.facts, asked.cluster))
        fits = prediction.memory_bytes <= asked.cluster.accelerator.memory_bytes
        assert not fits or prediction.step_seconds >= best.prediction.step_seconds * 0.999, changes
    assert counted > 100


def test_rows_that_fill_a_step_are_no_tokens() -> None:
    """Of 32 sequences six ranks compute 36 rows."""
    result = search(question("h100:6"))
    assert result.best and result.best.plan.microbatch * result.best.plan.accumulation * 6 > 32
    for candidate in result.ranked:
        assert candidate.tokens_per_second * candidate.prediction.step_seconds == pytest.approx(32 * 512)


@pytest.mark.parametrize(
    "sections",
    [
        {"memory": {"offload_parameters": True}},
        {"memory": {"offload_parameters": True}, "adapter": {"kind": "lora"}},
        {"memory": {"offload_optimizer": True}, "training": {"ema_decay": 0.99}},
        {
            "memory": {"offload_parameters": True},
            "training": {"objective": "dpo", "ema_decay": 0.99},
            "data": {"format": "preference", "path": "rows"},
        },
        {
            "memory": {"offload_activations": True, "activation_checkpointing": "selective", "checkpoint_every": 2},
            "parallel": {"tensor_parallel_degree": 2, "sequence_parallel": True},
        },
    ],
)
def test_a_hosts_memory_is_what_the_closed_form_moves_there(sections: dict[str, Any]) -> None:
    """Of both embeddings, of frozen weights, of a copy and averages, of a part of the sequence."""
    asked = question("h100:4", **{"training": {"gradient_accumulation": 2}, **sections})
    job = asked.job.model_copy(update={"model": asked.job.model.model_copy(update={"config": LLAMA})})
    facts = discover(build_model(job), job)
    plan = resolve(job, world_of(asked.cluster), facts)
    most = max(moment.host for moment in moments(plan, facts))
    assert predict(configuration_of(plan, facts, asked.cluster)).host_bytes == pytest.approx(most, rel=0.02)


@pytest.mark.parametrize("form", ["nf4", "bf16"])
def test_frozen_weights_are_counted_as_they_are_kept(form: str) -> None:
    """As four bytes each, layouts that fit were never measured, and hosts had no room for what is offloaded."""
    asked = question("h100:2", adapter={"kind": "lora"})
    given = changed_job(asked.job, {"model.config": LLAMA})
    facts = discover(build_model(given), given)
    linear = [name for name in facts.frozen if name in facts.block_of and len(facts.parameter_shapes[name]) == 2]
    facts = replace(
        facts,
        packed={name: "nf4" for name in linear if form == "nf4"},
        weight_dtypes={name: "bfloat16" for name in facts.frozen if form == "bf16"},
    )
    for offloads in (False, True):
        job = changed_job(given, {"memory.offload_parameters": offloads})
        plan = resolve(job, world_of(asked.cluster), facts)
        prediction = predict(configuration_of(plan, facts, asked.cluster))
        held = moments(plan, facts)
        quick = prediction.host_bytes if offloads else prediction.memory["parameters"]
        right = max(moment.host if offloads else moment.parameters for moment in held)
        assert quick == pytest.approx(right, rel=0.05)


def test_a_layout_whose_time_nobody_knows_is_none() -> None:
    """Tensor ranks that gather outputs are legal to train on, and no search puts them beside others."""
    asked = question("h100:2", training={"microbatch_size": 2})
    asked = asked._replace(facts=replace(asked.facts, heads_whole="there is no plan for it"))
    result = search(asked)
    assert result.ranked and all(candidate.plan.degrees["tensor"] == 1 for candidate in result.ranked)
    plan = resolve(
        changed_job(asked.job, {"parallel.tensor_parallel_degree": 2}), world_of(asked.cluster),
        replace(asked.facts, heads_whole=""),
    )  # fmt: skip
    with pytest.raises(LegalityError, match="does not know what it takes to gather the outputs"):
        configuration_of(plan, asked.facts, asked.cluster)
    assert remedies(plan, asked.facts, asked.cluster, 1e9) == []


def test_stages_that_the_job_cuts_set_the_pace() -> None:
    """Five blocks of six on one rank took the time of three."""

    def prediction(*sizes: int) -> Prediction:
        stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        partition = {block.name: stage for block, stage in zip(facts_of("small").blocks, stages, strict=True)}
        parallel = {"pipeline_parallel_degree": 2, "auto_partition": False, "partition": partition}
        asked = question("h100:2", parallel=parallel)
        plan = resolve(asked.job, world_of(asked.cluster), asked.facts)
        return predict(configuration_of(plan, asked.facts, asked.cluster))

    even, first, last = prediction(3, 3), prediction(5, 1), prediction(1, 5)
    assert first.seconds["attention"] == last.seconds["attention"] == pytest.approx(even.seconds["attention"] * 5 / 3)
    assert even.step_seconds < first.step_seconds < last.step_seconds  # which has the head
    assert first.stage_memory[0] > even.stage_memory[0] > last.stage_memory[0]


def test_what_the_job_sets_stays() -> None:
    given = {"parallel": {"tensor_parallel_degree": 2, "sequence_parallel": False}, "memory": {"checkpoint_every": 2}}
    ranked = search(question(**given, training={"microbatch_size": 2})).ranked
    assert ranked
    for candidate in ranked:
        assert candidate.plan.degrees["tensor"] == 2 and candidate.plan.microbatch == 2
        assert not candidate.plan.sequence_parallel
        assert candidate.job.memory.checkpoint_every == 2


def test_kept_weights_are_offered_with_one_shard_rank() -> None:
    """There a step casts them once, where it would in each microbatch (tests/planner/test_unit_passes.py)."""
    asked = question(parallel={"sharded_data_parallel_degree": 1})
    space = SearchSpace(asked.job, asked.facts, 8, 64)
    changes = next(changes for changes in space.jobs() if changes["training.microbatch_size"] == 1)
    one = [{key: more[key] for key in more.keys() - changes.keys()} for more in space.neighbours(changes)]
    assert {"parallel.reshard_after_forward": False} in one


def test_a_limit_takes_an_even_sample_and_says_what_it_left_out() -> None:
    few = search(question(), limit=50)
    assert few.left_out > 0 and few.looked_at < found().looked_at
    assert len({candidate.plan.degrees["tensor"] for candidate in few.ranked}) > 1
    assert any("were not looked at" in line for line in search_remarks(few))


def test_a_search_asks_once_what_muon_takes() -> None:
    """Not again for each of the candidates, of which there are thousands."""
    asked = question(optimizer={"name": "Muon"})
    asked = asked._replace(facts=replace(asked.facts))  # of which nothing is known yet
    with mock.patch.object(parameter_optimizers, "is_hidden_matrix", wraps=is_hidden_matrix) as looked:
        result = search(asked, limit=50)
    assert result.looked_at > 50 and looked.call_count == len(asked.facts.trained_shapes)


def test_causes_add_up() -> None:
    for candidate in found().ranked[:5]:
        assert sum(times_of(candidate).values()) == pytest.approx(candidate.prediction.step_seconds)
        assert sum(candidate.memory.values()) == pytest.approx(candidate.memory_bytes)
        assert max(candidate.stage_memory) == candidate.memory_bytes


def test_budget_is_days_and_dollars() -> None:
    best, budget = found().ranked[0], Budget(1e9, 2.0)
    assert budget.days(best) == pytest.approx(1e9 / best.tokens_per_second / 86400)
    assert budget.cost(best) == pytest.approx(budget.days(best) * 24 * 8 * 2.0)  # type: ignore[operator]
    assert candidate_data(best, budget)["days"] == budget.days(best)
    samples = best.plan.sequences_per_step
    stages = SizeStage(samples // 2), SizeStage(samples, 10, 5 * samples)
    growing, step = replace(best, plan=replace(best.plan, step_sizes=StepSizes(stages))), best.prediction.step_seconds
    assert 5 * step < training_seconds(growing, 5 * samples * best.plan.sequence_length) <= 10 * step
    lengths = SequenceLengths((LengthStage(best.plan.sequence_length // 8), LengthStage(best.plan.sequence_length, 9)))
    shorter = replace(best, plan=replace(best.plan, sequence_lengths=lengths))
    assert 0 < training_seconds(shorter, 9 * best.plan.sequence_length) < 9 / samples * step
    both = replace(growing, plan=replace(growing.plan, sequence_lengths=lengths))
    assert 0 < budget.days(growing) - budget.days(both) < 18 / samples * step / 86400  # type: ignore[operator]
    tokens = 1e9 - 5 * samples * best.plan.sequence_length  # behind the ten smaller steps
    assert budget.days(growing) > budget.days(best) > tokens / best.tokens_per_second / 86400  # type: ignore[operator]


def test_the_text_names_causes_conventions_and_losers() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(ranking_table(found(), 4, Budget()))
        console.print(layout_explanation(found().ranked[0], found(), Budget(3e11, 2.0)))
    text = captured.get()
    for word in ("matrix products", "8P", "megatron-2021", "palm", "megatron-2022", "MFU", "slower", "$"):
        assert word in text, word


def test_a_layout_whose_interval_of_memory_does_not_fit_is_marked_and_a_surer_one_named() -> None:
    asked, need = found().question, found().ranked[0].memory_bytes
    accelerator = replace(asked.cluster.accelerator, memory_bytes=need * 1.01)
    tight = search(asked._replace(cluster=replace(asked.cluster, accelerator=accelerator)))
    best, surest = tight.best, tight.surest
    assert best is not None and best.fits and not best.fits_surely and best.memory_interval[1] > need * 1.01
    assert surest is not None and surest.memory_interval[1] <= need * 1.01
    faster = tight.ranked[: tight.ranked.index(next(each for each in tight.ranked if each.changes == surest.changes))]
    assert not any(each.fits_surely for each in faster if each.exact)
    said = may_not_fit(best, tight)
    assert said is not None and "--explain sure" in said and why_slower(surest, best) in said
    assert (
        may_not_fit(surest, tight) is None
        and candidate_data(surest)["fits_surely"]
        and not candidate_data(best)["fits_surely"]
    )
    least = replace(tight, ranked=tuple(each for each in tight.ranked if not each.fits_surely))
    assert least.surest is None and (said := may_not_fit(best, least)) is not None and "every layout" in said
    console = Console(width=100)
    with console.capture() as captured:
        console.print(layout_explanation(best, tight, Budget()))
    assert "may not fit" in captured.get()


@pytest.mark.slow
def test_the_surest_layout_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", config(tmp_path), "--cluster", "dgx-h100:1", "--limit", "200", "--json", "--explain", "sure")
    code, out, _ = plan(capsys, *words)
    assert code == 0 and json.loads(out)["explained"]["fits_surely"]


@pytest.mark.slow
def test_experts_are_shared_where_a_search_finds_that_faster(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    experts = tmp_path / "config.json"
    experts.write_text(json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}))
    words = ("--cluster", "h100:8", "--limit", "400", "--json", "--data.sequence_length", "512")
    code, out, _ = plan(capsys, "--model", str(experts), *words)
    result = json.loads(out)
    assert code == 0 and any("T* = " in note for note in result["notes"])
    degrees = {candidate["degrees"]["expert"] for candidate in result["ranked"]}
    assert max(degrees) > 1, degrees


def test_a_layout_is_found_by_its_keys_or_made() -> None:
    wanted = {"parallel.tensor_parallel_degree": 4, "memory.activation_checkpointing": "full"}
    candidate = matching(found(), wanted)
    assert candidate is not None and all(lookup(candidate.job, key) == value for key, value in wanted.items())
    assert why_slower(candidate, found().ranked[0]).endswith(")") or "slower" in why_slower(
        candidate, found().ranked[0]
    )
    assert of_changes(found(), {"memory.loss_chunk_tokens": 77}).job.memory.loss_chunk_tokens == 77
    with pytest.raises(LegalityError, match="does not divide"):
        of_changes(found(), {"parallel.tensor_parallel_degree": 3})
    whole = of_changes(found(), {"parallel.tensor_parallel_degree": 8, "memory.loss_chunk_tokens": 77})
    assert whole.plan.degrees["tensor"] == 8 and whole.plan.state_ranks == 1  # the best has others, which is no rule


@pytest.mark.slow
def test_more_nodes_are_never_slower() -> None:
    more = search(question("dgx-h100:2", training={"sequences_per_step": 256}))
    speeds = {nodes: on_nodes(more, nodes) for nodes in (1, 2, 4)}
    rates = [each.tokens_per_second for each in speeds.values() if each is not None]
    assert len(rates) == 3 and rates == sorted(rates)


def test_layouts_that_differ_little_are_shown_once() -> None:
    shown = distinct(found().ranked, 10)
    layouts = [(*each.plan.degrees.values(), each.job.memory.activation_checkpointing) for each in shown]
    assert len(set(layouts)) == len(layouts)


def test_degrees_are_thinned_evenly_and_keep_the_ends() -> None:
    assert thinned([1, 2, 3, 4, 5, 6, 8, 10, 12]) == [1, 2, 4, 8, 12]
    assert thinned([7]) == [7] and thinned([]) == []


@pytest.mark.slow
def test_what_does_not_fit_says_how_much_is_missing() -> None:
    crowded = question(memory={"offload_parameters": False})
    crowded = crowded._replace(
        cluster=replace(crowded.cluster, accelerator=replace(crowded.cluster.accelerator, memory_bytes=int(1.1e9)))
    )
    misfits = search(crowded).misfits
    assert misfits and all(candidate.memory_bytes > 1.1e9 for candidate in misfits[:5])
    assert "GiB" in why_not_fit(misfits[0])


def test_remedies_fit_and_the_cheapest_is_first() -> None:
    asked = question(training={"microbatch_size": 4, "gradient_accumulation": 1})
    world = world_of(asked.cluster)
    plan = resolve(asked.job, world, asked.facts)
    room = 0.6 * estimate(plan, asked.facts).total
    found = remedies(plan, asked.facts, asked.cluster, room)
    assert 0 < len(found) <= 3
    assert [remedy.relative_time for remedy in found] == sorted(remedy.relative_time for remedy in found)
    for remedy in found:
        changed = resolve(changed_job(plan.job, remedy.changes), world, asked.facts)
        assert estimate(changed, asked.facts).total == remedy.memory_bytes <= room


# --- the command


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def test_the_winner_is_a_job_that_train_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    keys = ("--data.sequence_length", "128", "--training.sequences_per_step", "16")
    code, out, _ = plan(capsys, "--model", config(tmp_path), "--cluster", "cpu:4", *keys, "--json", "--write", str(job))
    assert code == 0
    best = json.loads(out)["ranked"][0]
    written = load_job(job)
    assert written.parallel.workers == 4 and written.training.sequences_per_step == 16
    assert main(["train", str(job), "--print-plan"]) == 0
    shown = capsys.readouterr().out
    for axis, degree in best["degrees"].items():
        assert any(axis in line and str(degree) in line for line in shown.splitlines())
    assert yaml.safe_load(job.read_text())["data"] == {"sequence_length": 128}
    before = job.read_text()
    code, _, err = plan(capsys, str(job), "--cluster", "cpu:4", "--write", str(job))
    assert code and "is there already; name a new file" in err and job.read_text() == before


@pytest.mark.parametrize(
    ("wanted", "key"),
    [
        ({"tensor_parallel_degree": 1, "sequence_parallel": False}, "parallel.tensor_parallel_degree"),
        ({"training.sequences_per_step": 64}, "training.sequences_per_step"),
        ({"sharded_data_parallel_degree": None}, "parallel.sharded_data_parallel_degree"),
    ],
)
def test_what_is_explained_is_written_against_the_jobs_own_keys(
    wanted: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A default, another size of the step and a key that is unset again."""
    given, written = tmp_path / "job.yaml", tmp_path / "written.yaml"
    parallel = {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}
    training = {"sequences_per_step": 32}
    given.write_text(json.dumps({"model": {"config": LLAMA}, "parallel": parallel, "training": training}))
    words = ",".join(f"{name}={json.dumps(value)}" for name, value in wanted.items())
    assert plan(capsys, str(given), "--cluster", "h100:4", "--explain", words, "--write", str(written))[0] == 0
    assert lookup(load_job(written), key) == next(iter(wanted.values()))


def test_tokens_of_a_step_are_judged_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of 2.5 sequences were planned as two, and of half a sequence as one."""
    words = ("--model", config(tmp_path), "--cluster", "cpu:2", "--data.sequence_length", "128", "--json")
    for tokens in (64, 320):
        code, _, err = plan(capsys, *words, "--training.tokens_per_step", str(tokens))
        assert code and "a step holds whole sequences" in err
    code, out, _ = plan(
        capsys, *words, "--training.tokens_per_step", "512", "--explain", "training.tokens_per_step=1024"
    )
    assert code == 0
    one, other = json.loads(out)["ranked"][0], json.loads(out)["explained"]
    assert [each["keys"]["training.sequences_per_step"] for each in (one, other)] == [4, 8]


def test_a_cpu_that_was_measured_corrects_its_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does what a run says of itself beforehand; of any other CPU nothing is known, and a note says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("--model", config(tmp_path), "--parallel.device", "cpu", "--data.sequence_length", "128", "--json")
    seconds = []
    for factor in (1.0, 3.0):
        keep_constants(MachineConstants({2: 0.03}, {2: 6.0}, 2.0, 1e-4, {2: factor}, 1e7, "a test"))
        said = json.loads(plan(capsys, *words)[1])
        seconds.append(said["ranked"][0]["step_seconds"])
        assert not any("no datasheet" in note for note in said["notes"])
    assert seconds[1] == pytest.approx(3 * seconds[0])
    described = json.loads(plan(capsys, *words, "--cluster", "cpu:2")[1])
    constants_path().unlink()
    for said in (described, json.loads(plan(capsys, *words)[1])):
        assert any("no datasheet" in note for note in said["notes"])


def test_a_job_for_several_hosts_says_how_they_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    words = ("--model", config(tmp_path), "--cluster", "dgx-h100:2", "--write", str(job))
    assert plan(capsys, *words)[0] == 0
    start = job.read_text().splitlines()[1]
    assert (
        "torchrun --no-python --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500"
        in start
    )


def test_the_ranks_are_those_of_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number of workers that the job has for another machine is said to be none, and no launch is refused for it."""
    job = tmp_path / "job.yaml"
    words = ("--model", config(tmp_path), "--cluster", "dgx-h100:2", "--parallel.workers", "4")
    code, out, _ = plan(capsys, *words, "--json", "--write", str(job))
    assert code == 0 and any("parallel.workers=4 is not used" in note for note in json.loads(out)["notes"])
    assert load_job(job).parallel.workers is None
    assert main(["launch", str(job), "--to", "slurm", "--launch.cluster", "dgx-h100:2", "--print-plan"]) == 0


def test_ranks_that_would_share_a_gpu_are_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each had a GPU of its own in the plan. What is offloaded has this machine's memory."""
    monkeypatch.setattr(expected_world, "default_device_type", lambda: "cuda")
    monkeypatch.setattr(expected_world.accelerator, "count", lambda kind: 2)
    monkeypatch.setattr(expected_world.accelerator, "vendor_name", lambda kind: "NVIDIA L4")
    words = ("--model", config(tmp_path), "--json", "--parallel.workers")
    code, _, err = plan(capsys, *words, "4")
    assert code == 2 and "parallel.workers=4: ranks would share the 2 GPU(s) of this machine" in err
    monkeypatch.setattr("psutil.virtual_memory", lambda: mock.Mock(total=2**32))
    there = commands_plan._here(Job.model_validate({"parallel": {"workers": 2}}))
    assert (there.size, there.host_bytes) == (2, 2**31)


def test_a_reader_that_stops_early_gets_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.yaml"
    monkeypatch.setattr(commands_plan, "_print", mock.Mock(side_effect=BrokenPipeError))
    with suppress(BrokenPipeError):
        main(["plan", "--model", config(tmp_path), "--cluster", "cpu:2", "--write", str(job)])
    assert load_job(job).parallel.workers == 2


def test_the_page_is_self_contained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ("--model", config(tmp_path), "--cluster", "dgx-h100:2", "--explain", "pipeline_parallel_degree=2")
    assert plan(capsys, *words, "--tokens", "1B", "--html", str(page))[0] == 0
    text = page.read_text()
    for name in ("time", "memory", "schedule", "scaling"):
        assert f'id="plot-{name}"' in text
    head, _, _ = text.partition("<script>")
    assert "default-src 'none'" in head and "https://" not in head


def test_the_memory_of_long_pipelines_is_that_of_the_fullest_rank() -> None:
    job = Job.model_validate({
        "model": {"config": {**LLAMA, "num_hidden_layers": 22}}, "data": {"sequence_length": 512},
        "training": {"sequences_per_step": 64}, "parallel": {"pipeline_parallel_degree": 8, "pipeline": "zbv"},
    })  # fmt: skip
    facts = discover(build_model(job), job)
    elsewhere = False
    for candidate in search(SearchQuestion(job, facts, cluster("h100:8")), 40).ranked[:4]:
        exact = with_exact_memory(candidate, facts).exact
        of_ranks = [estimate(candidate.plan, facts, pipeline=rank).total for rank in range(8)]
        assert max(known.total for known in exact) == max(of_ranks)
        elsewhere |= max(of_ranks) > max(of_ranks[rank] for rank in (0, 4, 7))
    assert elsewhere  # than at the ends and in the middle


@pytest.mark.slow
def test_a_model_too_large_names_the_smallest_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, "--model", "llama3-8b", "--cluster", "h100:1", *ON_DEVICE)
    assert code == 2
    assert "no layout of 8,0" in err and "fits on 1 x 1 H100 SXM" in err and "nodes would do" in err


@pytest.mark.parametrize(
    "words, said",
    [
        (("--model", "llama2-7c"), "Did you mean 'llama2-7b'?"),
        (("--cluster", "p4d.24xlage:2"), "Did you mean 'p4d.24xlarge'?"),
        (("--cluster", "cpu:none"), "no count of nodes"),
        (("--cluster", "/nowhere/cluster.yaml"), "does not exist. There is no directory '/nowhere'."),
        (("--price", "2"), "does nothing without --tokens"),
        (("--timeline", "x.json"), "needs --trace of all ranks"),
        (("--rank", "1"), "does nothing without --trace"),
        (("--trace", "--write", "x.yaml"), "does nothing with --trace"),
        (("--cluster", "cpu:4", "--parallel.tensor_parallel_degree", "3"), "3 does not divide the 4 ranks; use"),
        (("--cluster", "cpu:2", "--explain", "tensor_degree=2"), "Did you mean 'tensor_parallel_degree'?"),
        (("--cluster", "cpu:2", "--explain", "workers=3"), "parallel.workers follows from the cluster"),
        (("--cluster", "cpu:2", "--write", "x.yaml", "--html", "x.yaml"), "is --html's file too"),
        (("--cluster", "cpu:2", "--explain", "0"), "layouts of the table have numbers from 1"),
        (("--cluster", "cpu:2", "--explain", "best"), "no number of the table, nor `sure`, nor key=value"),
        (("--cluster", "cpu:2", "--explain", "microbatch_size=-2"), "microbatch_size=-2: must be greater"),
        (("--cluster", "cpu:2", "--explain", "activation_checkpointing=ful"), "must be 'none', 'full' or 'selective'"),
        (("--cluster", "h200:²"), "'²' is no count of nodes"),
        (("--trace", "--top", "3"), "--top does nothing with --trace"),
        (("--cluster", "cpu:1", "--limit", "1", "--explain", "99"), "the table has 1 layouts; use 1 to 1"),
        (("--tokens", "many"), "not a number above 0"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, *words)
    assert code == 2 and said in err and "Traceback" not in err


@pytest.mark.slow
def test_what_is_offloaded_has_to_fit_into_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, "--model", "llama3-70b", "--cluster", "h100:2", "--limit", "10")
    assert code == 2 and "in the host's memory, whose share of it is 256.0 GiB" in err and "nodes would do" in err


@pytest.mark.parametrize("is_there", [True, False])
def test_rows_that_are_here_say_their_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    rows = tmp_path / "chat.jsonl"
    if is_there:
        turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
        rows.write_text(json.dumps({"messages": turns}) + "\n")
    keys = ["--data.path", str(rows), "--data.packing", "false", "--cluster", "dgx-h100:1"]
    code, _, error = plan(capsys, "--model", config(tmp_path), *keys)
    assert (code == 0) == is_there, error
    assert is_there or "does not exist" in error


@pytest.mark.parametrize("is_there", [True, False])
def test_images_that_are_here_say_their_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    """From the model's config alone: a plan needs no weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(toy_config("vit", image_size=16, patch_size=8)))
    if is_there:
        (tmp_path / "images" / "cat").mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (16, 16)).save(tmp_path / "images" / "cat" / f"{number}.png")
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    job = {
        "model": {"path": str(tmp_path / "model"), "task": "image_classification", "labels": ["cat", "dog"]},
        "data": {"path": str(tmp_path / "images"), "processor": processor},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    code, out, error = plan(capsys, str(tmp_path / "job.yaml"), "--cluster", "dgx-h100:1")
    assert code == 0, error
    assert ("a sample is counted as 5 tokens" in out + error) == is_there
    assert ("samples are counted as data.sequence_length" in out + error) != is_there
