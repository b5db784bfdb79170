"""Which combinations of a job can run: one table, read by `resolve`, by the reference page and by the tests.

A row says which keys take part, what has to hold, when it is broken and what to do. The message is made from the
values of the keys, so that it always holds key, value, rule and the nearest fix. Rows are judged in order and the first
broken one is raised; a row may therefore rely on those above it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.config import LossScaleSection
from shardwise.draft import Draft, UnknownFacts, changed, divisors, group_size, lookup, one_of, placement_order
from shardwise.errors import LegalityError, nearest
from shardwise.optimizers import ELEMENTWISE, UNUSABLE, classes, complaint, options, unknown_options


@dataclass(frozen=True)
class Rule:
    """One row: `keys` take part, `sentence` has to hold and is broken when `when` says so, `fix` is the way out.

    `because` and `use` say the sentence and the fix with the numbers of the job at hand.
    """

    id: str
    keys: tuple[str, ...]
    sentence: str
    when: Callable[[Draft], Any]
    fix: str
    because: Callable[[Draft], str] | None = None
    use: Callable[[Draft], str] | None = None

    def message(self, draft: Draft) -> str:
        """`key=value, key=value: why; the nearest fix`."""
        values = ", ".join(f"{key}={lookup(draft.job, key)}" for key in self.keys)
        because = self.because(draft) if self.because else self.sentence
        return f"{values}: {because}; {self.use(draft) if self.use else self.fix}"


class RuleDoc(NamedTuple):
    """A row as the reference page shows it."""

    id: str
    keys: tuple[str, ...]
    sentence: str
    fix: str


def check(draft: Draft) -> None:
    """Raise LegalityError for the first broken row; rows that ask a model that is not known yet are left for later."""
    for rule in RULES:
        with suppress(UnknownFacts):
            if rule.when(draft):
                raise LegalityError(rule.message(draft), rule.id)


def rules() -> list[RuleDoc]:
    """All rows, in the order in which they are judged."""
    return [RuleDoc(rule.id, rule.keys, rule.sentence, rule.fix) for rule in RULES]


def _idle(id: str, key: str, sentence: str, when: Callable[[Draft], Any], fix: str = "leave it out") -> Rule:
    """A row for a key that was set although it would do nothing."""
    return Rule(id, (key,), sentence, lambda d: changed(d.job, key) and when(d), fix)


def _not_built(axis: str) -> Rule:
    key = f"parallel.{axis}_parallel_degree"
    return Rule(f"{axis}-not-built", (key,), "not built yet in this version", lambda d: lookup(d.job, key) > 1, "use 1")


def _spelling(word: str, known: list[str]) -> str:
    hint = nearest(word, known).strip()
    return hint[0].lower() + hint[1:]


SOURCES = ("model.path", "model.config", "model.factory")


def _factory_model(d: Draft) -> bool:
    return d.model.factory is not None


# fmt: off
MODEL_RULES = (
    Rule("one-model", SOURCES, "a model comes from at most one of them (none: the embedded default)",
         lambda d: len(changed(d.job, *SOURCES)) > 1,
         fix="keep one"),
    _idle("model-loss", "model.loss", "only a module of model.factory takes its loss from the job",
          lambda d: not _factory_model(d), "set model.factory or leave it out"),
    _idle("model-factory-arguments", "model.factory_arguments", "there is no model.factory to take them",
          lambda d: not _factory_model(d), "set model.factory or leave it out"),
    _idle("factory-attention", "model.attention", "a module of model.factory has no config in which to set it",
          _factory_model, "use auto and set it in the factory"),
    _idle("factory-dropout", "model.dropout", "a module of model.factory has no config in which to set it",
          _factory_model, "leave it out and set it in the factory"),
    _idle("factory-task", "model.task", "a module of model.factory brings its own head and loss",
          _factory_model, "use causal_lm (which a factory ignores), or model.config"),
    _idle("remote-code", "model.trust_remote_code", "only a model.path or model.config can bring code of its own",
          lambda d: d.model.path is None and d.model.config is None),
    Rule("compile-blocks", ("model.compile",), "blocks are compiled one by one, and this model has no repeated blocks",
         lambda d: d.model.compile and not d.facts.blocks,
         fix="use false"),
)
# fmt: on

DATA_FILES = ("text", "jsonl", "parquet", "dataset", "tokens")
TEXT_KEYS = ("data.tokenizer", "data.vocabulary_size", "data.isolate_documents", "data.max_documents")


def _factory_data(d: Draft) -> bool:
    return d.data.factory is not None


# fmt: off
DATA_RULES = (
    Rule("one-corpus", ("data.path", "data.factory"), "data comes from one of them",
         lambda d: d.data.path is not None and _factory_data(d),
         fix="keep one"),
    Rule("data-factory-format", ("data.format", "data.factory"), "a data.factory has no other format",
         lambda d: _factory_data(d) and d.data.format not in ("auto", "factory"),
         fix="use format factory"),
    Rule("data-format-factory", ("data.format", "data.factory"), "format factory needs a data.factory",
         lambda d: d.data.format == "factory" and not _factory_data(d),
         fix="set data.factory"),
    _idle("data-factory-arguments", "data.factory_arguments", "there is no data.factory to take them",
          lambda d: not _factory_data(d), "set data.factory or leave it out"),
    Rule("data-path", ("data.format", "data.path"), "this format is read from a path",
         lambda d: d.data.format in DATA_FILES and d.data.path is None,
         fix="set data.path"),
    Rule("stdlib-path", ("data.format", "data.path"), "format stdlib reads Python's own sources and no path",
         lambda d: d.data.format == "stdlib" and d.data.path is not None,
         fix="use format auto, or leave data.path out"),
    Rule("data-factory-text", ("data.factory", *TEXT_KEYS), "a data.factory returns tensors, there is no text to read",
         lambda d: _factory_data(d) and changed(d.job, *TEXT_KEYS),
         fix="leave the keys of text out",
         use=lambda d: f"leave {' and '.join(changed(d.job, *TEXT_KEYS))} out"),
    Rule("data-factory-tokens", ("training.tokens_per_step", "data.factory"), "its samples have no tokens",
         lambda d: _factory_data(d) and d.training.tokens_per_step is not None,
         fix="give training.sequences_per_step, the samples of a step"),
    _idle("vocabulary-size", "data.vocabulary_size", "no tokenizer is trained, since data.tokenizer is given",
          lambda d: d.data.tokenizer is not None, "leave one of them out"),
    _idle("mask-probability", "data.mask_probability", "only model.task masked_lm masks tokens",
          lambda d: d.model.task != "masked_lm", "use model.task masked_lm, or leave it out"),
    Rule("positions", ("data.sequence_length",), "a sequence has to fit the model's positions",
         lambda d: d.facts.max_positions is not None and d.data.sequence_length > d.facts.max_positions,
         fix="use a shorter sequence",
         because=lambda d: f"longer than the model's {d.facts.max_positions} positions",
         use=lambda d: f"use at most {d.facts.max_positions}"),
)
# fmt: on

SPLIT_KEYS = tuple(f"parallel.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))


def _split(d: Draft) -> int:
    return d.split_degree * d.parallel.context_parallel_degree


# fmt: off
PARALLEL_RULES = (
    Rule("device", ("parallel.device",), "the ranks have to run on the device that the job names",
         lambda d: d.parallel.device not in ("auto", d.world.device_type),
         fix="use auto",
         because=lambda d: f"the ranks run on {d.world.device_type}"),
    Rule("backend", ("parallel.ddp_dist_backend",), "NCCL moves CUDA tensors and Gloo moves CPU tensors",
         lambda d: d.parallel.ddp_dist_backend == {"cpu": "nccl", "cuda": "gloo"}.get(d.world.device_type),
         fix="use auto",
         because=lambda d: f"NCCL is for CUDA and Gloo for a CPU, and the ranks run on {d.world.device_type}"),
    Rule("world", SPLIT_KEYS, "the product of the degrees has to divide the number of ranks",
         lambda d: d.world.size % _split(d),
         fix="use degrees whose product divides the number of ranks",
         because=lambda d: f"their product {_split(d)} does not divide the {d.world.size} ranks",
         use=lambda d: f"use a product of {one_of(divisors(d.world.size))}"),
    _not_built("tensor"),
    _not_built("pipeline"),
    _not_built("context"),
    Rule("placement", ("parallel.placement_strategy",), "has to hold D, P and T once each",
         lambda d: placement_order(d.parallel.placement_strategy) is None,
         fix="use cluster (DPT), spread (TPD) or another permutation of D, P and T"),
    Rule("optimizer-state", ("parallel.shard_optimizer_state", "parallel.sharded_data_parallel_degree"),
         "sharded parameters have sharded optimizer state already",
         lambda d: d.parallel.shard_optimizer_state and (d.parallel.sharded_data_parallel_degree or 1) > 1,
         fix="use shard_optimizer_state false, or sharded_data_parallel_degree 1"),
    Rule("shard-degree", ("parallel.sharded_data_parallel_degree",), "has to divide the number of data ranks",
         lambda d: d.data_axis % d.sharded,
         fix="use a divisor of the number of data ranks",
         because=lambda d: f"does not divide the {d.data_axis} data ranks",
         use=lambda d: f"use {one_of(divisors(d.data_axis))}"),
    Rule("offload-parameters", ("memory.offload_parameters", "parallel.shard_optimizer_state"),
         "offload keeps shards of parameters on the host, and shard_optimizer_state leaves parameters whole",
         lambda d: d.memory.offload_parameters and d.parallel.shard_optimizer_state,
         fix="use sharded_data_parallel_degree instead of shard_optimizer_state"),
)
# fmt: on

CHECKPOINTING = "memory.activation_checkpointing"
STRATEGY = "memory.checkpoint_strategy"


def _no_checkpointing(d: Draft) -> bool:
    return d.memory.activation_checkpointing == "none"


def _grouped(d: Draft) -> bool:
    return d.memory.checkpoint_strategy != "each"


def _nameless_strategy(d: Draft) -> bool:
    name = d.memory.checkpoint_strategy
    return name not in ("each", "contiguous") and group_size(name) is None


def _not_compilable(d: Draft) -> bool:
    return d.memory.activation_checkpointing == "selective" or _grouped(d) or d.memory.offload_activations


def _blocks(d: Draft) -> int:
    return max(1, len(d.facts.blocks))


# fmt: off
MEMORY_RULES = (
    Rule("checkpointing-blocks", (CHECKPOINTING,), "repeated blocks are checkpointed, and this model has none",
         lambda d: not _no_checkpointing(d) and not d.facts.blocks,
         fix="use none"),
    _idle("checkpoint-every", "memory.checkpoint_every", "no activation is checkpointed", _no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    _idle("checkpoint-strategy", STRATEGY, "no activation is checkpointed", _no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    Rule("checkpoint-strategy-name", (STRATEGY,), "has to be each, contiguous or group_N", _nameless_strategy,
         fix="use each, contiguous or group_N with N from 1, e.g. group_2"),
    Rule("checkpoint-grouping", ("memory.checkpoint_every", STRATEGY),
         "either every n-th block is checkpointed or groups of blocks are",
         lambda d: d.memory.checkpoint_every > 1 and _grouped(d),
         fix="use checkpoint_every 1 or checkpoint_strategy each"),
    Rule("checkpoint-every-blocks", ("memory.checkpoint_every",), "n is at most the number of blocks",
         lambda d: d.memory.checkpoint_every > _blocks(d),
         fix="use a smaller n",
         because=lambda d: f"more than the model's {_blocks(d)} blocks",
         use=lambda d: f"use at most {_blocks(d)}"),
    Rule("checkpoint-group-blocks", (STRATEGY,), "N is at most the number of blocks",
         lambda d: (group_size(d.memory.checkpoint_strategy) or 1) > _blocks(d),
         fix="use a smaller N",
         because=lambda d: f"N is more than the model's {_blocks(d)} blocks",
         use=lambda d: f"use contiguous, or group_N with N of at most {_blocks(d)}"),
    Rule("checkpoint-arguments", (STRATEGY,),
         "blocks checkpointed together have to be called with the same arguments, and this model's are not",
         lambda d: _grouped(d) and not d.facts.blocks_share_arguments,
         fix="use each"),
    Rule("offload-activations", ("memory.offload_activations", CHECKPOINTING),
         "what is offloaded are the kept activations of checkpointed blocks",
         lambda d: d.memory.offload_activations and _no_checkpointing(d),
         fix=f"set {CHECKPOINTING} to full"),
    Rule("compile-memory", ("model.compile", CHECKPOINTING, STRATEGY, "memory.offload_activations"),
         "a compiled block can be checkpointed in full and by itself, without offload",
         lambda d: d.model.compile and _not_compilable(d),
         fix="use model.compile false, or checkpointing none or full, strategy each and offload_activations false"),
    _idle("loss-chunk", "memory.loss_chunk_tokens", "this model's head does not run inside the loss",
          lambda d: not d.chunked_loss),
)
# fmt: on

SCALE = "precision.loss_scale"
DYNAMIC_SCALE = tuple(f"{SCALE}.{name}" for name in LossScaleSection.model_fields if name != "static")

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
)
# fmt: on

OWN_KEYS = {"lr": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay"}


def _option_fix(d: Draft) -> str:
    option = unknown_options(d.optimizer)[0]
    if option in OWN_KEYS:
        return f"set {OWN_KEYS[option]} instead"
    return _spelling(option, options(d.optimizer.name))


def _bad_range(d: Draft) -> bool:
    steps = d.job.observe.profile
    return steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= d.training.steps)


# fmt: off
OPTIMIZER_RULES = (
    Rule("optimizer-name", ("optimizer.name",), "has to be a class in torch.optim",
         lambda d: d.optimizer.name not in classes(),
         fix="use AdamW or another class of torch.optim",
         use=lambda d: _spelling(d.optimizer.name, list(classes()))),
    Rule("optimizer-usable", ("optimizer.name",), "has to take dense gradients of any shape, without a closure",
         lambda d: d.optimizer.name in UNUSABLE,
         fix="use AdamW",
         because=lambda d: UNUSABLE[d.optimizer.name]),
    Rule("optimizer-elementwise", ("optimizer.name",), "has to be elementwise when its state is sharded",
         lambda d: d.sharded > 1 and d.optimizer.name not in ELEMENTWISE,
         fix="use an elementwise optimizer, or sharded_data_parallel_degree 1 without shard_optimizer_state",
         because=lambda d: f"needs whole tensors, and they are sharded over {d.sharded} ranks",
         use=lambda d: f"use parallel.sharded_data_parallel_degree 1, or {one_of(ELEMENTWISE)}"),
    Rule("optimizer-options", ("optimizer.name", "optimizer.options"), "options are arguments of the class",
         lambda d: unknown_options(d.optimizer),
         fix="leave the option out",
         because=lambda d: f"no option {unknown_options(d.optimizer)[0]!r}",
         use=_option_fix),
    Rule("optimizer-values", ("optimizer.options",), "the class has to accept the values of its options",
         lambda d: complaint(d.optimizer),
         fix="use a value that the class takes",
         because=lambda d: complaint(d.optimizer)),
    Rule("warmup", ("optimizer.warmup_steps", "training.steps"), "warm-up has to be shorter than the training",
         lambda d: d.optimizer.warmup_steps >= d.training.steps,
         fix="use fewer warmup_steps",
         use=lambda d: f"use at most {d.training.steps - 1} warmup_steps"),
    _idle("final-learning-rate", "optimizer.final_learning_rate_ratio", "a constant schedule stays at the peak",
          lambda d: d.optimizer.schedule == "constant", "use schedule linear or cosine, or leave it out"),
    Rule("profile", ("observe.profile", "training.steps"), "profile is [first, last], counted from 1 to training.steps",
         _bad_range,
         fix="use two steps from 1 to training.steps",
         use=lambda d: f"use e.g. [{max(1, d.training.steps - 1)}, {d.training.steps}]"),
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

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *DATA_RULES,
    *PARALLEL_RULES,
    *MEMORY_RULES,
    *PRECISION_RULES,
    *OPTIMIZER_RULES,
    *BATCH_RULES,
)
