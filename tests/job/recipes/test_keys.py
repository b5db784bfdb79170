"""Single keys of recipes: what a value becomes beside others, why it has no effect, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.job.recipes.llmft_keys import ARGS, DATA, FSDP, MODEL, PAIRS, PEFT
from shardwise.job.recipes.recipe_file import RecipeKind
from shardwise.job.recipes.recipe_key import NoEffect, Refusal, find_row
from shardwise.job.recipes.translation import ROWS

CALLBACKS = "exp_manager.checkpoint_callback_params"
SMP_MODEL = {"use_smp_model": True}
Case = tuple[str, Any, dict[str, Any], Any]


def mapped(kind: RecipeKind, key: str, value: Any, values: dict[str, Any]) -> Any:
    row = find_row(ROWS[kind], key)
    assert row is not None and not row.never_acts, key
    return row.maps(row.read(value), values)


# A key, its value, other values of the recipe -> keys of the job, or a part of the reason why there are none.
SMP: list[Case] = [
    ("run.results_dir", "out", {}, {"output": "out"}),
    ("run.results_dir", "out", {"exp_manager.exp_dir": "exp"}, NoEffect("exp_dir says where")),
    ("trainer.devices", "auto", {}, NoEffect("all devices of a node")),
    ("trainer.devices", "half", {}, Refusal("must be auto or a whole number")),
    ("trainer.devices", "4", {}, {"nodes.devices": 4}),
    ("trainer.precision", "bf16-mixed", {}, {"precision.compute": "bf16"}),
    ("trainer.precision", "int8", {}, Refusal("use one of bf16, bf16-mixed")),
    ("trainer.limit_val_batches", 0, {}, NoEffect("at the run's end alone")),
    ("trainer.limit_val_batches", 0.5, {}, Refusal("a share of the validation data")),
    ("trainer.limit_val_batches", 1.0, {}, Refusal("a share of the validation data")),
    ("trainer.limit_val_batches", 1, {}, {"training.evaluate_batches": 1}),
    ("trainer.limit_val_batches", 8, {}, {"training.evaluate_batches": 8}),
    ("trainer.val_check_interval", 10, {}, NoEffect("switches validation off")),
    ("trainer.val_check_interval", -1, {"trainer.limit_val_batches": 8}, NoEffect("at the run's end")),
    ("trainer.val_check_interval", 0.5, {"trainer.limit_val_batches": 8}, Refusal("a share of an epoch")),
    ("trainer.val_check_interval", 1.0, {"trainer.limit_val_batches": 8}, Refusal("a share of an epoch")),
    ("trainer.val_check_interval", 10, {"trainer.limit_val_batches": 8}, {"training.evaluate_every": 10}),
    ("exp_manager.create_wandb_logger", True, {}, {"observe.wandb": "shardwise"}),
    ("exp_manager.create_mlflow_logger", True, {"exp_manager.name": "mine"}, {"observe.mlflow": "mine"}),
    ("exp_manager.create_mlflow_logger", False, {}, NoEffect("it is off")),
    (f"{CALLBACKS}.save_top_k", 3, {f"{CALLBACKS}.save_top_k": 3}, {"checkpoint.keep_last": 3}),
    (f"{CALLBACKS}.save_top_k", -1, {f"{CALLBACKS}.save_top_k": -1}, Refusal("by a number that is high; use 1000")),
    (f"{CALLBACKS}.every_n_train_steps", 9, {f"{CALLBACKS}.save_top_k": 0}, NoEffect("save_top_k=0 writes none")),
    (f"{CALLBACKS}.every_n_train_steps", 9, {}, {"checkpoint.every": 9}),
    (
        f"{CALLBACKS}.save_top_k", 3, {"exp_manager.create_checkpoint_callback": False},
        NoEffect("create_checkpoint_callback is off"),
    ),
    ("exp_manager.export_full_model.every_n_train_steps", 0, {}, NoEffect("0 writes none")),
    ("exp_manager.export_full_model.every_n_train_steps", 9, {}, Refusal("not written on the way")),
    ("exp_manager.auto_checkpoint.enabled", True, {}, Refusal("no interval is measured; use checkpoint_callback")),
    ("exp_manager.auto_checkpoint.enabled", False, {}, NoEffect("it is off")),
    ("model.shard_degree", 4, {}, {"parallel.sharded_data_parallel_degree": 4}),
    ("model.shard_degree", 4, {"model.sharding_strategy": "no_shard"}, NoEffect("no_shard shards nothing")),
    ("model.sharding_strategy", "no_shard", {}, {"parallel.sharded_data_parallel_degree": 1}),
    ("model.sharding_strategy", "shard_grad_op", {}, {"parallel.reshard_after_forward": False}),
    ("model.sharding_strategy", "hybrid_shard", {}, {"parallel.sharded_data_parallel_degree": 8}),
    (
        "model.sharding_strategy", "hybrid_shard", {"trainer.devices": 4},
        {"parallel.sharded_data_parallel_degree": 4},
    ),
    ("model.sharding_strategy", "hybrid_shard", {"model.shard_degree": 2}, NoEffect("shard_degree says")),
    ("model.sharding_strategy", "full_shard", {}, NoEffect("all data ranks share")),
    ("model.fp8", True, {}, NoEffect("without use_smp_model")),
    ("model.fp8", False, SMP_MODEL, NoEffect("nothing is in float8")),
    ("model.activation_loading_horizon", 2, {}, NoEffect("offload_activations is off")),
    ("model.tensor_model_parallel_degree", 2, {}, Refusal("splits no layers; set use_smp_model=True")),
    ("model.expert_model_parallel_degree", 2, {}, Refusal("shares no experts; set use_smp_model=True")),
    ("model.expert_model_parallel_degree", 1, {}, {"parallel.expert_parallel_degree": 1}),
    ("model.moe_load_balancing", "aux_loss", {}, NoEffect("model.moe is off")),
    ("model.moe_load_balancing", "aux_loss", {"model.moe": True}, NoEffect("experts are the model's own")),
    ("model.moe_load_balancing", "none", {"model.moe": True, **SMP_MODEL}, {"router.balancing_loss": "none"}),
    ("model.moe_load_balancing", "balanced", {"model.moe": True, **SMP_MODEL}, Refusal("use aux_loss")),
    ("model.moe_load_balancing", "aux_loss", {"model.moe": True, **SMP_MODEL}, Refusal("model.num_experts_per_tok")),
    (
        "model.moe_load_balancing", "sinkhorn",
        {"model.moe": True, "model.num_hidden_layers": 32, "model.num_experts_per_tok": 2, **SMP_MODEL},
        {"router.balancing_loss": "layer", "router.balancing_coefficient": 0.016, "router.z_loss": 0.032},
    ),
    ("model.grad_clip", 0, {}, {"optimizer.clip_norm": None}),
    ("model.optim.sched.min_lr", 1e-5, {"model.optim.lr": 1e-4}, {"optimizer.final_learning_rate_ratio": 0.1}),
    ("model.optim.sched.min_lr", 1e-3, {"model.optim.lr": 1e-4}, Refusal("at most model.optim.lr=0.0001")),
    ("model.lr_decay_iters", 50, {"trainer.max_steps": 50}, NoEffect("ends with the run")),
    ("model.lr_decay_iters", 40, {"trainer.max_steps": 50}, Refusal("use trainer.max_steps=50 for both")),
    ("model.data.train_dir", ["a"], {}, {"data.path": "a", "data.format": "tokens"}),
    ("model.data.train_dir", ["a", "b"], {}, Refusal("one path is read")),
    ("model.data.val_dir", "v", {}, {"evaluation.sets": {"validation": "v"}}),
    ("model.data.use_synthetic_data", False, {}, NoEffect("the corpus is real")),
    ("model.data.dataset_type", "synthetic", {}, {"data.format": "stdlib"}),
    ("model.peft.rank", 8, {}, NoEffect("peft_type is null")),
    ("model.peft.rank", 8, {"model.peft.peft_type": "lora"}, {"adapter.rank": 8}),
    ("model.peft.peft_type", "qlora_4bit", {}, {"adapter.kind": "lora", "adapter.base": "nf4"}),
    ("model.peft.peft_type", "lora", SMP_MODEL, Refusal("adapters have use_smp_model=False")),
    ("model.hidden_size", 64, {"model.model_type": "falcon"}, NoEffect("the model's own config holds")),
    (
        "model.max_context_width", 64, {"model.model_type": "llama_v3"},
        {"data.sequence_length": 64, "model.config.max_position_embeddings": 64},
    ),
    ("model.max_context_width", 64, {"model.dpo.enabled": True}, {"data.sequence_length": 128}),
    ("model.sliding_window", 64, {"model.use_sliding_window": False}, NoEffect("use_sliding_window is off")),
    ("model.sliding_window", 64, {}, {"model.config.sliding_window": 64}),
    ("model.rope_scaling.factor", 8, {}, NoEffect("rope_type is null")),
    ("model.model_type", "own", {}, NoEffect("the model's own config says")),
    ("model.hf_access_token", "hf_x", {}, Refusal("no secret is kept in a job")),
    ("model.hf_model_name_or_path", "m", {}, NoEffect("do_finetune is off")),
    ("model.do_finetune", False, {}, NoEffect("weights are drawn")),
    ("model.dpo.enabled", False, {}, NoEffect("it is off")),
    ("model.dpo.enabled", True, {"model.data.train_dir": "rows"}, Refusal("leave model.data.train_dir null")),
    ("model.dpo.beta", 0.1, {}, NoEffect("model.dpo.enabled is off")),
    ("model.dpo.beta", 0, {"model.dpo.enabled": True}, {"training.dpo.beta": 0}),  # which the job refuses
    ("model.dpo.label_smoothing", 0, {"model.dpo.enabled": True}, NoEffect("labels are taken as they are")),
    ("model.nsys_profile.enabled", True, {}, Refusal("Nsight is started from outside; observe.profile writes")),
]  # fmt: skip
DPO = {f"{ARGS}.trainer_type": "dpo"}
PRETRAINS = {f"{ARGS}.pretrain_mode": True}
LLMFT: list[Case] = [
    (f"{ARGS}.trainer_type", "sft", PRETRAINS, NoEffect("trains on every token")),
    (f"{ARGS}.max_len", 64, PRETRAINS, {"data.sequence_length": 64}),
    (f"{ARGS}.max_len", 64, DPO, {"data.sequence_length": 128, "data.truncation": True}),
    (f"{ARGS}.beta", 0.1, {}, NoEffect("trainer_type is not dpo")),
    (f"{ARGS}.nll_loss_coef", 0, {}, NoEffect("trainer_type is not dpo")),
    (f"{ARGS}.nll_loss_coef", 0.5, DPO, Refusal("nothing is added to the loss of preferences; use 0")),
    (f"{ARGS}.label_smoothing", 0, DPO, NoEffect("labels are taken as they are")),
    (f"{ARGS}.label_smoothing", 0.1, DPO, {"training.dpo.label_smoothing": 0.1}),
    (f"{PAIRS}.max_prompt_length", 8, {f"{PAIRS}.max_prompt_length": 8}, NoEffect("max_len bounds a completion")),
    (
        f"{PAIRS}.max_prompt_length", 8, {f"{PAIRS}.max_prompt_length": 8, f"{ARGS}.max_len": 4},
        Refusal("use training_args.max_len=8"),
    ),
    (f"{ARGS}.pretrain_mode", False, {}, NoEffect("it is off")),
    (f"{ARGS}.packing_samples", True, PRETRAINS, NoEffect("always packed")),
    (f"{ARGS}.max_norm", 1.0, {f"{ARGS}.gradient_clipping": False}, NoEffect("gradient_clipping is off")),
    (f"{ARGS}.max_norm", 0, {}, {"optimizer.clip_norm": None}),
    (f"{ARGS}.gradient_clipping", False, {}, {"optimizer.clip_norm": None}),
    (f"{ARGS}.gradient_clipping", True, {}, NoEffect("max_norm says")),
    (f"{ARGS}.l2", 0, {f"{ARGS}.weight_decay": 0.1}, NoEffect("weight_decay says it")),
    (f"{PEFT}.target_parameters", ["e"], {"run.name": "qwen3-30b-a3b"}, {"adapter.target_parameters": ["e"]}),
    (f"{PEFT}.target_parameters", ["e"], {"run.name": "openai-gpt-oss-20b"}, NoEffect("they stay frozen")),
    (f"{ARGS}.l2", 0, {}, {"optimizer.weight_decay": 0}),
    (f"{ARGS}.weight_decay", 0, {f"{ARGS}.l2": 0.1}, NoEffect("training_args.l2 says it")),
    (f"{FSDP}.activation_checkpointing", True, {}, {"memory.activation_checkpointing": "full"}),
    (f"{FSDP}.activation_checkpointing", False, {}, NoEffect("gradient_checkpointing says it")),
    (f"{FSDP}.sharding_strategy", "hybrid_shard", {}, {"parallel.sharded_data_parallel_degree": 8}),
    (f"{FSDP}.sharding_strategy", "FULL_SHARD", {}, NoEffect("all data ranks share parameters")),
    (f"{FSDP}.sharding_strategy", "zero3", {}, Refusal("use one of FULL_SHARD, HYBRID_SHARD")),
    (f"{ARGS}.ring_attn_size", 1, {}, NoEffect("sequences are whole")),
    (
        f"{ARGS}.ulysses_sequence_parallel_size", 2, {},
        {"parallel.context_parallel_degree": 2, "parallel.context_parallel_method": "ulysses"},
    ),
    (f"{MODEL}.attn_implementation", "eager", {}, {"model.attention": "eager"}),
    (f"{MODEL}.attn_implementation", "flash_attention_2", {}, NoEffect("model.attention auto")),
    (f"{ARGS}.load_checkpoint", False, {}, NoEffect("starts anew")),
    (f"{ARGS}.load_checkpoint", True, {"training_config.force_rerun": True}, NoEffect("starts anew")),
    (f"{ARGS}.load_checkpoint", True, {f"{ARGS}.resume_checkpoint_path": "c"}, NoEffect("says from where")),
    (f"{ARGS}.load_checkpoint", True, {}, {"checkpoint.resume": "auto"}),
    (f"{ARGS}.resume_checkpoint_path", "c", {}, {"checkpoint.resume": "c"}),
    (f"{ARGS}.resume_checkpoint_path", "c", {f"{ARGS}.load_checkpoint": False}, NoEffect("starts anew")),
    (f"{ARGS}.resume_checkpoint_path", "c", {"training_config.force_rerun": True}, NoEffect("starts anew")),
    ("training_config.force_rerun", True, {}, NoEffect("no checkpoint is loaded")),
    (f"{ARGS}.lr_scheduler", "constant", {}, {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}),
    (f"{ARGS}.lr_scheduler", "constant_with_warmup", {}, {"optimizer.schedule": "constant"}),
    (f"{ARGS}.lr_warmup_ratio", 0.1, {f"{ARGS}.lr_scheduler": "constant"}, NoEffect("has no warm-up")),
    (f"{ARGS}.eval_steps", -1, {}, NoEffect("at the run's end")),
    (f"{ARGS}.save_steps", -1, {}, NoEffect("OUTPUT/model at the end")),
    (f"{ARGS}.max_ckpt_num", 3, {}, NoEffect("save_steps writes none")),
    (f"{ARGS}.max_ckpt_num", 3, {f"{ARGS}.save_steps": 10}, {"checkpoint.keep_last": 3}),
    (f"{ARGS}.max_samples", 0.5, {}, Refusal("use at least 1, or leave it out")),
    (
        f"{ARGS}.max_samples", 9, {f"{ARGS}.max_samples": 9, f"{DATA}.train_data.limit": 5},
        {"data.max_documents": 5},
    ),
    (f"{DATA}.train_val_split_ratio", 1.0, {}, Refusal("some rows have to be kept for validation")),
    (f"{DATA}.train_val_split_ratio", 0.95, {}, {"data.validation_fraction": 0.05}),
    (f"{DATA}.train_val_split_seed", 7, {f"{ARGS}.seed": 7}, NoEffect("draws the split too")),
    (f"{DATA}.train_val_split_seed", 7, {f"{ARGS}.seed": 8}, Refusal("use training_args.seed=7")),
    (f"{DATA}.train_data.file_path", "a.jsonl", {f"{DATA}.data_dir": "/d/"}, {"data.path": "/d/a.jsonl"}),
    (f"{DATA}.train_data.file_path", "/a.jsonl", {f"{DATA}.data_dir": "/d"}, {"data.path": "/a.jsonl"}),
    (
        f"{DATA}.val_data.file_path", "v.jsonl", {f"{DATA}.data_dir": "/d"},
        {"evaluation.sets": {"validation": "/d/v.jsonl"}},
    ),
    (f"{DATA}.data_dir", "/d", {}, {"data.path": "/d"}),
    (f"{DATA}.data_dir", "/d", {f"{DATA}.train_data.file_path": "a"}, NoEffect("is below it")),
    ("training_config.mlflow.tracking_uri", "uri", {}, {"observe.mlflow": "shardwise"}),
    ("training_config.mlflow.run_id", "7", {}, Refusal("cannot be taken up again")),
    (f"{PEFT}.peft_type", "qlora", {}, {"adapter.kind": "lora", "adapter.base": "nf4"}),
    (f"{PEFT}.peft_type", "ia3", {}, Refusal("ia3 is not built")),
    (f"{PEFT}.peft_type", "lora", {f"{PEFT}.use_dora": True}, {"adapter.kind": "dora"}),
    (f"{PEFT}.target_modules", "all-linear", {f"{PEFT}.exclude_modules": ["o"]}, NoEffect("exclude_modules says")),
    (f"{PEFT}.target_modules", ["q"], {f"{PEFT}.exclude_modules": ["o"]}, Refusal("use all-linear")),
    (f"{PEFT}.exclude_modules", [], {}, NoEffect("it names none")),
    (f"{ARGS}.trainer_callbacks", [{"_target_": "mine.Own"}], {}, Refusal("mine.Own is no callback of a job")),
    (
        "elastic_policy.is_elastic", True, {"elastic_policy.max_nodes": 4},
        {"launch.least_nodes": 1, "launch.most_nodes": 4},
    ),
    ("elastic_policy.graceful_shutdown_timeout", 600, {}, NoEffect("is_elastic is off")),
    (
        "elastic_policy.graceful_shutdown_timeout", 600, {"elastic_policy.is_elastic": True},
        {"launch.stop_seconds": 600},
    ),
    (
        f"{ARGS}.learning_rate", 1.0,
        {"elastic_policy.is_elastic": True, "scale_config.2.training_config.training_args.learning_rate": 2.0},
        NoEffect("scale_config has it"),
    ),
    ("scale_config.*", 2, {"elastic_policy.is_elastic": True}, NoEffect("batch and microbatch stay")),
    ("elastic_policy.is_elastic", False, {}, NoEffect("it is off")),
    (f"{ARGS}.aux_loss_coef", 0, {}, NoEffect("routers have no loss")),
    (f"{ARGS}.aux_loss_coef", 0.1, {}, {"router.balancing_loss": "global", "router.balancing_coefficient": 0.1}),
    ("run.hf_access_token", "hf_x", {}, Refusal("no secret is kept in a job")),
    (f"{MODEL}.multimodal", True, {}, Refusal("pictures are not read")),
    (f"{MODEL}.multimodal", False, {}, NoEffect("it is off")),
]  # fmt: skip
CASES = [("smp", *case) for case in SMP] + [("llmft", *case) for case in LLMFT]


@pytest.mark.parametrize(
    ("kind", "key", "value", "values", "expected"), CASES, ids=[f"{case[1]}={case[2]}" for case in CASES]
)
def test_a_key_becomes(kind: RecipeKind, key: str, value: Any, values: dict[str, Any], expected: Any) -> None:
    outcome = mapped(kind, key, value, values)
    if isinstance(expected, dict):
        assert outcome == expected
    else:
        assert type(outcome) is type(expected) and expected.reason in outcome.reason


def test_all_linear_layers_but_some_are_a_pattern() -> None:
    import re

    pattern = mapped("llmft", f"{PEFT}.exclude_modules", ["o_proj"], {})["adapter.target_modules"]
    assert re.fullmatch(pattern, "layers.0.q_proj") and not re.fullmatch(pattern, "layers.0.o_proj")
