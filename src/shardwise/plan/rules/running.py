"""Rows about how the training goes: precision, optimizer, batch, checkpoints."""

from __future__ import annotations

from shardwise.job.optimizers import ELEMENTWISE, UNUSABLE, classes, complaint, decays, options, unknown_options
from shardwise.job.schema import LossScaleSection
from shardwise.model.attention_kernels import installed
from shardwise.model.float8 import summary
from shardwise.plan.draft import Draft, changed
from shardwise.plan.rules.rule import Rule, idle, spelling
from shardwise.words import one_of

SCALE = "precision.loss_scale"
DYNAMIC_SCALE = tuple(f"{SCALE}.{name}" for name in LossScaleSection.model_fields if name != "static")

FP8 = "precision.fp8"
FP8_COMPUTE = {"torchao": ("bf16",), "transformer_engine": ("bf16",), "emulate": ("bf16", "fp32")}
# What `shardwise run` puts in the place of Transformer Engine has its name, and not that of its compiled part.
FP8_PACKAGES = {"torchao": "torchao", "transformer_engine": "transformer_engine_torch"}
FP8_INSTALL = {
    "torchao": "pip install 'shardwise[fp8]'",
    "transformer_engine": "pip install 'transformer_engine[pytorch]', which compiles against the installed torch",
}


def _no_float8(d: Draft) -> bool:
    return d.precision.fp8 in FP8_PACKAGES and (d.world.device_type != "cuda" or d.world.float8 is False)


def _float8_device(d: Draft) -> str:
    device = d.world.accelerator or d.world.device_type
    return f"{device} has no products of float8; GPUs have them from Ada, Hopper and CDNA 3 on"


# fmt: off
PRECISION_RULES = (
    Rule("loss-scale", ("precision.compute", SCALE), "only fp16 scales its loss",
         lambda d: d.compute != "fp16" and changed(d.job, SCALE),
         fix="use precision.compute fp16, or leave precision.loss_scale out",
         because=lambda d: f"only fp16 scales its loss, and this job computes in {d.compute}"),
    Rule("static-loss-scale", (SCALE,), "a static scale never changes, so the keys of the dynamic one do nothing",
         lambda d: d.precision.loss_scale.static is not None and changed(d.job, *DYNAMIC_SCALE),
         fix="leave static out, or the other keys"),
    Rule("loss-scale-range", (f"{SCALE}.init_scale", f"{SCALE}.min_scale"), "the first scale is not below the smallest",
         lambda d: d.precision.loss_scale.init_scale < d.precision.loss_scale.min_scale,
         fix="raise init_scale or lower min_scale",
         use=lambda d: f"use a min_scale of at most {d.precision.loss_scale.init_scale}"),
    *(idle(f"fp8-{key}", f"precision.fp8_{key}", "nothing is in float8", lambda d: d.precision.fp8 == "none",
           "set precision.fp8, or leave it out") for key in ("scaling", "layers", "all_gather")),
    Rule("fp8-transformer-engine", (FP8, "precision.fp8_scaling"), "Transformer Engine has one scale a tensor here",
         lambda d: d.precision.fp8 == "transformer_engine" and d.precision.fp8_scaling != "tensorwise",
         fix="use precision.fp8_scaling tensorwise, or precision.fp8 torchao"),
    Rule("fp8-transformer-engine-compile", (FP8, "model.compile"), "the compiler cannot see into Transformer Engine",
         lambda d: d.precision.fp8 == "transformer_engine" and d.model.compile,
         fix="use precision.fp8 torchao, or model.compile false"),
    Rule("fp8-gathered", ("precision.fp8_all_gather", "parallel.sharded_data_parallel_degree"),
         "only sharded parameters are gathered",
         lambda d: d.precision.fp8 != "none" and d.precision.fp8_all_gather and d.sharded == 1,
         fix="leave fp8_all_gather out, or shard over more ranks"),
    Rule("fp8-device", (FP8, "parallel.device"), "products of float8 need a device that has them", _no_float8,
         fix="use emulate, which shows the numbers on any device, or none",
         because=_float8_device),
    Rule("fp8-installed", (FP8,), "what multiplies has to be installed",
         lambda d: d.precision.fp8 in FP8_PACKAGES and not installed(FP8_PACKAGES[d.precision.fp8]),
         fix="pip install 'shardwise[fp8]' for torchao, or use emulate",
         because=lambda d: f"the package {FP8_PACKAGES[d.precision.fp8]} is not installed",
         use=lambda d: f"{FP8_INSTALL[d.precision.fp8]}, or use emulate"),
    Rule("fp8-compute", (FP8, "precision.compute"), "what is not in float8 is in bf16, or in emulation in fp32",
         lambda d: d.precision.fp8 != "none" and d.compute not in FP8_COMPUTE[d.precision.fp8],
         fix="use precision.compute bf16",
         because=lambda d: f"this job computes in {d.compute}, and {d.precision.fp8} takes "
         f"{one_of(FP8_COMPUTE[d.precision.fp8])}",
         use=lambda d: f"use precision.compute {one_of(FP8_COMPUTE[d.precision.fp8])}"),
    Rule("fp8-gains", (FP8, "precision.fp8_scaling", "precision.fp8_layers"), "some linear layer has to be in float8",
         lambda d: d.precision.fp8 != "none" and all(d.float8_left.values()),
         fix="use precision.fp8 none, or fp8_layers all",
         because=lambda d: summary(d.float8_left)),
)
# fmt: on

OWN_KEYS = {"lr": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay"}


def _option_fix(d: Draft) -> str:
    option = unknown_options(d.optimizer)[0]
    if option in OWN_KEYS:
        return f"set {OWN_KEYS[option]} instead"
    return spelling(option, options(d.optimizer.name))


def _bad_range(d: Draft) -> bool:
    steps = d.job.observe.profile
    return steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= d.training.steps)


def _no_sample(d: Draft) -> bool:
    return not d.job.observe.sample or d.model.task != "causal_lm" or d.model.factory is not None


def _pieces(d: Draft) -> int:
    """Ranks over which a parameter is cut."""
    return d.sharded * d.parallel.tensor_parallel_degree


# fmt: off
OPTIMIZER_RULES = (
    Rule("optimizer-name", ("optimizer.name",), "has to be a class in torch.optim",
         lambda d: d.optimizer.name not in classes(),
         fix="use AdamW or another class of torch.optim",
         use=lambda d: spelling(d.optimizer.name, list(classes()))),
    Rule("optimizer-usable", ("optimizer.name",), "has to take dense gradients of any shape, without a closure",
         lambda d: d.optimizer.name in UNUSABLE,
         fix="use AdamW",
         because=lambda d: UNUSABLE[d.optimizer.name]),
    Rule("optimizer-elementwise", ("optimizer.name",), "has to be elementwise when its state is sharded",
         lambda d: _pieces(d) > 1 and d.optimizer.name not in ELEMENTWISE,
         fix="use an elementwise optimizer, or degree 1 for sharding and tensors, without shard_optimizer_state",
         because=lambda d: f"needs whole tensors, and they are cut over {_pieces(d)} ranks",
         use=lambda d: "use degree 1 for parallel.sharded_data_parallel_degree and tensor_parallel_degree, or "
         f"{one_of(ELEMENTWISE)}"),
    Rule("optimizer-options", ("optimizer.name", "optimizer.options"), "options are arguments of the class",
         lambda d: unknown_options(d.optimizer),
         fix="leave the option out",
         because=lambda d: f"no option {unknown_options(d.optimizer)[0]!r}",
         use=_option_fix),
    Rule("optimizer-values", ("optimizer.options",), "the class has to accept the values of its options",
         lambda d: complaint(d.optimizer),
         fix="use a value that the class takes",
         because=lambda d: complaint(d.optimizer)),
    idle("weight-decay", "optimizer.weight_decay", "the class has no weight decay",
         lambda d: d.optimizer.weight_decay and not decays(d.optimizer.name), "leave it out, or use AdamW"),
    Rule("warmup", ("optimizer.warmup_steps", "training.steps"), "warm-up has to be shorter than the training",
         lambda d: d.optimizer.warmup_steps >= d.training.steps,
         fix="use fewer warmup_steps",
         use=lambda d: f"use at most {d.training.steps - 1} warmup_steps"),
    idle("final-learning-rate", "optimizer.final_learning_rate_ratio", "a constant schedule stays at the peak",
          lambda d: d.optimizer.schedule == "constant", "use schedule linear or cosine, or leave it out"),
    Rule("profile", ("observe.profile", "training.steps"), "profile is [first, last], counted from 1 to training.steps",
         _bad_range,
         fix="use two steps from 1 to training.steps",
         use=lambda d: f"use e.g. [{max(1, d.training.steps - 1)}, {d.training.steps}]"),
    *(idle(f"sample-{key}", f"observe.sample_{key}", "no sample is generated: only a causal language model of Hugging "
           "Face can, where observe.sample is on", _no_sample, "leave it out") for key in ("prompt", "tokens")),
)
# fmt: on


def _token_fix(d: Draft) -> str:
    length, tokens = d.data.sequence_length, d.training.tokens_per_step or 0
    whole = tokens // length * length
    return f"use {one_of(size for size in (whole, whole + length) if size)}"


def _sizes_disagree(d: Draft) -> bool:
    tokens, sequences = d.training.tokens_per_step, d.training.sequences_per_step
    return tokens is not None and sequences is not None and tokens != sequences * d.data.sequence_length


def _accumulation_fix(d: Draft) -> str:
    if d.training.microbatch_size is not None:
        return f"use gradient_accumulation {d.needed_accumulation}, or leave it out"
    counts, asked = d.possible_accumulations, d.accumulation.value
    around = [count for count in counts if count < asked][-1:] + [count for count in counts if count > asked][:1]
    return f"use gradient_accumulation {one_of(around)}"


# fmt: off
BATCH_RULES = (
    Rule("tokens-per-step", ("training.tokens_per_step", "data.sequence_length"), "a step holds whole sequences",
         lambda d: (d.training.tokens_per_step or 0) % d.data.sequence_length,
         fix="use a multiple of data.sequence_length",
         use=_token_fix),
    Rule("step-size", ("training.tokens_per_step", "training.sequences_per_step", "data.sequence_length"),
         "tokens_per_step is sequences_per_step x sequence_length", _sizes_disagree,
         fix="give one of the first two"),
    Rule("idle-ranks", ("training.sequences_per_step",), "every data rank has to have a sequence",
         lambda d: d.sequences.value < d.data_ranks,
         fix="use more sequences a step, or fewer workers",
         because=lambda d: f"a step of {d.sequences.value} sequences leaves some of the {d.data_ranks} data ranks idle",
         use=lambda d: f"use at least {d.data_ranks} sequences a step, or at most {d.sequences.value} workers"),
    Rule("microbatch", ("training.microbatch_size",), "a microbatch is at most a rank's share of a step",
         lambda d: d.microbatch.value > d.sequences_per_rank,
         fix="use a smaller microbatch, or more sequences a step",
         because=lambda d: f"a step of {d.sequences.value} sequences gives each data rank {d.sequences_per_rank}",
         use=lambda d: f"use at most {d.sequences_per_rank}, or more sequences a step"),
    Rule("accumulation", ("training.microbatch_size", "training.gradient_accumulation"),
         "the microbatches of a step hold all its sequences, and none of them is empty",
         lambda d: d.accumulation.value != d.needed_accumulation,
         fix="leave one of the two out",
         because=lambda d: f"{d.accumulation.value} microbatches of {d.microbatch.value} do not fit the "
         f"{d.sequences_per_rank} sequences a rank ({d.sequences.value} a step / {d.data_ranks} data ranks)",
         use=_accumulation_fix),
)
# fmt: on


def _unscored(d: Draft) -> bool:
    every, evaluations = d.job.checkpoint.every, d.training.evaluate_every
    return d.job.checkpoint.keep_best and (not every or not evaluations or every % evaluations != 0)


# fmt: off
CHECKPOINT_RULES = (
    *(idle(f"checkpoint-{key.replace('_', '-')}", f"checkpoint.{key}", "no checkpoint is written at intervals",
           lambda d: not d.job.checkpoint.every, "set checkpoint.every, or leave it out")
      for key in ("keep_last", "keep_every", "asynchronous")),
    Rule("checkpoint-keep-best", ("checkpoint.keep_best", "checkpoint.every", "training.evaluate_every"),
         "every checkpoint has to have a validation loss", _unscored,
         fix="set training.evaluate_every to a divisor of checkpoint.every"),
    idle("checkpoint-staging", "checkpoint.staging_bytes", "a synchronous checkpoint stages a few blocks only",
         lambda d: not d.job.checkpoint.asynchronous),
)
# fmt: on
