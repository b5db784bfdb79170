"""Rules about the model: where it comes from, and what a module of `model.factory` leaves no room for."""

from __future__ import annotations

from shardwise.plan.draft import Draft, changed
from shardwise.plan.rules.parallel import SPLITTING_KEYS
from shardwise.plan.rules.rule import Rule, idle

SOURCES = ("model.path", "model.config", "model.factory")


def model_from_factory(d: Draft) -> bool:
    """Return whether the model is a module of `model.factory`."""
    return d.model.factory is not None


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("one-model", SOURCES, "a model comes from at most one of them (none: the embedded default)",
         lambda d: len(changed(d.job, *SOURCES)) > 1,
         fix="keep one"),
    idle("model-loss", "model.loss", "only a module of model.factory takes its loss from the job",
          lambda d: not model_from_factory(d), "set model.factory or leave it out"),
    idle("model-factory-arguments", "model.factory_arguments", "there is no model.factory to take them",
          lambda d: not model_from_factory(d), "set model.factory or leave it out"),
    idle("factory-task", "model.task", "a module of model.factory brings its own head and loss",
          model_from_factory, "use causal_lm (which a factory ignores), or model.config"),
    idle("remote-code", "model.trust_remote_code", "only a model.path or model.config can bring code of its own",
          lambda d: d.model.path is None and d.model.config is None),
    Rule("layer-drop", SPLITTING_KEYS, "all ranks have to run the same blocks",
         lambda d: d.facts.drops_blocks and d.world.size > 1,
         fix="set the layerdrop fields of the model's config to 0, or use one rank",
         because=lambda d: f"{d.facts.family} drops blocks at random (LayerDrop), and each rank would drop others"),
)
# fmt: on
