"""smp.nn against transformers: weights bit-equal in both directions, the same logits, split over tensor ranks too."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.smp import replacement
from shardwise.smp.exceptions import SMPValidationError
from shardwise.smp.nn.huggingface.gpt2 import (
    get_hf_gpt2_transformer_layer_hooks,
    translate_hf_block_state_dict_to_smdistributed,
    translate_layer_state_dict_to_hf_gpt2_block,
)
from shardwise.smp.nn.huggingface.models import REPLACED, distributed
from shardwise.smp.nn.huggingface.translation import to_hf, to_smp
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model

WIDE: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", "gptj", {"rotary_dim": 4, "tie_word_embeddings": False}),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", "gptneo", {"attention_types": [[["global", "local"], 1]],
                                                                  "window_size": 4, "num_layers": 2, "num_heads": 4}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", "gptneox", {"intermediate_size": 40}),
    "bert": ("BertConfig", "BertForMaskedLM", "bert", {"intermediate_size": 40, **OFF}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", "roberta", {"intermediate_size": 40, **OFF}),
}  # fmt: skip


def _make(family: str) -> nn.Module:
    config_class, model_class, _, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**WIDE, **settings)
    torch.manual_seed(1)
    model: nn.Module = getattr(transformers, model_class)(config).double().eval()
    for parameter in model.parameters():  # fresh biases are zero, and would hide a mistake
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_bit_equal_there_and_back_and_logits_the_same(family: str) -> None:
    model = _make(family)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    module = importlib.import_module(f"shardwise.smp.nn.huggingface.{FAMILIES[family][2]}")
    there = getattr(module, f"translate_hf_state_dict_to_smdistributed_{FAMILIES[family][2]}")(dict(weights), heads=4)
    back = getattr(module, f"translate_state_dict_to_hf_{FAMILIES[family][2]}")(dict(there), heads=4)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())

    made = _replaced(model)
    made.load_state_dict(there)
    ids = torch.randint(3, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    error = (made(input_ids=ids, attention_mask=mask).logits - model(input_ids=ids, attention_mask=mask).logits)[
        mask > 0
    ]
    floor = 1e-5 if family in ("gptj", "gpt_neo") else 1e-6  # transformers computes their attention in fp32
    assert error.abs().max() <= floor


def _replaced(model: nn.Module) -> nn.Module:
    if type(model).__name__ in REPLACED:
        return distributed(model).double().eval()
    other = copy.deepcopy(model)
    base: Any = getattr(other, other.base_model_prefix)  # type: ignore[arg-type]
    base.encoder = distributed(base.encoder)
    return other.double().eval()


def test_weights_of_another_family_are_refused() -> None:
    with pytest.raises(SMPValidationError, match="not transformers's weights of gpt_neox"):
        to_smp(dict(make_model("gpt2").state_dict()), "gpt_neox", 4)
    with pytest.raises(SMPValidationError, match=r"not smp\.nn's weights of gpt2"):
        to_hf(dict(make_model("gpt2").state_dict()), "gpt2")


def test_blocks_are_translated_alone_and_in_a_whole_model() -> None:
    weights = {name: value.clone() for name, value in make_model("gpt2").state_dict().items()}
    there = translate_hf_block_state_dict_to_smdistributed(dict(weights), 16)
    assert "transformer.h.1.attention.query.weight" in there and "transformer.wte.weight" in there
    assert translate_hf_block_state_dict_to_smdistributed(dict(there)).keys() == there.keys()  # already translated
    back = translate_layer_state_dict_to_hf_gpt2_block(there, 16)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], value) for name, value in weights.items())
    prefix = "transformer.h.0."
    block = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    alone = translate_hf_block_state_dict_to_smdistributed(dict(block))
    assert "attention.query.weight" in alone
    assert translate_layer_state_dict_to_hf_gpt2_block(alone).keys() == block.keys()


def test_translation_keeps_no_second_copy() -> None:
    weights = dict(make_model("gpt2").state_dict())
    to_smp(weights, "gpt2")
    assert not weights


def _train(config: dict[str, Any], family: str) -> list[float]:
    smp.init({**config, "_match_weights": True})
    try:
        with smp.model_creation(tensor_parallelism=True, fused_softmax=True):
            plain = make_model(family)
        reference = copy.deepcopy(plain)
        model = smp.DistributedModel(plain)
        layers: Any = model.get_module().transformer.seq_layers  # type: ignore[union-attr]
        for layer in layers:
            assert layer.attention is not None and layer.output is not None
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(model: Any, ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)["loss"]
            model.backward(loss)
            return loss

        errors = []
        plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for batch in batches():
            optimizer.zero_grad()
            ours = step(model, batch).reduce_mean()
            optimizer.step()
            plain_optimizer.zero_grad()
            losses = [reference(input_ids=piece, labels=piece).loss for piece in batch.chunk(smp.num_microbatches())]
            expected = torch.stack(losses).mean()
            expected.backward()
            plain_optimizer.step()
            errors.append(abs(float(ours) - float(expected.detach())))
        return errors
    finally:
        smp.state.reset()


@pytest.mark.parametrize(
    "family, config",
    [
        ("gpt2", {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": "speed"}),
        ("gpt_neox", {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}),
    ],
)
def test_replaced_models_train_as_the_original(world_pool: WorldPool, family: str, config: dict[str, Any]) -> None:
    for errors in world_pool.run(2, _train, config, family):
        assert max(errors) < 2e-6, errors


def test_registered_class_takes_the_place_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    block = transformers.models.gpt2.modeling_gpt2.GPT2Block
    monkeypatch.setattr(block, "__init__", block.__init__)  # put back afterwards
    monkeypatch.setattr(replacement, "_registered", {})
    smp.init({"ddp": True})
    try:
        plain: Any = make_model("gpt2")
        smp.set_tensor_parallelism(plain.transformer.h)
        smp.tp_register_with_module(block, smp.nn.DistributedTransformerLayer, *get_hf_gpt2_transformer_layer_hooks())
        model: Any = smp.DistributedModel(plain)
        assert {type(layer) for layer in model.get_module().transformer.h} == {smp.nn.DistributedTransformerLayer}
        assert model.module.module is model.get_module()  # scripts of 2021 and 2022 count SMP's wrappers
        assert model.module.transformer is plain.transformer
        ids = batches()[0]
        loss = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        gradient = model.get_module().transformer.h[0].attention.query.weight.grad
        assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0
    finally:
        smp.state.reset()


def _attention(**settings: Any) -> nn.Module:
    torch.manual_seed(5)
    sizes = {"num_attention_heads": 4, "attention_head_size": 16, "hidden_size": 64, "intermediate_size": 64}
    layer = smp.nn.DistributedTransformerLayer(**sizes, causal_mask_size=16, **settings)
    return layer.attention.bfloat16().eval()


def test_keywords_of_attention_act_or_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    fused, plain, wide = (
        _attention(**settings)(hidden)
        for settings in ({}, {"flash_attention": False}, {"flash_attention": False, "attention_in_fp32": True})
    )
    assert fused.dtype == wide.dtype == torch.bfloat16
    torch.testing.assert_close(plain, fused, rtol=2e-2, atol=2e-2)
    exact = _attention().float()(hidden.float()).detach()
    errors = [float((each.detach().float() - exact).abs().max()) for each in (plain, wide)]
    assert not torch.equal(plain, wide) and errors[1] <= errors[0]
    _attention(query_key_layer_scaling=True, fused_bias_gelu=False)
    said = capsys.readouterr().err
    assert "query_key_layer_scaling=True has no effect here: queries are scaled" in said and "gelu" not in said
    with pytest.raises(TypeError, match="fused_tanh"):
        _attention(fused_tanh=True)
