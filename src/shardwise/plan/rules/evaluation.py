"""Rules about evaluations: their sets, the metric that decides, and the early end of a run."""

from __future__ import annotations

from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle


def _decides_nothing(d: Draft) -> bool:
    return not d.job.checkpoint.keep_best and not d.job.evaluation.early_stopping_patience


def _names_no_set(d: Draft) -> bool:
    """Return whether the metric is that of a set that the job lacks; callbacks name theirs otherwise."""
    kind, of_a_set, name = d.job.evaluation.metric.partition("/")
    known = [*d.job.evaluation.sets, *(source.label for source in d.data.sources)]
    known += ["ema"] * (d.training.ema_decay is not None)
    return bool(of_a_set) and (kind == "exact_match" or kind.startswith("validation_")) and name not in known


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("evaluation-sets", ("evaluation.sets", "data.factory", "model.task"),
         "sets are text, read as data.path is",
         lambda d: d.job.evaluation.sets and (d.data.factory is not None or d.reads_files),
         fix="leave evaluation.sets out, or the factory"),
    Rule("evaluation-ema", ("evaluation.sets", "data.sources", "training.ema_decay"),
         "`validation_loss/ema` is the loss of the averaged weights",
         lambda d: d.training.ema_decay is not None
         and "ema" in (*d.job.evaluation.sets, *(source.label for source in d.data.sources)),
         fix="name the set or the source otherwise"),
    Rule("evaluation-prompts", ("evaluation.prompts", "model.task"),
         "prompts are for causal language models of Hugging Face",
         lambda d: d.job.evaluation.prompts and not d.generates_text,
         fix="leave evaluation.prompts out"),
    Rule("evaluation-answers", ("evaluation.answers", "data.format"),
         "answers are in rows of conversations and pairs, and a causal language model of Hugging Face writes them",
         lambda d: d.job.evaluation.answers and not (d.data.has_rows and d.generates_text),
         fix="set data.format to chat or prompt_completion, or leave evaluation.answers out"),
    Rule("evaluation-answers-all", ("evaluation.answers", "data.train_on"),
         "what is trained on are the answers, and not all that stands behind the first token",
         lambda d: d.job.evaluation.answers and d.data.has_rows and d.data.train_on == "all",
         fix="use another data.train_on, or leave evaluation.answers out"),
    Rule("evaluation-metric-answers", ("evaluation.metric", "evaluation.answers"),
         "exact_match is the share of the answers that the model is asked for",
         lambda d: d.job.evaluation.metric.partition("/")[0] == "exact_match" and not d.job.evaluation.answers,
         fix="set evaluation.answers, say to 100"),
    Rule("evaluation-metric-set", ("evaluation.metric", "evaluation.sets", "data.sources"),
         "behind the / of a metric stands the name of a set or of a source", _names_no_set,
         fix="use a name of evaluation.sets or data.sources"),
    *(idle(f"evaluation-{key.replace('_', '-')}", f"evaluation.{key}", "nothing is judged by it", _decides_nothing,
           "set checkpoint.keep_best or evaluation.early_stopping_patience, or leave it out")
      for key in ("metric", "greater_is_better")),
    Rule("early-stopping", ("evaluation.early_stopping_patience", "training.evaluate_every"),
         "a run can end early where it is evaluated before its end",
         lambda d: d.job.evaluation.early_stopping_patience and not d.training.evaluate_every,
         fix="set training.evaluate_every"),
    idle("early-stopping-threshold", "evaluation.early_stopping_threshold", "no run ends early",
         lambda d: not d.job.evaluation.early_stopping_patience,
         "set evaluation.early_stopping_patience, or leave it out"),
)
# fmt: on
