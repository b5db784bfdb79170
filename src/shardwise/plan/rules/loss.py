"""Rules about the loss, and the head that may run inside of it."""

from __future__ import annotations

from shardwise.plan.rules.model import model_from_factory
from shardwise.plan.rules.rule import Rule, idle

# fmt: off
RULES: tuple[Rule, ...] = (
    *(idle(f"factory-{key.replace('_', '-')}", f"training.{key}", "a module of model.factory brings its own loss",
           model_from_factory, "leave it out and set it in the module or model.loss")
      for key in ("label_smoothing", "z_loss")),
    idle("loss-chunk", "memory.loss_chunk_tokens", "this model's head does not run inside the loss",
          lambda d: not d.chunked_loss),
)
# fmt: on
