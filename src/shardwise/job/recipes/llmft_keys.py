"""Keys of HyperPod's LLMFT recipes (`run.model_type: llm_finetuning_aws`: SFT, DPO, LoRA), each once.

Their names are those of Accelerate's FSDP plugin, peft, TRL and OpenRLHF, and mean what they mean there.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.job.public_models import find_mentioned
from shardwise.job.recipes.recipe_key import (
    ANY,
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

ARGS, MODEL, DATA = "training_config.training_args", "training_config.model_config", "training_config.datasets"
FSDP, STEPS, PEFT = f"{ARGS}.strategy.fsdp_config", f"{DATA}.preprocessor_cfgs", f"{MODEL}.peft_config"
CALLBACKS = "training.callbacks takes classes of shardwise.Callback"
NOT_DPO = "training_args.trainer_type is not dpo"
PAIRS = f"{STEPS}.TokenizeSampleDPO"
PAIR_LOSSES = ("sigmoid", "ipo")
SAMPLING = "nothing is sampled but the text at the end (observe.sample)"
SECRET = "no secret is kept in a job, and no hub is asked; download the model and name its directory in model.path"
ANEW = "the run starts anew"
METERING = "metering_callback.MeteringCallback"  # counts what Amazon bills


# ------------------------------------------------------------------------------------------------ what values become


def _devices(value: Any, values: Values) -> Mapped:
    return {f"{NODES}devices": int(value)}


def _is_dpo(values: Values) -> bool:
    return values.get(f"{ARGS}.trainer_type") == "dpo"


def _trainer_type(value: str, values: Values) -> Mapped:
    if value == "dpo":
        return {"training.objective": "dpo", "data.format": "preference"}
    if values.get(f"{ARGS}.pretrain_mode"):
        return NoEffect("training_args.pretrain_mode trains on every token of documents")
    return {"training.objective": "sft", "data.format": "chat"}


def _length(value: int, values: Values) -> Mapped:
    """Return the length of a sequence: of a row, which longer ones are cut to, or of both completions of a pair."""
    if values.get(f"{ARGS}.pretrain_mode"):
        return {"data.sequence_length": value}
    return {"data.sequence_length": 2 * value if _is_dpo(values) else value, "data.truncation": True}


def _of_pairs(key: str) -> Any:
    def maps(value: Any, values: Values) -> Mapped:
        return {key: value} if _is_dpo(values) else NoEffect(NOT_DPO)

    return maps


def _only_of_pairs(allowed: Any, says: str, way_out: str) -> Any:
    def maps(value: Any, values: Values) -> Mapped:
        if not _is_dpo(values):
            return NoEffect(NOT_DPO)
        return NoEffect(says) if value == allowed else Refusal(f"{says}; {way_out}")

    return maps


def _smoothing(value: float, values: Values) -> Mapped:
    if not value:
        return NoEffect("labels are taken as they are")
    return _of_pairs("training.dpo.label_smoothing")(value, values)


def _part_of_pair(value: int, values: Values) -> Mapped:
    names = (f"{PAIRS}.max_prompt_length", f"{PAIRS}.max_completion_length")
    whole, longest = sum(values.get(name) or 0 for name in names), values.get(f"{ARGS}.max_len")
    if longest is None or whole <= longest:
        return NoEffect("training_args.max_len bounds a completion with its prompt, which is cut to it")
    return Refusal(f"prompt and completion are cut together; use training_args.max_len={whole}")


def _pretrains(value: bool, values: Values) -> Mapped:
    return {"training.objective": "pretraining"} if value else NoEffect("it is off")


def _packs(value: bool, values: Values) -> Mapped:
    if values.get(f"{ARGS}.pretrain_mode"):
        return NoEffect("documents are always packed")
    return {"data.packing": value}


def _clips(value: float, values: Values) -> Mapped:
    if values.get(f"{ARGS}.gradient_clipping") is False:
        return NoEffect("training_args.gradient_clipping is off")
    return {"optimizer.clip_norm": value or None}


def _clipping(value: bool, values: Values) -> Mapped:
    return NoEffect("max_norm says by how much") if value else {"optimizer.clip_norm": None}


def _decay(value: float, values: Values) -> Mapped:
    if not value and f"{ARGS}.weight_decay" in values:
        return NoEffect("weight_decay says it")
    return {"optimizer.weight_decay": value}


def _weight_decay(value: float, values: Values) -> Mapped:
    if not value and values.get(f"{ARGS}.l2"):
        return NoEffect("training_args.l2 says it")
    return {"optimizer.weight_decay": value}


def _schedule(name: str, values: Values) -> Mapped:
    if name == "constant":
        return {"optimizer.schedule": name, "optimizer.warmup_steps": 0}
    if name == "constant_with_warmup":
        return {"optimizer.schedule": "constant"}
    return {"optimizer.schedule": name, "optimizer.final_learning_rate_ratio": 0.0}


def _warms_up(value: float, values: Values) -> Mapped:
    if values.get(f"{ARGS}.lr_scheduler") == "constant":
        return NoEffect("transformers' constant schedule has no warm-up; constant_with_warmup has")
    return {"optimizer.warmup_ratio": value}


def _checkpointing(value: bool, values: Values) -> Mapped:
    return {"memory.activation_checkpointing": "full" if value else "none"}


def _fsdp_checkpointing(value: bool, values: Values) -> Mapped:
    return _checkpointing(True, values) if value else NoEffect("training_args.gradient_checkpointing says it")


def _sharding(value: str, values: Values) -> Mapped:
    strategy = value.upper()
    degrees: dict[str, dict[str, Any]] = {
        "FULL_SHARD": {},
        "HYBRID_SHARD": {SHARDS: values.get("trainer.devices") or NODE},
        "SHARD_GRAD_OP": {"parallel.reshard_after_forward": False},
        "NO_SHARD": {SHARDS: 1},
    }
    if strategy not in degrees:
        return Refusal(f"use one of {', '.join(degrees)}")
    return degrees[strategy] or NoEffect("all data ranks share parameters, as a job has it")


def _context(method: str) -> Any:
    def maps(value: int, values: Values) -> Mapped:
        if value <= 1:
            return NoEffect("sequences are whole")
        return {"parallel.context_parallel_degree": value, "parallel.context_parallel_method": method}

    return maps


def _attention(value: str, values: Values) -> Mapped:
    if value == "eager":
        return {"model.attention": value}
    return NoEffect("model.attention auto takes a fused kernel, sdpa among them")


def _starts_anew(values: Values) -> bool:
    is_off = values.get(f"{ARGS}.load_checkpoint") is False
    return is_off or bool(values.get("training_config.force_rerun"))


def _resumes_at(value: str, values: Values) -> Mapped:
    return NoEffect(ANEW) if _starts_anew(values) else {"checkpoint.resume": value}


def _resumes(value: bool, values: Values) -> Mapped:
    if not value or _starts_anew(values):
        return NoEffect(ANEW)
    if values.get(f"{ARGS}.resume_checkpoint_path"):
        return NoEffect("training_args.resume_checkpoint_path says from where")
    return {"checkpoint.resume": "auto"}


def _evaluates(value: int, values: Values) -> Mapped:
    return {"training.evaluate_every": value} if value > 0 else NoEffect("evaluation is at the run's end")


def _saves(value: int, values: Values) -> Mapped:
    return {"checkpoint.every": value} if value > 0 else NoEffect("the model stands in OUTPUT/model at the end")


def _keeps(value: int, values: Values) -> Mapped:
    if (values.get(f"{ARGS}.save_steps") or 0) <= 0:
        return NoEffect("training_args.save_steps writes none")
    return {"checkpoint.keep_last": value}


def _limit(value: float, values: Values) -> Mapped:
    if value < 1:
        return Refusal("use at least 1, or leave it out")
    smallest = min(number for key in LIMITS if (number := values.get(key)))
    return {"data.max_documents": int(smallest)}


def _validation_share(value: float, values: Values) -> Mapped:
    if not 0 < value < 1:
        return Refusal("some rows have to be kept for validation; use 0.95, say")
    return {"data.validation_fraction": round(1 - value, 12)}


def _split_seed(value: int, values: Values) -> Mapped:
    if value == values.get(f"{ARGS}.seed"):
        return NoEffect("training.seed draws the split too")
    return Refusal(f"training.seed draws the split; use training_args.seed={value}, or leave it out")


def _below_base(path: str, values: Values) -> str:
    base = values.get(f"{DATA}.data_dir")
    return f"{base.rstrip('/')}/{path}" if base and not path.startswith("/") else path


def _data_path(value: str, values: Values) -> Mapped:
    return {"data.path": _below_base(value, values)}


def _validation_data(value: str, values: Values) -> Mapped:
    return {"evaluation.sets": {"validation": _below_base(value, values)}}


def _base_directory(value: str, values: Values) -> Mapped:
    if values.get(f"{DATA}.train_data.file_path"):
        return NoEffect("train_data.file_path is below it")
    return {"data.path": value}


def _prompt_labels(value: bool, values: Values) -> Mapped:
    return NoEffect("data.train_on auto trains on answers alone") if value else {"data.train_on": "all"}


def _tracked_by(value: str, values: Values) -> Mapped:
    return {"observe.mlflow": str(values.get("run.name") or "shardwise")}


def _logs(value: Any, values: Values) -> Mapped:
    return {"observe.tensorboard": bool(value)}


def _adapter_kind(value: str, values: Values) -> Mapped:
    if value not in ("lora", "qlora"):
        return Refusal(f"{value} is not built; use lora or qlora")
    kind = "dora" if values.get(f"{PEFT}.use_dora") else "lora"
    return {"adapter.kind": kind} | ({"adapter.base": "nf4"} if value == "qlora" else {})


def _targets(value: Any, values: Values) -> Mapped:
    if values.get(f"{PEFT}.exclude_modules"):
        return (
            NoEffect("exclude_modules says which")
            if value == "all-linear"
            else Refusal("use all-linear, or leave exclude_modules out")
        )
    return {"adapter.target_modules": value}


def _stacks(value: list[str], values: Values) -> Mapped:
    model = find_mentioned(str(values.get(f"{MODEL}.model_name_or_path") or values.get("run.name")))
    if model is not None and model.config["model_type"] == "gpt_oss":
        return NoEffect("the stacks of gpt-oss are [experts, inputs, outputs], and have no adapters: they stay frozen")
    return {"adapter.target_parameters": value}


def _excluded(value: list[str], values: Values) -> Mapped:
    """Return the pattern of the names of all linear layers but `value`, by names or ends of names as in peft."""
    names = "|".join(rf"(?:.*\.)?{re.escape(name)}" for name in value)
    return {"adapter.target_modules": f"(?!(?:{names})$).*"} if value else NoEffect("it names none")


def _callbacks(value: list[Any], values: Values) -> Mapped:
    targets = [step.get("_target_", step) if isinstance(step, dict) else step for step in value]
    own = [str(target) for target in targets if target != METERING]
    if own:
        return Refusal(f"{own[0]} is no callback of a job; {CALLBACKS}")
    return NoEffect("Amazon's metering is left out")


def _elastic(value: bool, values: Values) -> Mapped:
    """Return the numbers of nodes; a run whose numbers would depend on them is refused."""
    if not value:
        return NoEffect("it is off")
    return {
        "launch.least_nodes": values.get("elastic_policy.min_nodes", 1),
        "launch.most_nodes": values.get("elastic_policy.max_nodes", 16),
    }


def _where_elastic(key: str) -> Any:
    """Return a mapping to a key of the launch, where the number of nodes changes."""
    return lambda value, values: {key: value} if values.get(ELASTIC) else NoEffect(OFF)


def _unless_scaled(argument: str, key: str) -> Any:
    """Return a mapping to `key`, where scale_config does not say the value for a run whose nodes come and go."""

    def maps(value: Any, values: Values) -> Mapped:
        scaled = any(name.startswith("scale_config.") and name.endswith(f".{argument}") for name in values)
        return NoEffect(f"scale_config has it, and {ELASTIC} is on") if scaled and values.get(ELASTIC) else {key: value}

    return maps


def _scaled(value: Any, values: Values) -> Mapped:
    return NoEffect("batch and microbatch stay, whatever the number of nodes" if values.get(ELASTIC) else OFF)


def _router(value: float, values: Values) -> Mapped:
    if not value:
        return NoEffect("routers have no loss")
    return {"router.balancing_loss": "global", "router.balancing_coefficient": value}


def _secret(value: Any, values: Values) -> Mapped:
    return Refusal(SECRET)


def _refused(reason: str) -> Any:
    return lambda value, values: Refusal(reason) if value else NoEffect("it is off")


ELASTIC = "elastic_policy.is_elastic"
SCALED = "with is_elastic; the same for all numbers of nodes"
OFF = f"{ELASTIC} is off"
SCALE = "scale_config.*.training_config.training_args"  # by number of nodes
LIMITS = (f"{ARGS}.max_samples", f"{DATA}.train_data.limit")

# fmt: off
LLMFT_KEYS = (
    # the recipe, where it runs
    without_effect("display_name", str, "names the recipe"),
    without_effect("version", str, "of the recipe"),
    renamed("instance_types", list, f"{NODES}instance_types", "the first is taken, unless another is asked for"),
    RecipeKey("run.name", str, "names the job where it is launched", launch_name, "launch.name"),
    without_effect("run.model_type", str, "says which kind of recipe this is"),
    renamed("run.results_dir", str, "output", "where the run writes"),
    RecipeKey("run.hf_access_token", ANY, SECRET, _secret),
    renamed("trainer.num_nodes", int, f"{NODES}count", "hosts of the run", 1),
    RecipeKey("trainer.devices", int, "ranks of a node", _devices, f"{NODES}devices", NODE),
    RecipeKey(ELASTIC, bool, "nodes come and go, on targets that can have it so", _elastic, "launch.least_nodes"),
    RecipeKey("elastic_policy.min_nodes", int, "with is_elastic", _where_elastic("launch.least_nodes"),
              "launch.least_nodes"),
    RecipeKey("elastic_policy.max_nodes", int, "with is_elastic", _where_elastic("launch.most_nodes"),
              "launch.most_nodes"),
    RecipeKey("elastic_policy.graceful_shutdown_timeout", int, "with is_elastic", _where_elastic("launch.stop_seconds"),
              "launch.stop_seconds"),
    without_effect("elastic_policy.use_graceful_shutdown", bool, "a run that is told to stop always saves its state"),
    without_effect("elastic_policy.scaling_timeout", ANY, "the operator's own time stands"),
    RecipeKey(f"{SCALE}.train_batch_size", int, SCALED, _where_elastic("training.sequences_per_step"),
              "training.sequences_per_step"),
    RecipeKey(f"{SCALE}.learning_rate", float, SCALED, _where_elastic("optimizer.learning_rate"),
              "optimizer.learning_rate"),
    RecipeKey("scale_config.*", ANY, "batch and microbatch stay, whatever the number of nodes", _scaled),
    # training
    RecipeKey(f"{ARGS}.trainer_type", ("sft", "dpo"), "sft: rows of chat, unless data.format says another; dpo: pairs",
              _trainer_type, "training.objective"),
    RecipeKey(f"{ARGS}.pretrain_mode", bool, "documents, every token of which is trained on", _pretrains,
              "training.objective"),
    RecipeKey(f"{ARGS}.train_batch_size", int, "samples of a step, of all ranks",
              _unless_scaled("train_batch_size", "training.sequences_per_step"), "training.sequences_per_step"),
    renamed(f"{ARGS}.micro_train_batch_size", int, "training.microbatch_size", "samples of one forward"),
    renamed(f"{ARGS}.max_epochs", int, "training.epochs"),
    RecipeKey(f"{ARGS}.max_len", int, "tokens of a row, or of a completion with its prompt; what is longer is cut",
              _length, "data.sequence_length"),
    RecipeKey(f"{ARGS}.max_samples", float, "with train_data.limit: the smaller", _limit, "data.max_documents"),
    renamed(f"{ARGS}.seed", int, "training.seed", "weights, order, split and dropout"),
    RecipeKey(f"{ARGS}.packing_samples", bool, MAPPED, _packs, "data.packing"),
    RecipeKey(f"{ARGS}.learning_rate", float, "peak", _unless_scaled("learning_rate", "optimizer.learning_rate"),
              "optimizer.learning_rate"),
    RecipeKey(f"{ARGS}.lr_scheduler", ("cosine", "linear", "constant", "constant_with_warmup"),
              "transformers' schedules, which end at 0", _schedule, "optimizer.schedule"),
    RecipeKey(f"{ARGS}.lr_warmup_ratio", float, "share of the steps; lr_scheduler=constant has none", _warms_up,
              "optimizer.warmup_ratio"),
    RecipeKey(f"{ARGS}.adam_betas", list, "AdamW's betas",
              lambda betas, values: {"optimizer.options": {"betas": betas}}, "optimizer.options"),
    RecipeKey(f"{ARGS}.weight_decay", float, "of tensors of two or more dims", _weight_decay, "optimizer.weight_decay"),
    RecipeKey(f"{ARGS}.l2", float, "weight decay by another name", _decay, "optimizer.weight_decay"),
    RecipeKey(f"{ARGS}.max_norm", float, "0 switches it off", _clips, "optimizer.clip_norm"),
    RecipeKey(f"{ARGS}.gradient_clipping_threshold", float, "the same as max_norm", _clips, "optimizer.clip_norm"),
    RecipeKey(f"{ARGS}.gradient_clipping", bool, "off: no clipping", _clipping, "optimizer.clip_norm"),
    RecipeKey(f"{ARGS}.aux_loss_coef", float, "of the routers of experts", _router, "router.balancing_coefficient"),
    without_effect(f"{ARGS}.grad_accum_dtype", ANY, "gradients are always summed in fp32"),
    # memory and layout
    RecipeKey(f"{ARGS}.gradient_checkpointing", bool, "every block", _checkpointing, "memory.activation_checkpointing"),
    without_effect(f"{ARGS}.gradient_checkpointing_use_reentrant", bool, "no checkpoint is reentrant"),
    RecipeKey(f"{FSDP}.activation_checkpointing", bool, "every block", _fsdp_checkpointing,
              "memory.activation_checkpointing"),
    RecipeKey(f"{FSDP}.sharding_strategy", str, "HYBRID_SHARD: within each node", _sharding, SHARDS),
    renamed(f"{FSDP}.cpu_offload", bool, "memory.offload_parameters"),
    without_effect(f"{FSDP}.cpu_ram_efficient_loading", bool, "each rank reads its own slices of weights"),
    without_effect(f"{FSDP}.sync_module_states", bool, "each rank reads its own slices of weights"),
    without_effect(f"{FSDP}.auto_wrap_policy", str, "each block is a unit of FSDP2"),
    without_effect(f"{FSDP}.backward_prefetch", str, "parallel.prefetch_depth says how many blocks ahead"),
    without_effect(f"{FSDP}.forward_prefetch", bool, "parallel.prefetch_depth says how many blocks ahead"),
    without_effect(f"{FSDP}.state_dict_type", str, "a checkpoint has one form, which every layout loads"),
    without_effect(f"{FSDP}.use_orig_params", bool, "FSDP2 always keeps a model's own parameters"),
    RecipeKey(f"{ARGS}.ring_attn_size", int, "context ranks", _context("ring"), "parallel.context_parallel_degree"),
    without_effect(f"{ARGS}.ring_head_stride", int, "a ring passes all heads at once"),
    RecipeKey(f"{ARGS}.ulysses_sequence_parallel_size", int, "context ranks", _context("ulysses"),
              "parallel.context_parallel_degree"),
    # checkpoints, evaluation, records
    renamed(f"{ARGS}.training_dir", str, "checkpoint.directory", "where checkpoints lie"),
    without_effect(f"{ARGS}.override_training_dir", bool, "an output of another job is never overwritten"),
    RecipeKey(f"{ARGS}.load_checkpoint", bool, "goes on from the newest", _resumes, "checkpoint.resume"),
    RecipeKey(f"{ARGS}.resume_checkpoint_path", str, "the checkpoint from which to go on", _resumes_at,
              "checkpoint.resume"),
    RecipeKey("training_config.force_rerun", bool, "starts anew",
              lambda value, values: NoEffect("no checkpoint is loaded" if value else "it is off")),
    RecipeKey(f"{ARGS}.save_steps", int, "steps between checkpoints", _saves, "checkpoint.every"),
    RecipeKey(f"{ARGS}.max_ckpt_num", int, "how many are kept", _keeps, "checkpoint.keep_last"),
    without_effect(f"{ARGS}.max_ckpt_mem", float, "checkpoint.keep_last bounds what is kept"),
    without_effect(f"{ARGS}.disable_ds_ckpt", bool, "checkpoints are not DeepSpeed's"),
    without_effect(f"{ARGS}.save_hf_ckpt", bool, "the model stands in OUTPUT/model at the end"),
    without_effect(f"{ARGS}.merge_weights", bool, "shardwise export --merge writes the merged model"),
    without_effect(f"{MODEL}.model_save_name", str, "the model stands in OUTPUT/model at the end"),
    RecipeKey(f"{ARGS}.eval_steps", int, "steps between evaluations", _evaluates, "training.evaluate_every"),
    renamed(f"{ARGS}.logging_steps", int, "observe.log_every", "steps between lines"),
    without_effect(f"{ARGS}.log_gpu_memory", bool, "memory is always recorded"),
    without_effect(f"{ARGS}.log_run_time", bool, "step times are always recorded"),
    RecipeKey(f"{ARGS}.use_tensorboard", ANY, "null: off", _logs, "observe.tensorboard", takes_null=True),
    RecipeKey(f"{ARGS}.use_wandb", ANY, "null: off",
              _refused("it may hold a secret; leave it null, and set observe.wandb=PROJECT and WANDB_API_KEY")),
    RecipeKey("training_config.mlflow.tracking_uri", str, "the experiment is run.name; set MLFLOW_TRACKING_URI to it",
              _tracked_by, "observe.mlflow"),
    RecipeKey("training_config.mlflow.run_id", str, "runs are new ones",
              _refused("a run of mlflow cannot be taken up again; leave it empty")),
    RecipeKey(f"{ARGS}.trainer_callbacks", list, CALLBACKS, _callbacks),
    # model and adapters
    RecipeKey(f"{MODEL}.model_name_or_path", str, "a directory; a name on the hub is taken as one",
              lambda value, values: {"model.path": value}, "model.path"),
    RecipeKey(f"{MODEL}.attn_implementation", str, "eager; all others: auto", _attention,
              "model.attention"),
    without_effect(f"{MODEL}.apply_chat_template", bool, "rows of chat always go through the chat template"),
    without_effect(f"{MODEL}.chat_template_key", str, "the tokenizer's own template is used, or data.chat_template"),
    without_effect(f"{MODEL}.device_map", ANY, "the layout says where parameters lie"),
    RecipeKey(f"{MODEL}.multimodal", bool, "models of text are trained",
              _refused("pictures are not read; set false, or bring the model as model.factory")),
    without_effect(f"{ARGS}.disable_fast_tokenizer", bool, "tokenizers are always the fast ones"),
    without_effect(f"{MODEL}.generation_cfg.*", ANY, SAMPLING),
    renamed(f"{MODEL}.lora_checkpoint_file_path", str, "adapter.path", "the adapter from which to go on"),
    without_effect(PEFT, ANY, "all parameters are trained"),
    RecipeKey(f"{PEFT}.peft_type", str, "adapters", _adapter_kind, "adapter.kind"),
    renamed(f"{PEFT}.r", int, "adapter.rank", "rank of the adapters"),
    renamed(f"{PEFT}.lora_alpha", float, "adapter.alpha", MAPPED),
    renamed(f"{PEFT}.lora_dropout", float, "adapter.dropout", MAPPED),
    RecipeKey(f"{PEFT}.target_modules", ANY, MAPPED, _targets, "adapter.target_modules"),
    RecipeKey(f"{PEFT}.exclude_modules", list, "the pattern of all other linear layers", _excluded,
              "adapter.target_modules"),
    RecipeKey(f"{PEFT}.target_parameters", list, "stacks of experts; those of gpt-oss stay frozen", _stacks,
              "adapter.target_parameters"),
    only(f"{PEFT}.bias", "none", "biases stay frozen", "use none"),
    only(f"{PEFT}.task_type", "CAUSAL_LM", "next tokens are learned", "use CAUSAL_LM"),
    RecipeKey(f"{PEFT}.use_dora", bool, "rows of the sum have a trained length",
              lambda value, values: {"adapter.kind": "dora"} if value else NoEffect("it is off"), "adapter.kind"),
    # data
    RecipeKey(f"{DATA}.train_data.file_path", str, MAPPED, _data_path, "data.path"),
    RecipeKey(f"{DATA}.data_dir", str, "the directory of train_data.file_path", _base_directory, "data.path"),
    without_effect(f"{DATA}.train_data.name", str, "names the corpus"),
    RecipeKey(f"{DATA}.train_data.limit", float, "with max_samples: the smaller", _limit, "data.max_documents"),
    RecipeKey(f"{DATA}.val_data.file_path", str, "evaluated beside the share of the corpus that is kept",
              _validation_data, "evaluation.sets"),
    without_effect(f"{DATA}.val_data.*", ANY, "all of a validation set is read"),
    RecipeKey(f"{DATA}.train_val_split_ratio", float, "1 minus it", _validation_share, "data.validation_fraction"),
    RecipeKey(f"{DATA}.train_val_split_seed", int, "training.seed draws the split", _split_seed),
    without_effect(f"{DATA}.save_intermediate_processing_steps", bool, "tokens are cached, steps before them are not"),
    without_effect(f"{STEPS}.TrainingSFTSampleConverter.*", ANY, "rows are found by their columns"),
    RecipeKey(f"{STEPS}.Seq2SeqTokensProcessor.ignore_prompt_labels", bool, "false: every token is trained on",
              _prompt_labels, "data.train_on"),
    without_effect(f"{STEPS}.Seq2SeqTokensProcessor.*", ANY, "the tokenizer's template is used, or data.chat_template"),
    without_effect(f"{STEPS}.DropColumns.*", ANY, "columns that are not read are left out"),
    without_effect(f"{STEPS}.SelectColumns.*", ANY, "columns that are not read are left out"),
    # preferences
    RecipeKey(f"{ARGS}.beta", float, MAPPED, _of_pairs("training.dpo.beta"), "training.dpo.beta"),
    RecipeKey(f"{ARGS}.loss_type", PAIR_LOSSES, MAPPED, _of_pairs("training.dpo.loss"), "training.dpo.loss"),
    RecipeKey(f"{ARGS}.label_smoothing", float, MAPPED, _smoothing, "training.dpo.label_smoothing"),
    RecipeKey(f"{ARGS}.nll_loss_coef", float, "nothing is added to the loss of preferences",
              _only_of_pairs(0, "nothing is added to the loss of preferences", "use 0")),
    RecipeKey(f"{ARGS}.reference_free", bool, "there is always a reference",
              _only_of_pairs(False, "there is always a reference", "use false")),
    without_effect(f"{ARGS}.ref_offload", bool, "the reference is sharded as the model is, or is the model without "
                   "its adapters"),
    without_effect(f"{ARGS}.sampling_method", str, "pairs are read, none is sampled"),
    without_effect(f"{ARGS}.M", int, "pairs are read, none is sampled"),
    without_effect(f"{STEPS}.TrainingPOSampleConverter.*", ANY, "columns are prompt, chosen and rejected"),
    without_effect(f"{STEPS}.ApplyChatTemplate.*", ANY, "rows of messages always go through the chat template"),
    RecipeKey(f"{PAIRS}.max_prompt_length", int, "with max_completion_length: at most max_len", _part_of_pair),
    RecipeKey(f"{PAIRS}.max_completion_length", int, "with max_prompt_length: at most max_len", _part_of_pair),
    without_effect(f"{PAIRS}.*", ANY, "the chat template has the special tokens"),
)
# fmt: on
