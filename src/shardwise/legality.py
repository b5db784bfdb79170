"""Which combinations of a job can run: one table, read by `resolve`, by the reference page and by the tests.

A row says which keys take part, what has to hold, when it is broken and what to do. The message is made from the
values of the keys, so that it always holds key, value, rule and the nearest fix. Rows are judged in order and the first
broken one is raised; a row may therefore rely on those above it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from shardwise.config import Job, LossScaleSection, Section
from shardwise.draft import Draft, divisors, group_size, one_of, placement_order
from shardwise.errors import LegalityError, nearest

Text = str | Callable[[Draft], str]

# torch.optim classes whose update of an element reads that element's own history only, so that a shard can be updated
# alone. Any class that is not here is taken to need whole tensors.
ELEMENTWISE = frozenset(
    ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
UNUSABLE = {
    "LBFGS": "it calls the model again inside of its step (a closure)",
    "Muon": "it takes two-dimensional parameters only",
    "SparseAdam": "it takes sparse gradients only",
}


@dataclass(frozen=True)
class Rule:
    """One row: `keys` take part, `sentence` has to hold and is broken when `when` says so, `fix` is the way out.

    `because` and `nearest` say the sentence and the fix with the draft's own numbers.
    """

    id: str
    keys: tuple[str, ...]
    sentence: str
    when: Callable[[Draft], Any]
    fix: str
    because: Callable[[Draft], str] | None = None
    nearest: Callable[[Draft], str] | None = None

    def message(self, draft: Draft) -> str:
        """`key=value, key=value: why; the nearest fix`."""
        values = ", ".join(f"{key}={lookup(draft.job, key)}" for key in self.keys)
        because = self.because(draft) if self.because else self.sentence
        return f"{values}: {because}; {self.nearest(draft) if self.nearest else self.fix}"


class RuleDoc(NamedTuple):
    """A row as the reference page shows it."""

    id: str
    keys: tuple[str, ...]
    sentence: str
    fix: str


def check(draft: Draft) -> None:
    """Raise LegalityError for the first broken row."""
    for rule in RULES:
        if rule.when(draft):
            raise LegalityError(rule.message(draft), rule.id)


def rules() -> list[RuleDoc]:
    """All rows, in the order in which they are judged."""
    return [RuleDoc(rule.id, rule.keys, rule.sentence, rule.fix) for rule in RULES]


def lookup(job: Job, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name)
    return value


def changed(job: Job, *keys: str) -> list[str]:
    """Those of the dotted keys whose value is not the default."""
    default = Job()
    return [key for key in keys if lookup(job, key) != lookup(default, key)]


def _idle(id: str, key: str, sentence: str, when: Callable[[Draft], Any], fix: str) -> Rule:
    """A row for a key that was set although it would do nothing."""
    return Rule(id, (key,), sentence, lambda d: changed(d.job, key) and when(d), fix)


def _not_built(axis: str) -> Rule:
    key = f"parallel.{axis}_parallel_degree"
    return Rule(
        f"{axis}-not-built", (key,), "not built yet in this version", lambda d: lookup(d.job, key) > 1, "use 1"
    )


def _from_config(d: Draft) -> bool:
    return d.job.model.factory is None


MODEL_RULES = (
    Rule(
        "one-model",
        ("model.path", "model.config", "model.factory"),
        "a model comes from exactly one of them (none: the embedded default)",
        lambda d: len(changed(d.job, "model.path", "model.config", "model.factory")) > 1,
        "keep one",
    ),
    _idle("model-loss", "model.loss", "only a module of model.factory takes its loss from the job", _from_config,
          "set model.factory or leave model.loss out"),
    _idle("model-factory-arguments", "model.factory_arguments", "there is no model.factory to take them", _from_config,
          "set model.factory or leave model.factory_arguments out"),
    _idle("factory-attention", "model.attention", "a module of model.factory has no config in which to set it",
          lambda d: not _from_config(d), "leave it at auto and set it in the factory"),
    _idle("factory-dropout", "model.dropout", "a module of model.factory has no config in which to set it",
          lambda d: not _from_config(d), "leave it out and set it in the factory"),
    _idle("factory-task", "model.task", "a module of model.factory brings its own head and loss",
          lambda d: not _from_config(d), "leave it at causal_lm, or use model.config"),
    _idle("remote-code", "model.trust_remote_code", "only a model.path or model.config can bring code of its own",
          lambda d: d.job.model.path is None and d.job.model.config is None, "leave it out"),
    Rule(
        "compile-blocks", ("model.compile",), "blocks are compiled one by one, and this model has no repeated blocks",
        lambda d: d.job.model.compile and not d.facts.blocks, "set model.compile to false",
    ),
)  # fmt: skip

DATA_FILES = ("text", "jsonl", "parquet", "dataset", "tokens")
FACTORY_IDLE = ("data.tokenizer", "data.vocabulary_size", "data.isolate_documents", "data.max_documents")


def _factory_data(d: Draft) -> bool:
    return d.job.data.factory is not None


DATA_RULES = (
    Rule("one-corpus", ("data.path", "data.factory"), "data comes from one of them",
         lambda d: d.job.data.path is not None and _factory_data(d), "keep one"),
    Rule("data-factory-format", ("data.factory", "data.format"), "a data.factory is its own format",
         lambda d: _factory_data(d) and d.job.data.format not in ("auto", "factory"), "use format factory"),
    Rule("data-format-factory", ("data.format", "data.factory"), "format factory needs a data.factory",
         lambda d: d.job.data.format == "factory" and not _factory_data(d), "set data.factory"),
    _idle("data-factory-arguments", "data.factory_arguments", "there is no data.factory to take them",
          lambda d: not _factory_data(d), "set data.factory or leave data.factory_arguments out"),
    Rule("data-path", ("data.format", "data.path"), "this format is read from a path",
         lambda d: d.job.data.format in DATA_FILES and d.job.data.path is None, "set data.path"),
    Rule("stdlib-path", ("data.format", "data.path"), "format stdlib reads the Python standard library and no path",
         lambda d: d.job.data.format == "stdlib" and d.job.data.path is not None, "use format auto or leave path out"),
    Rule("data-factory-text", ("data.factory", *FACTORY_IDLE), "a data.factory returns tensors, there is no text to read",
         lambda d: _factory_data(d) and changed(d.job, *FACTORY_IDLE), "leave the keys of text data out",
         nearest=lambda d: f"leave {' and '.join(changed(d.job, *FACTORY_IDLE))} out"),
    Rule("data-factory-tokens", ("training.tokens_per_step", "data.factory"),
         "samples of a data.factory are not counted in tokens",
         lambda d: _factory_data(d) and d.job.training.tokens_per_step is not None,
         "give training.sequences_per_step (samples a step)"),
    _idle("vocabulary-size", "data.vocabulary_size", "no tokenizer is trained, since data.tokenizer is given",
          lambda d: d.job.data.tokenizer is not None, "leave one of them out"),
    _idle("mask-probability", "data.mask_probability", "only model.task masked_lm masks tokens",
          lambda d: d.job.model.task != "masked_lm", "use model.task masked_lm or leave it out"),
    Rule("positions", ("data.sequence_length",), "a sequence cannot be longer than the model's positions",
         lambda d: d.facts.max_positions is not None and d.job.data.sequence_length > d.facts.max_positions,
         "shorten data.sequence_length",
         lambda d: f"the model has {d.facts.max_positions} positions", lambda d: f"use at most {d.facts.max_positions}"),
)  # fmt: skip

SPLIT_KEYS = tuple(f"parallel.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))


def _split(d: Draft) -> int:
    return d.split_degree * d.job.parallel.context_parallel_degree


PARALLEL_RULES = (
    Rule("device", ("parallel.device",), "the ranks have to run on the device that the job names",
         lambda d: d.job.parallel.device not in ("auto", d.world.device_type), "use device auto",
         lambda d: f"the ranks run on {d.world.device_type}"),
    Rule("backend", ("parallel.ddp_dist_backend",), "NCCL moves CUDA tensors, Gloo moves CPU tensors",
         lambda d: d.job.parallel.ddp_dist_backend == {"cpu": "nccl", "cuda": "gloo"}.get(d.world.device_type),
         "use auto", lambda d: f"the ranks run on {d.world.device_type}"),
    Rule("world", SPLIT_KEYS, "the product of the degrees has to divide the number of ranks",
         lambda d: d.world.size % _split(d), "use degrees whose product divides the number of ranks",
         lambda d: f"their product {_split(d)} does not divide the {d.world.size} ranks",
         lambda d: f"use a product of {one_of(divisors(d.world.size))}"),
    _not_built("tensor"),
    _not_built("pipeline"),
    _not_built("context"),
    Rule("placement", ("parallel.placement_strategy",), "D, P and T each stand in it once",
         lambda d: placement_order(d.job.parallel.placement_strategy) is None,
         "use cluster (DPT), spread (TPD) or another permutation of D, P and T"),
    Rule("optimizer-state", ("parallel.shard_optimizer_state", "parallel.sharded_data_parallel_degree"),
         "sharded parameters have sharded optimizer state already",
         lambda d: d.job.parallel.shard_optimizer_state and (d.job.parallel.sharded_data_parallel_degree or 1) > 1,
         "use shard_optimizer_state false, or sharded_data_parallel_degree 1"),
    Rule("shard-degree", ("parallel.sharded_data_parallel_degree",), "it divides the data ranks",
         lambda d: d.data_axis % d.sharded, "use a divisor of the number of data ranks",
         lambda d: f"does not divide the {d.data_axis} data ranks", lambda d: f"use {one_of(divisors(d.data_axis))}"),
    Rule("offload-parameters", ("memory.offload_parameters", "parallel.shard_optimizer_state"),
         "offload keeps shards of parameters on the host, and shard_optimizer_state leaves parameters whole",
         lambda d: d.job.memory.offload_parameters and d.job.parallel.shard_optimizer_state,
         "use sharded_data_parallel_degree instead of shard_optimizer_state"),
)  # fmt: skip

CHECKPOINTING = "memory.activation_checkpointing"


def _no_checkpointing(d: Draft) -> bool:
    return d.job.memory.activation_checkpointing == "none"


def _grouped(d: Draft) -> bool:
    return d.job.memory.checkpoint_strategy != "each"


def _not_compilable(d: Draft) -> bool:
    return d.job.memory.activation_checkpointing == "selective" or _grouped(d) or d.job.memory.offload_activations


MEMORY_RULES = (
    Rule("checkpointing-blocks", (CHECKPOINTING,), "repeated blocks are checkpointed, and this model has none",
         lambda d: not _no_checkpointing(d) and not d.facts.blocks, "use none"),
    _idle("checkpoint-every", "memory.checkpoint_every", "no activation is checkpointed", _no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    _idle("checkpoint-strategy", "memory.checkpoint_strategy", "no activation is checkpointed", _no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    Rule("checkpoint-strategy-name", ("memory.checkpoint_strategy",), "it is each, contiguous or group_N",
         lambda d: d.job.memory.checkpoint_strategy not in ("each", "contiguous")
         and group_size(d.job.memory.checkpoint_strategy) is None,
         "use each, contiguous or group_N with N from 1, e.g. group_2"),
    Rule("checkpoint-grouping", ("memory.checkpoint_every", "memory.checkpoint_strategy"),
         "either every n-th block is checkpointed or groups of blocks are",
         lambda d: d.job.memory.checkpoint_every > 1 and _grouped(d), "use checkpoint_every 1 or checkpoint_strategy each"),
    Rule("checkpoint-every-blocks", ("memory.checkpoint_every",), "n is at most the number of blocks",
         lambda d: d.job.memory.checkpoint_every > max(1, len(d.facts.blocks)), "use a smaller n",
         lambda d: f"the model has {len(d.facts.blocks)} blocks", lambda d: f"use at most {len(d.facts.blocks)}"),
    Rule("checkpoint-group-blocks", ("memory.checkpoint_strategy",), "N is at most the number of blocks",
         lambda d: (group_size(d.job.memory.checkpoint_strategy) or 1) > max(1, len(d.facts.blocks)), "use a smaller N",
         lambda d: f"the model has {len(d.facts.blocks)} blocks",
         lambda d: f"use group_N with N of at most {len(d.facts.blocks)}, or contiguous"),
    Rule("checkpoint-arguments", ("memory.checkpoint_strategy",),
         "blocks checkpointed together have to be called with the same arguments, and this model's are not",
         lambda d: _grouped(d) and not d.facts.blocks_share_arguments, "use each"),
    Rule("offload-activations", ("memory.offload_activations", CHECKPOINTING),
         "what is offloaded are the kept activations of checkpointed blocks",
         lambda d: d.job.memory.offload_activations and _no_checkpointing(d), f"set {CHECKPOINTING} to full"),
    Rule("compile-memory",
         ("model.compile", CHECKPOINTING, "memory.checkpoint_strategy", "memory.offload_activations"),
         "compiled blocks support checkpointing full of each block, without offload",
         lambda d: d.job.model.compile and _not_compilable(d),
         "use activation_checkpointing none or full, checkpoint_strategy each and offload_activations false"),
    _idle("loss-chunk", "memory.loss_chunk_tokens", "this model's head does not run inside the loss",
          lambda d: not d.chunked_loss, "leave it out"),
)  # fmt: skip

DYNAMIC_SCALE = tuple(f"precision.loss_scale.{name}" for name in LossScaleSection.model_fields if name != "static")

PRECISION_RULES = (
    Rule("loss-scale", ("precision.compute", "precision.loss_scale"), "only fp16 scales its loss",
         lambda d: d.compute != "fp16" and changed(d.job, "precision.loss_scale"),
         "use precision.compute fp16 or leave precision.loss_scale out",
         lambda d: f"only fp16 scales its loss, and this job computes in {d.compute}"),
    Rule("static-loss-scale", ("precision.loss_scale",), "a static scale never changes, the dynamic scale's keys do nothing",
         lambda d: d.job.precision.loss_scale.static is not None and changed(d.job, *DYNAMIC_SCALE),
         "leave out static, or the other keys"),
    Rule("loss-scale-range", ("precision.loss_scale.init_scale", "precision.loss_scale.min_scale"),
         "the first scale cannot lie below the smallest",
         lambda d: d.job.precision.loss_scale.init_scale < d.job.precision.loss_scale.min_scale,
         "raise init_scale or lower min_scale",
         nearest=lambda d: f"use min_scale of at most {d.job.precision.loss_scale.init_scale}"),
)  # fmt: skip


@cache
def optimizer_classes() -> dict[str, type]:
    """The optimizers of the installed torch, by name."""
    from torch import optim

    found = inspect.getmembers(optim, lambda item: inspect.isclass(item) and issubclass(item, optim.Optimizer))
    return {name: item for name, item in found if item is not optim.Optimizer}


def optimizer_options(name: str) -> list[str]:
    """Keyword arguments of an optimizer class that the job's `optimizer.options` may set."""
    arguments = inspect.signature(optimizer_classes()[name]).parameters
    return [argument for argument in arguments if argument not in ("params", "lr", "weight_decay")]


def _unknown_options(d: Draft) -> list[str]:
    return sorted(set(d.job.optimizer.options) - set(optimizer_options(d.job.optimizer.name)))


def _option_fix(d: Draft) -> str:
    moved = {"lr": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay"}
    option = _unknown_options(d)[0]
    if option in moved:
        return f"set {moved[option]} instead"
    return f"leave {option!r} out.{nearest(option, optimizer_options(d.job.optimizer.name))}"


def _option_complaint(d: Draft) -> str:
    """What the optimizer class itself says of its arguments; empty when it takes them."""
    from torch import nn, zeros

    section = d.job.optimizer
    arguments = {"lr": section.learning_rate, "weight_decay": section.weight_decay, **section.options}
    try:
        optimizer_classes()[section.name]([nn.Parameter(zeros(1))], **arguments)
    except Exception as error:  # each class has its own way to refuse a value
        return f"{section.name} says: {error}"
    return ""


OPTIMIZER_RULES = (
    Rule("optimizer-name", ("optimizer.name",), "it is a class in torch.optim",
         lambda d: d.job.optimizer.name not in optimizer_classes(), "use AdamW or another class of torch.optim",
         lambda d: f"not a class in torch.optim.{nearest(d.job.optimizer.name, optimizer_classes())}"),
    Rule("optimizer-usable", ("optimizer.name",), "LBFGS, Muon and SparseAdam cannot take this training loop's gradients",
         lambda d: d.job.optimizer.name in UNUSABLE, "use AdamW", lambda d: UNUSABLE[d.job.optimizer.name]),
    Rule("optimizer-elementwise", ("optimizer.name", "parallel.sharded_data_parallel_degree"),
         "a sharded optimizer has to be elementwise", lambda d: d.sharded > 1 and d.job.optimizer.name not in ELEMENTWISE,
         "use an elementwise optimizer, or sharded_data_parallel_degree 1 without shard_optimizer_state",
         lambda d: f"{d.job.optimizer.name} needs whole tensors, and this job shards them over {d.sharded} ranks",
         lambda d: f"use sharded_data_parallel_degree 1 without shard_optimizer_state, or {one_of(sorted(ELEMENTWISE))}"),
    Rule("optimizer-options", ("optimizer.name", "optimizer.options"), "options are arguments of the optimizer's class",
         _unknown_options, "leave the option out",
         lambda d: f"{d.job.optimizer.name} takes no option {_unknown_options(d)[0]!r} here", _option_fix),
    Rule("optimizer-values", ("optimizer.name", "optimizer.options"), "the optimizer's class accepts its options",
         _option_complaint, "use a value that the class takes", _option_complaint),
    Rule("warmup", ("optimizer.warmup_steps", "training.steps"), "warm-up is shorter than the training",
         lambda d: d.job.optimizer.warmup_steps >= d.job.training.steps, "use fewer warmup_steps",
         nearest=lambda d: f"use warmup_steps of at most {d.job.training.steps - 1}"),
    _idle("final-learning-rate", "optimizer.final_learning_rate_ratio", "a constant schedule stays at the peak",
          lambda d: d.job.optimizer.schedule == "constant", "use schedule linear or cosine, or leave it out"),
    Rule("profile", ("observe.profile", "training.steps"), "profile is [first, last], two steps of the training in order",
         lambda d: d.job.observe.profile is not None and not _is_range(d.job.observe.profile, d.job.training.steps),
         "use two steps below training.steps",
         nearest=lambda d: f"use e.g. [{max(0, d.job.training.steps - 2)}, {d.job.training.steps - 1}]"),
)  # fmt: skip


def _is_range(steps: list[int], end: int) -> bool:
    return len(steps) == 2 and steps[0] <= steps[1] < end


def _around(value: int, choices: Iterable[int]) -> str:
    """The nearest of `choices` below and above `value`."""
    choices = list(choices)
    below, above = [c for c in choices if c < value][-1:], [c for c in choices if c > value][:1]
    return one_of([*below, *above])


def _token_fix(d: Draft) -> str:
    length, tokens = d.job.data.sequence_length, d.job.training.tokens_per_step or 0
    whole = tokens // length * length
    return f"use {one_of([size for size in (whole, whole + length) if size])}"


def _tokens_disagree(d: Draft) -> bool:
    training = d.job.training
    if training.tokens_per_step is None or training.sequences_per_step is None:
        return False
    return training.tokens_per_step != training.sequences_per_step * d.job.data.sequence_length


def _accumulation_fix(d: Draft) -> str:
    if d.job.training.microbatch_size is not None:
        return f"use gradient_accumulation {d.needed_accumulation}, or leave it out"
    rows = d.sequences_per_rank
    counts = sorted({-(-rows // size) for size in range(1, rows + 1)})
    return f"use gradient_accumulation {_around(d.accumulation.value, counts)}"


BATCH_RULES = (
    Rule("tokens-per-step", ("training.tokens_per_step", "data.sequence_length"), "a step holds whole sequences",
         lambda d: d.job.training.tokens_per_step is not None
         and d.job.training.tokens_per_step % d.job.data.sequence_length,
         "use a multiple of data.sequence_length", nearest=_token_fix),
    Rule("step-size", ("training.tokens_per_step", "training.sequences_per_step", "data.sequence_length"),
         "tokens_per_step is sequences_per_step x sequence_length", _tokens_disagree, "give one of the two"),
    Rule("idle-ranks", ("training.sequences_per_step",), "every data rank has a sequence to work on",
         lambda d: d.sequences.value < d.data_ranks, "use more sequences a step or fewer workers",
         lambda d: f"{d.sequences.value} sequences a step ({d.sequences.rule}) leave some of the {d.data_ranks} data ranks idle",
         lambda d: f"use at least {d.data_ranks} sequences a step or at most {d.sequences.value} workers"),
    Rule("microbatch", ("training.microbatch_size",), "a microbatch is at most a rank's share of a step",
         lambda d: d.microbatch.value > d.sequences_per_rank, "use a smaller microbatch",
         lambda d: f"each of the {d.data_ranks} data ranks has {d.sequences_per_rank} of {d.sequences.value} sequences a step",
         lambda d: f"use at most {d.sequences_per_rank}, or more sequences a step"),
    Rule("accumulation", ("training.microbatch_size", "training.gradient_accumulation"),
         "the microbatches of a step hold all its sequences, and none of them is empty",
         lambda d: d.accumulation.value != d.needed_accumulation, "leave one of the two out",
         lambda d: f"{d.accumulation.value} microbatches of {d.microbatch.value} do not fit the {d.sequences_per_rank} "
         f"sequences a rank ({d.sequences.value} a step / {d.data_ranks} data ranks)", _accumulation_fix),
)  # fmt: skip

RULES: tuple[Rule, ...] = (
    *MODEL_RULES, *DATA_RULES, *PARALLEL_RULES, *MEMORY_RULES, *PRECISION_RULES, *OPTIMIZER_RULES, *BATCH_RULES,
)  # fmt: skip
SECTIONS: tuple[type[Section], ...] = ()
