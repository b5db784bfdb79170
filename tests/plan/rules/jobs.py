"""Models, worlds and the shape of a case, for the tests of the legality table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED, refused
from shardwise.job.schema import Job
from shardwise.model.facts import AttentionFacts, BlockFacts, ModelFacts, StageFacts
from shardwise.model.tensor_split import TensorSplit
from shardwise.plan.draft import Draft, World
from shardwise.plan.rules import RULES, check

# A job that breaks a row, the nearest one that does not, what the message holds, world, facts of the one and the other.
Case = tuple[dict[str, Any], dict[str, Any], str, World, ModelFacts, ModelFacts, World]

FACTS = ModelFacts(
    family="gpt_neox",
    parameters=1000,
    embedding_parameters=100,
    blocks=tuple(BlockFacts(f"layers.{i}", 100) for i in range(4)),
    capabilities=dict.fromkeys(Axis, SUPPORTED),
    max_positions=512,
    head="embed_out",
    attention_heads=12,
    key_value_heads=6,
    stages=StageFacts(before={"embed_in": 100}, after={"embed_out": 100}),
)
BRANCHED = replace(FACTS, sequence_parallel=refused("its blocks are not one chain"))
HOOKED = replace(FACTS, whole_gradient_hooks=("layers.0.weight",), definition="Net (net.py:3)")
ACCUMULATING = replace(FACTS, accumulate_grad_hooks=("embed_in.weight",), definition="Net (net.py:3)")
DROPPING = replace(FACTS, drops_blocks=True)
NO_PLAN = FACTS.with_capabilities({Axis.TENSOR: refused("there is no plan for xlm")})
LISTS = FACTS.with_capabilities({Axis.PIPELINE: refused("it has two lists of blocks")})
OTHER_ARGUMENTS = replace(FACTS, blocks_share_arguments=False)
USERS_MODULE: dict[str, Any] = {
    "takes_token_ids": False,
    "returns_logits": False,
    "computes_own_loss": True,
    "generates_text": False,
    "has_config": False,
}
FLAT = replace(FACTS, **USERS_MODULE, blocks=(), head=None, max_positions=None, family="Net")
KERNELS = replace(FACTS, attention_kernels=SUPPORTED, attention=(AttentionFacts("layers.0.attn", 8, 8),))
GROUPED = replace(
    FACTS,
    tensor_splits={"layers.0.mlp.experts": TensorSplit("experts", grouped=True)},
    parameter_shapes={"layers.0.mlp.experts.down_proj": (4, 24, 16)},
)
CPU4 = World(4, "cpu", 4)
CPU6 = World(6, "cpu", 6)
CUDA4 = World(4, "cuda", 4)
FACTORY = {"model": {"factory": "a:b"}}
SPANS = {"model": {"task": "seq2seq_lm"}}
FULL = {"activation_checkpointing": "full"}
TWO = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
NO_INTERFACE = FACTS.with_capabilities(
    {Axis.CONTEXT: refused("the attention of bloom does not go through transformers' interface")}
)


def staged(**parallel: Any) -> dict[str, Any]:
    """Return a job of two pipeline stages."""
    return {"parallel": {"pipeline_parallel_degree": 2, **parallel}}


def resolve_case(job: dict[str, Any], world: World = CPU4, facts: ModelFacts = FACTS) -> None:
    check(Draft(Job.model_validate(job), world, facts))


def case(
    broken: dict[str, Any],
    legal: dict[str, Any],
    says: str,
    world: World = CPU4,
    facts: ModelFacts = FACTS,
    legal_facts: ModelFacts | None = None,
    legal_world: World | None = None,
) -> Case:
    return broken, legal, says, world, facts, legal_facts or facts, legal_world or world


def check_case(id: str, case: Case) -> None:
    """The row fires on the one job, names its keys, and not on the other."""
    broken, legal, says, world, facts, legal_facts, legal_world = case
    with pytest.raises(LegalityError) as raised:
        resolve_case(broken, world, facts)
    rule = next(rule for rule in RULES if rule.id == id)
    assert raised.value.rule == id
    assert says in str(raised.value)
    assert all(f"{key}=" in str(raised.value) for key in rule.keys)
    assert raised.value.exit_code == 2
    resolve_case(legal, legal_world, legal_facts)


def check_row(id: str, job: dict[str, Any], world: World, facts: ModelFacts) -> None:
    with pytest.raises(LegalityError) as raised:
        resolve_case(job, world, facts)
    assert raised.value.rule == id
