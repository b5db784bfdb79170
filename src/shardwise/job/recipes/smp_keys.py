"""Keys of HyperPod's recipes of branch v1 (`run.model_type: hf`), with and without SMP, each once.

Meanings and defaults are those of Amazon's training adapter for NeMo, which runs these recipes: its schema, its FSDP
strategy and its model classes.
"""

from __future__ import annotations

from typing import Any

from shardwise.job.recipes.recipe_key import (
    ANY,
    CONFIG,
    MAPPED,
    NODE,
    NODES,
    SHARDS,
    Mapped,
    NoEffect,
    RecipeKey,
    Refusal,
    Values,
    launch_name,
    only,
    renamed,
    without_effect,
)

CHECKPOINTING = "memory.activation_checkpointing"
PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "32": "fp32", "64": "fp64"}
ROUTER_COEFFICIENT = 0.001  # of the adapter's balancing and z losses, which recipes cannot set
MODEL_TYPES = {  # the adapter's names -> transformers'
    "llama_v2": "llama",
    "llama_v3": "llama",
    "llama_v4": "llama4_text",
    "deepseek_r1_llama_v3": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen_v2": "qwen2",
    "qwen_v3": "qwen3",
    "deepseek_r1_qwen_v2": "qwen2",
    "deepseek_r1": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "falcon": "falcon",
}
ROPE_SCALING = (  # the fields of the adapter's schema, with its defaults
    ("rope_type", ("llama3",), None),
    ("factor", float, 8.0),
    ("high_freq_factor", float, 4.0),
    ("low_freq_factor", float, 1.0),
    ("original_max_position_embeddings", int, 8192),
)
BUILT_FROM_FIELDS = frozenset(MODEL_TYPES) - {"falcon"}
PLAIN_NAMES = "shardwise export writes it from any checkpoint"
BLOCKS = "blocks are gathered one by one; parallel.prefetch_depth says how far ahead"
PROFILER = "observe.profile writes a trace of torch's profiler"
SECRET = "no secret is kept in a job, and no hub is asked; download the model and name its directory in model.path"


# ------------------------------------------------------------------------------------------------ what values become


def _precision(value: Any, values: Values) -> Mapped:
    known = PRECISIONS.get(str(value))
    return {"precision.compute": known} if known else Refusal(f"use one of {', '.join(PRECISIONS)}")


def _results(value: str, values: Values) -> Mapped:
    if values.get("exp_manager.exp_dir"):
        return NoEffect("exp_manager.exp_dir says where the run writes")
    return {"output": value}


def _devices(value: Any, values: Values) -> Mapped:
    if value == "auto":
        return NoEffect("all devices of a node are used")
    if not str(value).isdecimal():
        return Refusal("must be auto or a whole number")
    return {f"{NODES}devices": int(value)}


def _validates(values: Values) -> bool:
    return bool(values.get("trainer.limit_val_batches"))


def _validation_batches(value: Any, values: Values) -> Mapped:
    if not value:
        return NoEffect("validation is at the run's end alone, on data.validation_fraction of the corpus")
    if isinstance(value, float) and (value <= 1 or value != int(value)):  # 1.0 is all of it
        return Refusal("a share of the validation data cannot be asked for; give a number of batches")
    return {"training.evaluate_batches": int(value)}


def _validation_interval(value: Any, values: Values) -> Mapped:
    if not _validates(values):
        return NoEffect("trainer.limit_val_batches=0 switches validation off")
    if value < 0:
        return NoEffect("validation is at the run's end")
    if isinstance(value, float) and (value <= 1 or value != int(value)):  # 1.0 is one
        return Refusal("a share of an epoch cannot be asked for; give a number of steps")
    return {"training.evaluate_every": int(value)}


def _tracker(key: str, name: str) -> Any:
    def maps(value: bool, values: Values) -> Mapped:
        return {key: str(values.get(name) or "shardwise")} if value else NoEffect("it is off")

    return maps


def _keeps_checkpoints(values: Values) -> str:
    """Return why the run writes no checkpoints; empty where it does."""
    if not values.get("exp_manager.create_checkpoint_callback", True):
        return "exp_manager.create_checkpoint_callback is off"
    kept = values.get("exp_manager.checkpoint_callback_params.save_top_k")
    return "save_top_k=0 writes none" if kept == 0 else ""


def _checkpoints_kept(value: int, values: Values) -> Mapped:
    reason = _keeps_checkpoints(values)
    if reason:
        return NoEffect(reason)
    return {"checkpoint.keep_last": value} if value > 0 else Refusal("all are kept by a number that is high; use 1000")


def _checkpoint_every(value: int, values: Values) -> Mapped:
    reason = _keeps_checkpoints(values)
    return NoEffect(reason) if reason else {"checkpoint.every": value}


def _exports_every(value: int, values: Values) -> Mapped:
    if not value:
        return NoEffect(f"0 writes none; {PLAIN_NAMES}")
    return Refusal(
        f"whole models are not written on the way; use exp_manager.checkpoint_callback_params, and {PLAIN_NAMES}"
    )


def _shard_degree(value: int, values: Values) -> Mapped:
    if values.get("model.sharding_strategy") == "no_shard":
        return NoEffect("model.sharding_strategy=no_shard shards nothing")
    return {SHARDS: value}


def _sharding_strategy(value: str, values: Values) -> Mapped:
    degree = values.get("model.shard_degree")
    if value == "no_shard":
        return {SHARDS: 1}
    keys: dict[str, Any] = {} if value in ("hybrid_shard", "full_shard") else {"parallel.reshard_after_forward": False}
    if degree is None and "hybrid" in value and values.get("model.tensor_model_parallel_degree", 1) == 1:
        devices = str(values.get("trainer.devices"))
        keys[SHARDS] = int(devices) if devices.isdecimal() else NODE
    if not keys:
        return NoEffect("shard_degree says over how many ranks" if degree else "all data ranks share parameters")
    return keys


def _float8(value: bool, values: Values) -> Mapped:
    if not values.get("use_smp_model"):
        return NoEffect("without use_smp_model the adapter multiplies nothing in float8")
    return {"precision.fp8": "torchao"} if value else NoEffect("nothing is in float8")


def _checkpointing(value: bool, values: Values) -> Mapped:
    return {CHECKPOINTING: "full" if value else "none"}


def _loading_horizon(value: int, values: Values) -> Mapped:
    if not values.get("model.offload_activations"):
        return NoEffect("model.offload_activations is off")
    return {"memory.activation_loading_horizon": value}


def _tensor_degree(value: int, values: Values) -> Mapped:
    if value > 1 and not values.get("use_smp_model"):
        return Refusal("without use_smp_model the adapter splits no layers; set use_smp_model=True, or 1")
    return {"parallel.tensor_parallel_degree": value}


def _expert_degree(value: int, values: Values) -> Mapped:
    if value > 1 and not values.get("use_smp_model"):
        return Refusal("without use_smp_model the adapter shares no experts; set use_smp_model=True, or 1")
    return {"parallel.expert_parallel_degree": value}


def _balancing(value: str, values: Values) -> Mapped:
    if not values.get("model.moe"):
        return NoEffect("model.moe is off")
    if not values.get("use_smp_model"):
        return NoEffect("without use_smp_model experts are the model's own")
    if value == "none":
        return {"router.balancing_loss": "none"}
    if value == "balanced":
        return Refusal("experts are chosen by what the router learns; use aux_loss")
    layers = values.get("model.num_hidden_layers") or values.get("model.num_layers")
    chosen = values.get("model.num_experts_per_tok")
    if not (layers and chosen):
        return Refusal(
            "the adapter adds up the losses of all layers, of choices divided by a token's experts; give "
            "model.num_hidden_layers and model.num_experts_per_tok, or use none and keys of router"
        )
    return {
        "router.balancing_loss": "layer",
        "router.balancing_coefficient": round(ROUTER_COEFFICIENT * layers / chosen, 12),
        "router.z_loss": round(ROUTER_COEFFICIENT * layers, 12),
    }


def _grad_clip(value: float, values: Values) -> Mapped:
    return {"optimizer.clip_norm": value or None}


def _final_rate(value: float, values: Values) -> Mapped:
    peak = values.get("model.optim.lr") or 0
    if not peak or not 0 <= value <= peak:
        return Refusal(f"it has to be at most model.optim.lr={peak}")
    return {"optimizer.final_learning_rate_ratio": round(value / peak, 12)}


def _decay_steps(value: int, values: Values) -> Mapped:
    steps = values.get("trainer.max_steps")
    if value == steps:
        return NoEffect("the schedule ends with the run, as it does here")
    return Refusal(f"the schedule ends with the run; use trainer.max_steps={steps} for both")


def _one_path(value: Any) -> str | Refusal:
    paths = [value] if isinstance(value, str) else list(value)
    if len(paths) != 1:
        return Refusal("one path is read; put the directories under one, or name them by a glob")
    return str(paths[0])


def _train_data(value: Any, values: Values) -> Mapped:
    path = _one_path(value)
    return path if isinstance(path, Refusal) else {"data.path": path, "data.format": "tokens"}


def _validation_data(value: Any, values: Values) -> Mapped:
    path = _one_path(value)
    return path if isinstance(path, Refusal) else {"evaluation.sets": {"validation": path}}


def _synthetic(value: bool, values: Values) -> Mapped:
    return {"data.format": "stdlib"} if value else NoEffect("the corpus is real")


def _dataset_type(value: str, values: Values) -> Mapped:
    return {"data.format": "stdlib"} if value == "synthetic" else NoEffect("files are read as what they hold")


def _adapter(key: str) -> Any:
    def maps(value: Any, values: Values) -> Mapped:
        return {key: value} if values.get("model.peft.peft_type") else NoEffect("model.peft.peft_type is null")

    return maps


def _adapter_kind(value: str, values: Values) -> Mapped:
    if values.get("use_smp_model"):
        return Refusal("adapters have use_smp_model=False, in the adapter too")
    return {"adapter.kind": "lora"} | ({"adapter.base": "nf4"} if value == "qlora_4bit" else {})


def _of_config(field: str) -> Any:
    def maps(value: Any, values: Values) -> Mapped:
        if values.get("model.model_type") not in BUILT_FROM_FIELDS:
            return NoEffect("the model's own config holds; the adapter builds no such model from the recipe's fields")
        return {CONFIG + field: value}

    return maps


def _of_a_pair(tokens: int, values: Values) -> int:
    """Return the tokens of a sequence: of preferences it holds both completions."""
    return 2 * tokens if values.get("model.dpo.enabled") else tokens


def _positions(value: int, values: Values) -> Mapped:
    mapped: Mapped = _of_config("max_position_embeddings")(_of_a_pair(value, values), values)
    return mapped


def _context_width(value: int, values: Values) -> Mapped:
    length = {"data.sequence_length": _of_a_pair(value, values)}
    positions = _positions(value, values)
    if values.get("model.max_position_embeddings") or isinstance(positions, NoEffect | Refusal):
        return length
    return {**length, **positions}


def _window(value: int, values: Values) -> Mapped:
    if values.get("model.use_sliding_window") is False:
        return NoEffect("model.use_sliding_window is off")
    return {f"{CONFIG}sliding_window": value}


def _rope_scaling(field: str) -> Any:
    def maps(value: Any, values: Values) -> Mapped:
        if values.get("model.rope_scaling.rope_type") is None:
            return NoEffect("model.rope_scaling.rope_type is null")
        return {f"{CONFIG}rope_parameters.{field}": value}

    return maps


def _model_type(value: str, values: Values) -> Mapped:
    if value not in MODEL_TYPES:
        return NoEffect("the model's own config says what it is")
    return {f"{CONFIG}model_type": MODEL_TYPES[value]}


def _secret(value: Any, values: Values) -> Mapped:
    return Refusal(SECRET)


def _weights(value: str, values: Values) -> Mapped:
    if not values.get("model.do_finetune"):
        return NoEffect("model.do_finetune is off, so weights are drawn")
    return {"model.path": value}


def _fine_tunes(value: bool, values: Values) -> Mapped:
    if not value:
        return NoEffect("weights are drawn")
    return NoEffect("weights come from model.hf_model_name_or_path")


def _pairs(value: bool, values: Values) -> Mapped:
    if not value:
        return NoEffect("it is off")
    if values.get("model.data.train_dir"):
        return Refusal("rows that are tokenized already are not read as preferences; leave model.data.train_dir null, "
                       "and give rows of text as --data.path")  # fmt: skip
    return {"training.objective": "dpo", "data.format": "preference", "data.truncation": True}


def _of_pairs(key: str) -> Any:
    def maps(value: float, values: Values) -> Mapped:
        if not values.get("model.dpo.enabled"):
            return NoEffect("model.dpo.enabled is off")
        return {key: value}

    return maps


def _smoothing(value: float, values: Values) -> Mapped:
    if not value and values.get("model.dpo.enabled"):
        return NoEffect("labels are taken as they are")
    mapped: Mapped = _of_pairs("training.dpo.label_smoothing")(value, values)
    return mapped


def _flag(reason: str, way_out: str) -> Any:
    return lambda value, values: Refusal(f"{reason}; {way_out}") if value else NoEffect("it is off")


# fmt: off
SMP_KEYS = (
    # run and cluster
    RecipeKey("run.name", str, "names the job where it is launched", launch_name, "launch.name"),
    RecipeKey("run.results_dir", str, "where the run writes, unless exp_manager.exp_dir says it", _results, "output"),
    renamed("run.time_limit", ANY, "launch.time_limit", "longest run"),
    without_effect("run.model_type", str, "says which kind of recipe this is"),
    renamed("trainer.num_nodes", int, f"{NODES}count", "hosts of the run", 1),
    RecipeKey("trainer.devices", ANY, "ranks of a node", _devices, f"{NODES}devices"),
    RecipeKey("trainer.accelerator", ("gpu", "auto"), "which device",
              lambda value, values: {"parallel.device": "cuda" if value == "gpu" else "auto"}, "parallel.device"),
    RecipeKey("trainer.precision", ANY, "dtype of forward and backward", _precision, "precision.compute", "bf16"),
    renamed("trainer.max_steps", int, "training.steps", "optimizer steps", 50),
    RecipeKey("trainer.log_every_n_steps", int, "steps between lines",
              lambda n, values: {"observe.log_every": n} if n else NoEffect("lines are written all the same"),
              "observe.log_every"),
    RecipeKey("trainer.val_check_interval", float, "steps between evaluations", _validation_interval,
              "training.evaluate_every"),
    RecipeKey("trainer.limit_val_batches", float, "batches of an evaluation", _validation_batches,
              "training.evaluate_batches"),
    without_effect("name", ANY, "names the recipe"),
    without_effect("use_smp_model", bool, "the axes have keys of their own; fp8, moe and tensor degrees ask for it",
                   True),
    RecipeKey("distributed_backend", ("nccl", "smddp"), "backend of collectives",
              lambda name, values: {"parallel.ddp_dist_backend": "nccl"} if name == "nccl"
              else NoEffect("SMDDP is Amazon's own; NCCL joins the ranks"), "parallel.ddp_dist_backend"),
    without_effect("log_perf_metrics", bool, "step time, throughput and MFU are always recorded"),
    # exp_manager
    renamed("exp_manager.exp_dir", str, "output", "where the run writes"),
    without_effect("exp_manager.name", str, "names the experiment of trackers that are on"),
    without_effect("exp_manager.explicit_log_dir", str, "logs lie in the output directory"),
    renamed("exp_manager.create_tensorboard_logger", bool, "observe.tensorboard", default=True),
    without_effect("exp_manager.summary_writer_kwargs.*", ANY, "event files lie in the output directory"),
    RecipeKey("exp_manager.create_mlflow_logger", bool, "the experiment is exp_manager.name",
              _tracker("observe.mlflow", "exp_manager.name"), "observe.mlflow"),
    without_effect("exp_manager.mlflow_logger_kwargs.*", ANY, "mlflow reads MLFLOW_TRACKING_URI"),
    RecipeKey("exp_manager.create_wandb_logger", bool, "the project is wandb_logger_kwargs.project",
              _tracker("observe.wandb", "exp_manager.wandb_logger_kwargs.project"), "observe.wandb"),
    without_effect("exp_manager.wandb_logger_kwargs.*", ANY, "its files lie in the output directory"),
    without_effect("exp_manager.create_checkpoint_callback", bool, "checkpoint_callback_params say when, if it is on"),
    RecipeKey("exp_manager.checkpoint_callback_params.save_top_k", int, "how many are kept; 0 writes none",
              _checkpoints_kept, "checkpoint.keep_last"),
    RecipeKey("exp_manager.checkpoint_callback_params.every_n_train_steps", int, "steps between checkpoints",
              _checkpoint_every, "checkpoint.every"),
    only("exp_manager.checkpoint_callback_params.monitor", "step", "the newest checkpoints are kept",
         "use step, or checkpoint.keep_best for the lowest validation loss"),
    only("exp_manager.checkpoint_callback_params.mode", "max", "the newest checkpoints are kept", "use max"),
    without_effect("exp_manager.checkpoint_callback_params.save_last", bool,
                   "the last step has a checkpoint wherever checkpoints are written"),
    renamed("exp_manager.checkpoint_dir", str, "checkpoint.directory", "directory or URL"),
    renamed("exp_manager.resume_from_checkpoint", str, "checkpoint.resume", "the checkpoint from which to go on"),
    RecipeKey("exp_manager.auto_checkpoint.enabled", bool, "the interval is a number here",
              _flag("no interval is measured", "use checkpoint_callback_params and checkpoint.resume auto")),
    without_effect("exp_manager.auto_checkpoint.*", ANY, "exp_manager.auto_checkpoint.enabled is off"),
    RecipeKey("exp_manager.export_full_model.every_n_train_steps", int, PLAIN_NAMES, _exports_every),
    without_effect("exp_manager.export_full_model.save_last", bool, "the model stands in OUTPUT/model at the end"),
    without_effect("exp_manager.export_full_model.final_export_dir", str,
                   "the model stands in OUTPUT/model at the end"),
    # model: batch, memory, sharding
    RecipeKey("model.model_type", str, "transformers' model_type", _model_type, "model.config: model_type"),
    RecipeKey("model.train_batch_size", int, "samples of a data rank, in one microbatch",
              lambda n, values: {"training.microbatch_size": n, "training.gradient_accumulation": 1},
              "training.microbatch_size", 2),
    without_effect("model.val_batch_size", int, "evaluation has the microbatches of training"),
    renamed("model.seed", int, "training.seed", "weights, order and dropout", 12345),
    RecipeKey("model.grad_clip", float, "0 switches it off", _grad_clip, "optimizer.clip_norm", 1.0),
    without_effect("model.log_reduced_training_loss", bool, "losses are always of all ranks"),
    without_effect("model.fsdp", bool, "parameters are always sharded with FSDP2"),
    RecipeKey("model.tensor_model_parallel_degree", int, MAPPED, _tensor_degree, "parallel.tensor_parallel_degree"),
    RecipeKey("model.expert_model_parallel_degree", int, MAPPED, _expert_degree, "parallel.expert_parallel_degree"),
    renamed("model.context_parallel_degree", int, "parallel.context_parallel_degree"),
    without_effect("model.moe", bool, "the model's config says what experts it has"),
    RecipeKey("model.activation_checkpointing", bool, "every block", _checkpointing, CHECKPOINTING, True),
    RecipeKey("model.activation_loading_horizon", int, MAPPED, _loading_horizon, "memory.activation_loading_horizon"),
    without_effect("model.delayed_param", bool, "models are always built on the meta device"),
    renamed("model.offload_activations", bool, "memory.offload_activations"),
    RecipeKey("model.sharding_strategy", ("no_shard", "shard_grad_op", "hybrid_shard", "_hybrid_shard_zero2",
                                          "full_shard"), "with shard_degree: over how many ranks; strategies that "
              "keep parameters between forward and backward: parallel.reshard_after_forward false", _sharding_strategy,
              SHARDS, "hybrid_shard"),
    RecipeKey("model.shard_degree", int, "SMP's hybrid_shard_degree, whatever the strategy", _shard_degree, SHARDS),
    without_effect("model.forward_prefetch", bool, BLOCKS),
    without_effect("model.backward_fetch_policy", str, BLOCKS),
    without_effect("model.auto_wrap_policy", str, "each block is a unit of FSDP2"),
    without_effect("model.limit_all_gathers", bool, "parallel.prefetch_depth bounds them"),
    without_effect("model.use_orig_param", bool, "FSDP2 always keeps a model's own parameters"),
    RecipeKey("model.fp8", bool, "with use_smp_model", _float8, "precision.fp8", True),
    without_effect("model.fp8_amax_history_len", int, "scales are taken from the numbers of each call alone"),
    without_effect("model.fp8_amax_compute_algo", str, "scales are taken from the numbers of each call"),
    without_effect("model.nvte_attn_backend", str, "attention is not Transformer Engine's; model.attention says whose"),
    RecipeKey("model.precision", ANY, "the same as trainer.precision", _precision, "precision.compute"),
    # model: architecture
    RecipeKey("model.max_context_width", int, "tokens of a sequence; positions of the config too, where those are not "
              "given", _context_width, "data.sequence_length", 2048),
    RecipeKey("model.max_position_embeddings", int, "of the config", _positions,
              "model.config: max_position_embeddings"),
    *(RecipeKey(f"model.{name}", kind, "of the config", _of_config(field), f"model.config: {field}")
      for name, kind, field in (
          ("num_hidden_layers", int, "num_hidden_layers"), ("num_layers", int, "num_hidden_layers"),
          ("hidden_size", int, "hidden_size"), ("num_attention_heads", int, "num_attention_heads"),
          ("num_heads", int, "num_attention_heads"), ("num_key_value_heads", int, "num_key_value_heads"),
          ("intermediate_size", int, "intermediate_size"), ("vocab_size", int, "vocab_size"),
          ("initializer_range", float, "initializer_range"), ("layernorm_epsilon", float, "rms_norm_eps"),
          ("rms_norm_eps", float, "rms_norm_eps"), ("tie_word_embeddings", bool, "tie_word_embeddings"),
          ("use_sliding_window", bool, "use_sliding_window"), ("max_window_layers", int, "max_window_layers"),
          ("num_experts_per_tok", int, "num_experts_per_tok"), ("num_local_experts", int, "num_local_experts"),
          ("rope_theta", float, "rope_parameters.rope_theta"))),
    *(RecipeKey(f"model.{name}", int, "of the config", _window, "model.config: sliding_window")
      for name in ("sliding_window", "mistral_sliding_window", "mixtral_sliding_window")),
    *(RecipeKey(f"model.rope_scaling.{name}", kind, "of the config, where rope_type is given", _rope_scaling(name),
                f"model.config: rope_parameters.{name}", default)
      for name, kind, default in ROPE_SCALING),
    without_effect("model.use_flash_attention", bool, "model.attention auto takes a fused kernel, torch's own first"),
    RecipeKey("model.multi_modal", bool, "models of text are trained",
              _flag("pictures are not read", "set false, or bring the model as model.factory")),
    RecipeKey("model.moe_load_balancing", ("sinkhorn", "balanced", "aux_loss", "none"),
              "the model's own router chooses; for sinkhorn and aux_loss a balancing loss over the step and a z-loss "
              f"keep use even, each the adapter's: {ROUTER_COEFFICIENT} times the sum of the layers' own", _balancing,
              "router.balancing_loss"),
    without_effect("model.global_token_shuffle", bool, "the balancing loss counts the tokens of all ranks"),
    without_effect("model.moe_all_to_all_dispatcher", bool, "tokens always travel by all-to-all"),
    # model: where weights come from, adapters
    RecipeKey("model.do_finetune", bool, "model.path is needed where it is on", _fine_tunes, default=True),
    RecipeKey("model.hf_model_name_or_path", str, "a directory; a name on the hub is taken as one", _weights,
              "model.path"),
    RecipeKey("model.hf_access_token", ANY, SECRET, _secret),
    RecipeKey("model.peft.peft_type", ("lora", "qlora_4bit"), "adapters", _adapter_kind, "adapter.kind"),
    *(RecipeKey(f"model.peft.{name}", kind, "peft's word", _adapter(key), key, default)
      for name, kind, key, default in (
          ("rank", int, "adapter.rank", 32), ("alpha", float, "adapter.alpha", 16.0),
          ("dropout", float, "adapter.dropout", 0.1), ("target_modules", ANY, "adapter.target_modules", None))),
    # optimizer
    RecipeKey("model.lr_decay_iters", int, "the schedule ends with the run", _decay_steps),
    only("model.optim.name", "adamw", "AdamW is the optimizer", "use adamw, or optimizer.name of the job"),
    renamed("model.optim.lr", float, "optimizer.learning_rate", "peak", 2e-4),
    renamed("model.optim.weight_decay", float, "optimizer.weight_decay", "of tensors of two or more dims", 0.01),
    RecipeKey("model.optim.betas", list, "AdamW's betas", lambda betas, values: {"optimizer.options": {"betas": betas}},
              "optimizer.options", [0.9, 0.98]),
    RecipeKey("model.optim.sched.name", ("CosineAnnealing",), "after warm-up",
              lambda name, values: {"optimizer.schedule": "cosine"}, "optimizer.schedule", "CosineAnnealing"),
    renamed("model.optim.sched.warmup_steps", int, "optimizer.warmup_steps", "linear warm-up", 500),
    only("model.optim.sched.constant_steps", 0, "the rate falls to the run's end", "use 0"),
    RecipeKey("model.optim.sched.min_lr", float, "as a share of model.optim.lr", _final_rate,
              "optimizer.final_learning_rate_ratio", 2e-5),
    # data
    RecipeKey("model.data.train_dir", ANY, "rows that are tokenized already; every token is trained on", _train_data,
              "data.path"),
    RecipeKey("model.data.val_dir", ANY, "evaluated beside the share of the corpus that is kept", _validation_data,
              "evaluation.sets"),
    RecipeKey("model.data.dataset_type", ("hf", "synthetic"), "synthetic: the standard library's sources",
              _dataset_type, "data.format"),
    RecipeKey("model.data.use_synthetic_data", bool, "the standard library's sources are read in their place",
              _synthetic, "data.format"),
    # profiling and the rest
    RecipeKey("model.nsys_profile.enabled", bool, PROFILER, _flag("Nsight is started from outside", PROFILER)),
    without_effect("model.nsys_profile.*", ANY, "model.nsys_profile.enabled is off"),
    RecipeKey("model.viztracer.enabled", bool, PROFILER, _flag("VizTracer is not used", PROFILER)),
    without_effect("model.viztracer.*", ANY, "model.viztracer.enabled is off"),
    without_effect("model.gpu_affinity.*", ANY, "each rank has a GPU of its own; numactl binds processors"),
    RecipeKey("model.dpo.enabled", bool, "rows of prompt, chosen and rejected, as text", _pairs, "training.objective"),
    RecipeKey("model.dpo.beta", float, MAPPED, _of_pairs("training.dpo.beta"), "training.dpo.beta"),
    RecipeKey("model.dpo.label_smoothing", float, MAPPED, _smoothing, "training.dpo.label_smoothing"),
)
# fmt: on
