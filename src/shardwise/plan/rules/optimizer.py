"""Rules about the optimizer's class, its options and the learning rate's schedule."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.job.objects import is_reference
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.optimizers import (
    ELEMENTWISE,
    UNUSABLE,
    average_of,
    complaint,
    decays,
    is_known,
    names,
    options,
    takes_slices,
    unknown_options,
)
from shardwise.job.schedules import FALLING, STABLE, decay_steps
from shardwise.model.matrices import can_be_matrices
from shardwise.model.parameter_optimizers import MUON, REST, optimizer_of, optimizers_of_parameters
from shardwise.model.parameter_patterns import matching_parameters, modules_of, trained_parameters_of
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle, spelling
from shardwise.words import one_of

OWN_KEYS = {"lr": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay"}


OWN_CLASS = "; or set `elementwise = True` in the class, if the update of an element reads its own history only"


def _option_fix(d: Draft) -> str:
    option = unknown_options(d.optimizer)[0]
    if option in OWN_KEYS:
        return f"set {OWN_KEYS[option]} instead"
    return spelling(option, options(d.optimizer.name))


def _unmatched(d: Draft) -> list[str]:
    patterns = [pattern for group in d.optimizer.groups for pattern in group.parameters]
    return [pattern for pattern in patterns if not matching_parameters(d.facts, pattern)]


def _untrained(d: Draft) -> list[str]:
    """Return the first patterns of groups in which nothing is trained."""
    return [group.parameters[0] for group in d.optimizer.groups if not trained_parameters_of(d.facts, group)]


def _shared(d: Draft) -> tuple[str, int, int] | None:
    """Return a parameter that is in two groups, and their numbers."""
    first: dict[str, int] = {}
    for number, group in enumerate(d.optimizer.groups):
        for name in trained_parameters_of(d.facts, group):
            if first.setdefault(name, number) != number:
                return name, first[name], number
    return None


def _clash(d: Draft) -> str:
    shared = _shared(d)
    assert shared is not None
    name, one, other = shared
    return f"{name} is in groups[{one}] and in groups[{other}]"


def _without_decay(d: Draft) -> list[str]:
    """Return the first patterns of groups whose weight decay would act on nothing."""
    shapes = d.facts.parameter_shapes
    return [
        group.parameters[0]
        for group in d.optimizer.groups
        if group.weight_decay is not None
        and not (
            decays(group.optimizer or d.optimizer.name)
            and any(len(shapes[n]) > 1 for n in trained_parameters_of(d.facts, group))
        )
    ]


def optimizer_sections(d: Draft) -> list[OptimizerSection]:
    """Return the sections of all optimizers of a job: its own, and those that groups or Muon bring."""
    return [d.optimizer, *(section for _, section in _own_sections(d))]


def _own_sections(d: Draft) -> list[tuple[str, OptimizerSection]]:
    """Return the optimizers beside the job's own: whose they are, and the section that would ask for them."""
    own, sections = d.optimizer, []
    if own.name == MUON:
        sections.append(("optimizer.adamw", own.model_copy(update={"name": REST, "options": own.adamw.options})))
    for number, group in enumerate(own.groups):
        if group.optimizer is not None or group.options is not None:
            chosen = optimizer_of(own, group)
            update = {"name": chosen.name, "options": chosen.options}
            sections.append((f"optimizer.groups[{number}]", own.model_copy(update=update)))
    return sections


def _group_problem(d: Draft) -> tuple[str, str]:
    """Return what is wrong with an optimizer of a group, or of what Muon leaves, and the fix; two empty strings."""
    for where, own in _own_sections(d):
        if not is_known(own.name):
            return f"{where}: {own.name!r} is no class in torch.optim", spelling(own.name, names())
        if own.name in UNUSABLE:
            return f"{where}: {own.name} {UNUSABLE[own.name]}", "use AdamW"
        if _pieces(d) > 1 and not takes_slices(own.name):
            return f"{where}: {own.name} needs whole tensors, and they are cut over {_pieces(d)} ranks", "use AdamW"
        if average_of(own.name, own.options) != average_of(d.optimizer.name, d.optimizer.options):
            return f"{where}: {own.name} evaluates averages, and either all parameters do or none", "use AdamW"
        if unknown := unknown_options(own):
            return f"{where}: {own.name} has no option {unknown[0]!r}", spelling(unknown[0], options(own.name))
        if said := complaint(own):
            return f"{where}: {said}", "use a value that the class takes"
    return "", ""


def _no_matrix(d: Draft) -> str:
    """Return a parameter that Muon would get and that is no matrix; empty where there is none."""
    chosen = optimizers_of_parameters(d.facts, d.optimizer)
    return next((n for n, own in chosen.items() if own.name == MUON and not can_be_matrices(d.facts, n)), "")


def _lacks_matrices(d: Draft) -> bool:
    chosen = optimizers_of_parameters(d.facts, d.optimizer).values()
    return all(own.name != MUON for own in chosen)


def _pieces(d: Draft) -> int:
    """Return the ranks over which a parameter is cut."""
    return d.sharded * d.parallel.tensor_parallel_degree


def _has_another(schedule: str) -> Callable[[Draft], bool]:
    return lambda d: d.optimizer.schedule != schedule


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("optimizer-name", ("optimizer.name",), "has to be an optimizer of this package, of torch.optim or your own",
         lambda d: not is_known(d.optimizer.name),
         fix="use AdamW or another name, or package.module:name",
         use=lambda d: spelling(d.optimizer.name, names())),
    Rule("optimizer-usable", ("optimizer.name",), "has to take dense gradients of any shape, without a closure",
         lambda d: d.optimizer.name in UNUSABLE and d.optimizer.name not in RECORDS,
         fix="use AdamW",
         because=lambda d: UNUSABLE[d.optimizer.name]),
    Rule("optimizer-elementwise", ("optimizer.name",), "has to be elementwise when its state is sharded",
         lambda d: _pieces(d) > 1 and not takes_slices(d.optimizer.name),
         fix="use an elementwise optimizer (a class of your own says `elementwise = True`), or degree 1 for sharding "
         "and tensors, without shard_optimizer_state",
         because=lambda d: f"needs whole tensors, and they are cut over {_pieces(d)} ranks",
         use=lambda d: "use degree 1 for parallel.sharded_data_parallel_degree and tensor_parallel_degree, or "
         f"{one_of(ELEMENTWISE)}{OWN_CLASS if is_reference(d.optimizer.name) else ''}"),
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
    Rule("ema-twice", ("training.ema_decay", "optimizer.name"), "the optimizer evaluates an average of its own",
         lambda d: d.training.ema_decay is not None and average_of(d.optimizer.name, d.optimizer.options),
         fix="leave training.ema_decay out"),
    Rule("groups-keys", ("optimizer.groups",), "a group has a learning rate, a weight decay or an optimizer of its own",
         lambda d: any(not group.model_dump(exclude={"parameters"}, exclude_none=True) for group in d.optimizer.groups),
         fix="set learning_rate, weight_decay, optimizer or options of the group, or leave it out"),
    Rule("groups-optimizer", ("optimizer.name", "optimizer.groups"), "the optimizer of a group has to be usable",
         lambda d: _group_problem(d)[0],
         fix="use AdamW or another class of torch.optim",
         because=lambda d: _group_problem(d)[0],
         use=lambda d: _group_problem(d)[1]),
    Rule("muon-matrices", ("optimizer.name", "optimizer.groups"), "Muon takes matrices and stacks of experts",
         lambda d: (d.optimizer.name == MUON or d.optimizer.groups) and _no_matrix(d),
         fix="narrow the patterns of the group",
         because=lambda d: f"Muon takes matrices and stacks of experts, and {_no_matrix(d)} has shape "
         f"{list(d.facts.parameter_shapes[_no_matrix(d)])}"),
    Rule("muon-idle", ("optimizer.name",), "something that is trained has to be a hidden matrix",
         lambda d: d.optimizer.name == MUON and _lacks_matrices(d),
         fix="use AdamW, or name matrices by a group with `optimizer: Muon`"),
    *(idle(f"adamw-{key.replace('_', '-')}", f"optimizer.adamw.{key}", "it is of what Muon leaves to AdamW",
           lambda d: d.optimizer.name != MUON, "use optimizer.name Muon, or leave it out")
      for key in ("learning_rate", "weight_decay", "options")),
    Rule("groups-match", ("optimizer.groups",), "each pattern has to match the whole name of a parameter or a module",
         lambda d: d.optimizer.groups and _unmatched(d),
         fix="use a name of the model's",
         because=lambda d: f"{_unmatched(d)[0]!r} matches no parameter and no module",
         use=lambda d: spelling(_unmatched(d)[0], modules_of(d.facts))),
    Rule("groups-trained", ("optimizer.groups",), "something of a group has to be trained",
         lambda d: d.optimizer.groups and _untrained(d),
         fix="leave the group out, or freeze fewer parameters",
         because=lambda d: f"nothing is trained of the group of {_untrained(d)[0]!r}"),
    Rule("groups-apart", ("optimizer.groups",), "a parameter is in one group at most",
         lambda d: d.optimizer.groups and _shared(d),
         fix="narrow the patterns of one of them",
         because=_clash),
    Rule("groups-decay", ("optimizer.name", "optimizer.groups"),
         "weight decay is applied to tensors of two or more dims, by a class that has it",
         lambda d: d.optimizer.groups and _without_decay(d),
         fix="leave weight_decay of the group out",
         because=lambda d: f"weight_decay of the group of {_without_decay(d)[0]!r} would act on no tensor"),
    Rule("schedule-free", ("optimizer.name", "optimizer.schedule"),
         "ScheduleFreeAdamW averages weights in the place of a falling learning rate",
         lambda d: d.optimizer.name == "ScheduleFreeAdamW" and d.optimizer.schedule != "constant"
         and not is_reference(d.optimizer.schedule),
         fix="use schedule constant"),
    Rule("warmup", ("optimizer.warmup_steps", "training.steps"), "warm-up has to be shorter than the training",
         lambda d: 0 < d.steps.value <= d.warmup.value,
         fix="use fewer warmup_steps",
         use=lambda d: f"use at most {d.steps.value - 1} warmup_steps"),
    Rule("warmup-ratio", ("optimizer.warmup_ratio", "optimizer.warmup_steps"),
         "warm-up is a share of the steps or a number of them",
         lambda d: d.optimizer.warmup_ratio is not None and d.optimizer.warmup_steps != "auto",
         fix="leave one of the two out"),
    *(idle(rule, f"optimizer.{key}", "a schedule of your own has its own warm-up",
           lambda d: is_reference(d.optimizer.schedule))
      for rule, key in (("own-schedule", "warmup_steps"), ("own-schedule-ratio", "warmup_ratio"))),
    idle("final-learning-rate", "optimizer.final_learning_rate_ratio", "the schedule ends at no ratio of the peak",
         lambda d: d.optimizer.schedule not in FALLING,
         "use schedule linear or cosine, or leave it out"),
    *(idle(f"schedule-{key}", f"optimizer.{key}", f"only the schedule {schedule} has {key}", _has_another(schedule),
           f"use schedule {schedule}, or leave it out")
      for key, schedule in (("decay_steps", STABLE), ("decay_type", STABLE),
                            ("cycles", "cosine_with_restarts"), ("milestones", "piecewise"))),
    Rule("decay-length", ("optimizer.decay_steps", "training.steps"), "warm-up and decay have room in the training",
         lambda d: d.optimizer.schedule == STABLE and d.steps.value
         and d.warmup.value + decay_steps(d.optimizer, d.steps.value) > d.steps.value,
         fix="use fewer decay_steps",
         because=lambda d: f"{d.warmup.value} steps of warm-up and {decay_steps(d.optimizer, d.steps.value)} of decay "
         f"are more than {d.steps.value}",
         use=lambda d: f"use at most {d.steps.value - d.warmup.value} decay_steps"),
    Rule("milestones", ("optimizer.schedule", "optimizer.milestones"), "a piecewise schedule has steps and factors",
         lambda d: d.optimizer.schedule == "piecewise" and not d.optimizer.milestones,
         fix="give some, such as {1000: 0.3, 2000: 0.1}"),
    Rule("milestones-reached", ("optimizer.milestones", "training.steps"),
         "each milestone is a step of the training behind its warm-up",
         lambda d: d.steps.value
         and any(not d.warmup.value <= step < d.steps.value for step in d.optimizer.milestones),
         fix="leave the others out",
         use=lambda d: f"use steps from {d.warmup.value} to {d.steps.value - 1}"),
)
# fmt: on
