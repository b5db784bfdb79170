"""Rules about the loss, and the head that may run inside of it."""

from __future__ import annotations

from shardwise.plan.rules.model import model_from_factory
from shardwise.plan.rules.rule import Rule, idle

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
         "sft is for conversations and pairs, pretraining for documents and samples of a data.factory",
         lambda d: d.training.objective != "auto" and (d.training.objective == "sft") != d.data.has_rows,
         fix="use objective auto",
         use=lambda d: "use objective sft, and data.train_on all for every token" if d.data.has_rows
         else "use objective auto, or a data.format of conversations"),
    Rule("preference-objective", ("data.format", "training.objective"),
         "preferences are not trained on as such yet",
         lambda d: d.data.format == "preference" and d.training.objective == "auto",
         fix="set training.objective sft to train on what was chosen"),
    idle("loss-chunk", "memory.loss_chunk_tokens", "this model's head does not run inside the loss",
          lambda d: not d.chunked_loss),
)
# fmt: on
