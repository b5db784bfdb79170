"""Routers beside stacks of experts, and what is left out."""

from __future__ import annotations

from typing import Any

from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.routers import config_as_given, correction_biases, find_routers
from shardwise.testing.toy_configs import toy_config


def test_routers_and_biases_are_found_beside_their_experts() -> None:
    model: Any = build_model(Job.model_validate({"model": {"config": toy_config("glm4_moe")}}))
    if (
        "router_logits" not in model.model._can_record_outputs
    ):  # transformers 5.17: what it does not record is not found
        assert find_routers(model) == {} == correction_biases(model)
        return
    assert find_routers(model) == {"model.layers.1.mlp.experts": ("model.layers.1.mlp.gate", 0)}
    assert correction_biases(model) == {"model.layers.1.mlp.experts": "model.layers.1.mlp.gate.e_score_correction_bias"}


def test_a_class_for_tokens_that_skip_the_experts_leaves_the_router_out() -> None:
    model = build_model(Job.model_validate({"model": {"config": toy_config("qwen3_moe")}}))
    router: Any = model.get_submodule("model.layers.1.mlp.gate")
    router.weight = type(router.weight)(router.weight.new_empty(router.weight.shape[0] + 1, router.weight.shape[1]))
    assert [*find_routers(model)] == ["model.layers.0.mlp.experts"]


def test_layers_of_different_numbers_of_experts_have_no_common_loss() -> None:
    model = build_model(Job.model_validate({"model": {"config": toy_config("qwen3_moe")}}))
    assert len(find_routers(model)) == 2
    model.get_submodule("model.layers.1.mlp.experts").num_experts = 2
    for leaf, stack in list(model.get_submodule("model.layers.1.mlp.experts").named_parameters()):
        setattr(model.get_submodule("model.layers.1.mlp.experts"), leaf, type(stack)(stack[:2]))
    assert find_routers(model) == {} == correction_biases(model)


def test_a_written_config_is_the_users() -> None:
    config = toy_config("mixtral", output_router_logits=True)
    model: Any = build_model(Job.model_validate({"model": {"config": config}}))
    assert not model.config.output_router_logits  # the loss over the step takes its place
    assert config_as_given(model, True).output_router_logits and not model.config.output_router_logits
