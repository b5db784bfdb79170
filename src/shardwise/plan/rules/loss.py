"""Rules about the loss, and the head that may run inside of it."""

from __future__ import annotations

from typing import get_args

from shardwise.job.data_section import ROW_FORMATS, DataFormat
from shardwise.plan.draft import Draft
from shardwise.plan.rules.model import model_from_factory
from shardwise.plan.rules.rule import Rule, idle

DATA_OF_OBJECTIVES: dict[str, tuple[str, ...]] = {
    "pretraining": tuple(name for name in get_args(DataFormat) if name not in ROW_FORMATS),
    "sft": ROW_FORMATS,
    "dpo": ("preference",),
}


def _objective_fix(d: Draft) -> str:
    if d.training.objective == "dpo":
        return "use objective auto, or rows of chosen and rejected"
    if d.data.has_rows:
        return "use objective sft, and data.train_on all for every token"
    return "use objective auto, or a data.format of conversations"


def _is_of_other_objective(d: Draft) -> bool:
    formats = d.data.row_formats or [d.data.format]
    return any(name not in DATA_OF_OBJECTIVES.get(d.training.objective, formats) for name in formats)


# fmt: off
RULES: tuple[Rule, ...] = (
    *(idle(f"factory-{key.replace('_', '-')}", f"training.{key}", "a module of model.factory brings its own loss",
           model_from_factory, "leave it out and set it in the module or model.loss")
      for key in ("label_smoothing", "z_loss")),
    Rule("sample-loss", ("training.loss_reduction", "model.factory"),
         "the loss of a module of your own is a sum with a count of its own",
         lambda d: d.training.loss_reduction == "sample" and model_from_factory(d),
         fix="use loss_reduction token, and weigh the samples in model.loss"),
    Rule("objective-data", ("training.objective", "data.format"),
         "sft is for conversations and pairs, dpo for preferences, pretraining for documents and samples of a "
         "data.factory",
         _is_of_other_objective,
         fix="use objective auto",
         use=_objective_fix),
    *(idle(f"dpo-{key.replace('_', '-')}", f"training.dpo.{key}", "it is for training.objective dpo alone",
           lambda d: d.job.objective != "dpo", "leave it out, or use a data.format of preferences")
      for key in ("loss", "beta", "label_smoothing", "length_normalised", "precompute_reference")),
    idle("ipo-smoothing", "training.dpo.label_smoothing", "the loss ipo has no labels to smooth",
         lambda d: d.training.dpo.loss == "ipo", "use training.dpo.loss sigmoid, or leave it out"),
    idle("pair-label-smoothing", "training.label_smoothing", "the loss of preferences is no cross-entropy",
         lambda d: d.job.reads_pairs, "use training.dpo.label_smoothing, or leave it out"),
    idle("pair-z-loss", "training.z_loss", "the loss of preferences is no cross-entropy", lambda d: d.job.reads_pairs),
    idle("pair-loss-reduction", "training.loss_reduction", "the loss of preferences is a mean over pairs",
         lambda d: d.job.reads_pairs),
    Rule("pair-factory", ("training.objective", "model.factory"),
         "log-probabilities of completions come from the logits of a language model of transformers",
         lambda d: d.job.reads_pairs and model_from_factory(d),
         fix="use model.path or model.config, or objective sft with a model.loss"),
    Rule("reference-adapter", ("training.objective", "adapter.path"),
         "the reference is the model under the adapter, and modules that it holds whole have taken the place of the "
         "model's own",
         lambda d: d.job.objective == "dpo" and d.adapter.path is not None and d.adapter.modules_to_save,
         fix="merge the adapter into the model first (shardwise export --merge)"),
    idle("loss-chunk", "memory.loss_chunk_tokens", "this model's head does not run inside the loss",
          lambda d: not d.chunked_loss),
)
# fmt: on
