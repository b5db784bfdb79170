"""Recipes as jobs: each key acts, is noted with a reason, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.job.recipes.recipe_file import read_recipe
from shardwise.job.recipes.recipe_key import NoEffect, find_row
from shardwise.job.recipes.translation import ROWS, TABLES, RecipeTranslation, translate_recipe

SAMPLES = Path(__file__).parent / "samples"
NAMES = ("smp_pretraining", "hf_llama3_2_1b_lora", "llmft_sft", "llmft_lora", "llmft_dpo")
SMP, LORA, SFT, ADAPTED, DPO = NAMES
ARGS = "training_config.training_args"
PROMPT = "training_config.datasets.preprocessor_cfgs.TokenizeSampleDPO.max_prompt_length"


def translated(name: str, *overrides: str, **changes: Any) -> RecipeTranslation:
    return translate_recipe(read_recipe(SAMPLES / f"{name}.yaml", overrides), changes)


def effect(result: RecipeTranslation, key: str) -> tuple[str, str]:
    outcome = next(outcome for outcome in result.outcomes if outcome.name == key)
    return outcome.effect, outcome.says


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_job_in_which_every_key_is_accounted_for(name: str) -> None:
    result = translated(name)
    accounted = [outcome.name for outcome in result.outcomes if not outcome.is_default]
    assert sorted(accounted) == sorted(result.recipe.values)
    assert not result.refusals and all(outcome.says for outcome in result.outcomes)
    job, text = result.job(), result.job_text()
    assert job.training.steps == 50 or job.training.epochs == 5
    idle = [outcome.name for outcome in result.outcomes if outcome.effect == "no effect"]
    assert idle and all(f"# {key}=" in text for key in idle)


def test_tables_name_each_key_once() -> None:
    for kind, table in TABLES.items():
        names = [row.name for row in table]
        assert len(names) == len(set(names)) > 80, kind
        assert all(row.says for row in table)


def test_an_smp_recipe_has_its_layout_and_architecture() -> None:
    result = translated(SMP)
    job = result.job()
    assert isinstance(job.model.config, dict)
    assert job.model.config["rope_parameters"] == {"rope_theta": 1000000.0}
    assert {"hidden_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}.items() <= job.model.config.items()
    assert (job.parallel.tensor_parallel_degree, job.parallel.sharded_data_parallel_degree) == (2, 4)
    assert (job.precision.fp8, job.memory.activation_loading_horizon) == ("torchao", 2)
    assert (job.router.balancing_loss, job.router.balancing_coefficient) == ("layer", 0.001)
    assert (job.optimizer.learning_rate, job.optimizer.final_learning_rate_ratio) == (1e-4, 0.01)
    assert (job.checkpoint.every, job.checkpoint.keep_last, job.checkpoint.directory) == (10, 3, None)
    assert (job.model.path, job.data.path, job.data.format) == (None, "data/train", "tokens")
    assert (job.launch.name, job.launch.time_limit) == ("mixture", "6-00:00:00")
    assert result.nodes == {"devices": 8, "count": 2}
    assert job.output == "results/mixture"


def test_an_adapter_recipe_names_its_weights_and_its_dimensions() -> None:
    result = translated(LORA)
    job = result.job()
    assert isinstance(job.model.config, dict)
    assert (job.adapter.kind, job.adapter.rank, job.adapter.alpha, job.adapter.dropout) == ("lora", 32, 16, 0.1)
    assert job.model.path == "meta-llama/Llama-3.2-1B" and job.model.config["hidden_size"] == 2048
    assert job.model.config["max_position_embeddings"] == 8192
    assert "hf download meta-llama/Llama-3.2-1B" in result.notes[0]
    assert (job.data.path, job.output) == ("/data/rows", "/runs/llama")
    assert job.parallel.sharded_data_parallel_degree == 8, "hybrid_shard without a degree is a node"
    defaults = {outcome.name for outcome in result.outcomes if outcome.is_default}
    assert {"model.seed", "model.optim.betas", "model.activation_checkpointing"} <= defaults


def test_a_fine_tuning_recipe_counts_in_epochs_and_shares_of_steps() -> None:
    job = translated(SFT).job()
    assert (job.training.objective, job.data.format, job.data.packing) == ("sft", "chat", False)
    assert (job.training.epochs, job.training.sequences_per_step, job.optimizer.warmup_ratio) == (5, 32, 0.1)
    assert (job.optimizer.final_learning_rate_ratio, job.data.validation_fraction) == (0.0, 0.1)
    assert job.model.path == "Qwen/Qwen3-0.6B"


def test_preferences_have_room_for_both_completions() -> None:
    job = translated(DPO, f"{ARGS}.label_smoothing=0.1").job()
    assert (job.training.objective, job.data.format, job.data.truncation) == ("dpo", "preference", True)
    assert (job.training.dpo.beta, job.training.dpo.loss, job.training.dpo.label_smoothing) == (0.01, "sigmoid", 0.1)
    assert job.data.sequence_length == 2 * 4096
    of_branch_v1 = translated(LORA, "model.dpo.enabled=true", "model.dpo.beta=0.2", "model.data.train_dir=null").job()
    assert isinstance(of_branch_v1.model.config, dict)
    assert (of_branch_v1.training.objective, of_branch_v1.training.dpo.beta) == ("dpo", 0.2)
    assert of_branch_v1.data.sequence_length == of_branch_v1.model.config["max_position_embeddings"] == 2 * 8192


def test_adapters_leave_out_what_a_recipe_excludes() -> None:
    result = translated(ADAPTED)
    assert result.job().adapter.target_modules == r"(?!(?:(?:.*\.)?model\.layers\.0\.mlp\.router)$).*"
    assert effect(result, "scale_config.1.trainer.num_nodes")[0] == "no effect"
    assert result.job().model.path == "openai/gpt-oss-20b"


@pytest.mark.parametrize(
    ("name", "override", "key", "says"),
    [
        (
            SMP,
            "model.train_batchsize=2",
            "model.train_batchsize",
            "unknown key. Did you mean 'model.train_batch_size'?",
        ),
        (SMP, "model.multi_modal=true", "model.multi_modal", "pictures are not read"),
        (SMP, "model.hf_access_token=abc", "model.hf_access_token", "no secret is kept in a job"),
        (SMP, "model.hidden_size=wide", "model.hidden_size", "must be a number"),
        (SMP, "trainer.max_steps=1.5", "trainer.max_steps", "must be a whole number; use 2"),
        (SMP, "model.sharding_strategy=zero", "model.sharding_strategy", "must be no_shard, shard_grad_op"),
        (SMP, "model.lr_decay_iters=60", "model.lr_decay_iters", "use trainer.max_steps=50 for both"),
        (SMP, "model.precision=32", "model.precision", "disagrees with trainer.precision='bf16'"),
        (SMP, "model.optim.sched.min_lr=1", "model.optim.sched.min_lr", "at most model.optim.lr=0.0001"),
        (LORA, "model.tensor_model_parallel_degree=2", "model.tensor_model_parallel_degree", "use_smp_model=True"),
        (LORA, "use_smp_model=true", "model.peft.peft_type", "adapters have use_smp_model=False"),
        (SFT, f"{ARGS}.trainer_type=grpo", f"{ARGS}.trainer_type", "must be sft or dpo"),
        (SFT, f"{ARGS}.max_norm=0.5", f"{ARGS}.max_norm", "disagrees with"),
        (DPO, f"{ARGS}.reference_free=true", f"{ARGS}.reference_free", "there is always a reference; use false"),
        (DPO, f"{ARGS}.nll_loss_coef=0.1", f"{ARGS}.nll_loss_coef", "use 0"),
        (DPO, f"{ARGS}.max_len=2048", PROMPT, "use training_args.max_len=4096"),
        (SFT, f"{ARGS}.trainer_callbacks=[{{_target_: my.Own}}]", f"{ARGS}.trainer_callbacks", "my.Own"),
    ],
)
def test_what_a_job_cannot_hold_is_refused_by_name(name: str, override: str, key: str, says: str) -> None:
    result = translated(name, override)
    refused = {outcome.name: outcome.says for outcome in result.refusals}
    assert says in refused.get(key, "")
    with pytest.raises(ConfigError, match="keys that a job cannot hold"):
        result.job()


@pytest.mark.parametrize(
    ("name", "override", "changed"),
    [
        (SMP, "recipes.model.sharding_strategy=no_shard", {"parallel.sharded_data_parallel_degree": 1}),
        (SMP, "model.sharding_strategy=shard_grad_op", {"parallel.reshard_after_forward": False}),
        (SMP, "use_smp_model=false", {"precision.fp8": None, "router.balancing_loss": None}),
        (SMP, "model.grad_clip=0", {"optimizer.clip_norm": None}),
        (SMP, "trainer.limit_val_batches=4", {"training.evaluate_batches": 4, "training.evaluate_every": 1}),
        (SMP, "model.data.use_synthetic_data=true", {"data.format": "stdlib", "data.path": None}),
        (SFT, f"{ARGS}.gradient_clipping=false", {"optimizer.clip_norm": None}),
        (SFT, f"{ARGS}.ring_attn_size=4", {"parallel.context_parallel_degree": 4}),
        (SFT, f"{ARGS}.pretrain_mode=true", {"training.objective": "pretraining", "data.packing": None}),
        (SFT, f"{ARGS}.save_steps=100", {"checkpoint.every": 100, "checkpoint.keep_last": 3}),
        (SMP, "model.data.val_dir=[/rows]", {"evaluation.sets": {"validation": "/rows"}}),
        (SFT, "training_config.datasets.val_data.file_path=v.jsonl", {"evaluation.sets": {"validation": "v.jsonl"}}),
        (
            ADAPTED,
            "elastic_policy.is_elastic=true",
            {"launch.least_nodes": 1, "launch.most_nodes": 16, "optimizer.learning_rate": 0.0004},
        ),
        (SFT, f"{ARGS}.l2=0.1", {"optimizer.weight_decay": 0.1}),
        (SFT, "training_config.datasets.train_data.limit=100", {"data.max_documents": 100}),
        (ADAPTED, "training_config.model_config.peft_config.use_dora=true", {"adapter.kind": "dora"}),
    ],
)
def test_overrides_act(name: str, override: str, changed: dict[str, Any]) -> None:
    result = translated(name, override)
    if name == SMP and override == "use_smp_model=false":
        result = translated(name, override, "model.tensor_model_parallel_degree=1")
    assert {key: result.keys.get(key) for key in changed} == changed
    result.job()


def test_keys_of_the_job_stand_above_the_recipe() -> None:
    result = translated(SFT, **{"data.path": "rows.jsonl", "model.path": "/models/own"})
    assert (result.job().data.path, result.job().model.path) == ("rows.jsonl", "/models/own")
    assert [note.partition(":")[0] for note in result.notes] == ["model.path=/models/own"]


def test_a_section_that_is_null_is_left_out() -> None:
    result = translated(SMP, "model.optim=null", "model.rope_scaling=null", "scale=null")
    assert effect(result, "model.rope_scaling")[0] == "no effect"
    assert effect(result, "model.optim")[0] == "no effect" and effect(result, "scale")[0] == "refused"
    assert result.keys["optimizer.learning_rate"] == 2e-4


def test_the_kind_of_rope_scaling_alone_has_the_adapters_numbers() -> None:
    left = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
    whole = translated(
        SMP, "model.rope_scaling.rope_type=llama3", *(f"model.rope_scaling.{name}=null" for name in left)
    )
    rope = whole.job().model.config["rope_parameters"]
    assert [rope[name] for name in left] == [8.0, 4.0, 1.0, 8192]
    assert effect(translated(SMP, "model.rope_scaling.rope_type=yarn"), "model.rope_scaling.rope_type")[0] == "refused"


def test_no_secret_is_shown() -> None:
    mistyped = ("run.hf_acces_token=hf_abc", "run.nameless=hf_" + 20 * "abc", "wandb_api_key=abc")
    result = translated(SFT, "run.hf_access_token=hf_abc", f"{ARGS}.use_wandb=key_abc", *mistyped)
    with pytest.raises(ConfigError) as error:
        result.require()
    assert "abc" not in str(error.value) and "run.hf_access_token=***" in str(error.value)


def test_wildcards_give_way_to_keys_of_their_own() -> None:
    row = find_row(ROWS["smp"], "model.viztracer.enabled")
    below = find_row(ROWS["smp"], "model.viztracer.ranks")
    assert row is not None and row.name == "model.viztracer.enabled"
    assert below is not None and isinstance(below.maps([0], {}), NoEffect)
    assert find_row(ROWS["smp"], "model.viztracers.ranks") is None
