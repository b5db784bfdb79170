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
from shardwise.smp.exceptions import SMPValidationError
from shardwise.smp.v1 import replacement
from shardwise.smp.v1.nn.huggingface.gpt2 import (
    get_hf_gpt2_transformer_layer_hooks,
    translate_hf_block_state_dict_to_smdistributed,
    translate_layer_state_dict_to_hf_gpt2_block,
)
from shardwise.smp.v1.nn.huggingface.models import REPLACED, distributed_module
from shardwise.smp.v1.nn.huggingface.translation import to_hf, to_smp
from shardwise.smp.v2.nn.attn import FlashSelfAttention
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model, replaced_loss

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
    module = importlib.import_module(f"shardwise.smp.v1.nn.huggingface.{FAMILIES[family][2]}")
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
        return distributed_module(model).double().eval()
    other = copy.deepcopy(model)
    base: Any = getattr(other, other.base_model_prefix)  # type: ignore[arg-type]
    base.encoder = distributed_module(base.encoder)
    return other.double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_another_family_are_refused(family: str) -> None:
    """Six families, five strangers each: several share the names around their blocks, or all of them but a bias."""
    theirs = dict(_make(family).state_dict())
    ours = to_smp(dict(theirs), family, 4)
    for other in FAMILIES.keys() - {family}:
        with pytest.raises(SMPValidationError, match=f"not transformers's weights of {other}"):
            to_smp(dict(theirs), other, 4)
        with pytest.raises(SMPValidationError, match=rf"not smp\.nn's weights of {other}"):
            to_hf(dict(ours), other, 4)


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


LAYER: dict[str, Any] = {
    "num_attention_heads": 4, "attention_head_size": 8, "hidden_size": 32, "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0, "layernorm_epsilon": 1e-5, "initializer_range": 0.5, "use_normal_initialization": True,
    "pre_layernorm": False, "post_layernorm": True,
}  # fmt: skip
BLOCK: dict[str, Any] = LAYER | {"intermediate_size": 64, "activation": "gelu", "causal_mask_size": None}


def test_modules_take_their_documented_keywords() -> None:
    torch.manual_seed(0)
    hidden, mask = torch.randn(2, 6, 32), torch.zeros(2, 1, 1, 6)
    attention = smp.nn.DistributedAttentionLayer(**LAYER, causal_mask_size=None, cross_attention=False)
    sizes = {name: BLOCK[name] for name in BLOCK if "attention" not in name and name != "causal_mask_size"}
    output = smp.nn.DistributedTransformerOutputLayer(**sizes, fp32_residual_addition=False)
    assert attention((hidden, mask)).shape == output(hidden).shape == hidden.shape
    for projection in (attention.query, attention.dense, output.dense1):
        assert 0.4 < float(projection.weight.detach().std()) < 0.6 and not projection.bias.any()
    layer = smp.nn.DistributedTransformerLayer(**BLOCK, add_cross_attention=False, use_alibi=False, alibi_bias_max=8)
    found, same = layer((hidden, mask))
    assert found.shape == hidden.shape and same is mask
    both = smp.nn.DistributedTransformer(num_layers=1, **BLOCK | {"pre_layernorm": True})
    with torch.no_grad():
        both.layernorm.weight.zero_()
    assert not both(hidden).any()  # the last thing that it does
    with pytest.raises(ValueError, match="one of them has to be on"):
        smp.nn.DistributedTransformerLayer(**BLOCK | {"post_layernorm": False})
    with pytest.raises(TypeError, match="intermediat_size"):
        smp.nn.DistributedTransformerOutputLayer(intermediat_size=3)


def test_cross_attention_looks_at_other_states() -> None:
    torch.manual_seed(0)
    sizes = BLOCK | {"num_layers": 2, "vocab_size": 61, "num_positions": 8, "add_cross_attention": True}
    model = smp.nn.DistributedTransformerLMHead(**sizes).double()
    ids, states = torch.randint(0, 61, (2, 8)), torch.randn(2, 5, 32, dtype=torch.float64)
    hidden_from = torch.zeros(2, 5, dtype=torch.long)
    hidden_from[:, 4] = 1

    def logits(states: Tensor) -> Tensor:
        found: Tensor = model((ids, None, None, None, states, hidden_from, None))
        return found

    changed = states.clone()
    changed[:, 4] = 7.0  # which nobody sees
    assert torch.equal(logits(states), logits(changed))
    changed[:, 3] = 7.0
    assert not torch.allclose(logits(states), logits(changed))
    loss, _ = model((ids, None, None, None, states, hidden_from, ids))
    loss.backward()
    assert model.transformer.seq_layers[1].cross_attention.key.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("heads", [4, 6, 12])
def test_alibi_is_blooms(heads: int) -> None:
    build = transformers.models.bloom.modeling_bloom.build_alibi_tensor
    theirs = build(torch.ones(1, 5), heads, torch.float64).view(heads, 5)
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 3, heads, 8, dtype=torch.float64)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(-1, -2) / 8**0.5 + theirs[None, :, None, :]
    ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ value
    flash = smp.nn.FlashAttentionLayer(attention_dropout_prob=0.0, use_alibi=True)(qkv, causal=True)
    torch.testing.assert_close(flash, expected, rtol=1e-6, atol=1e-6)  # their slopes are in fp32
    other = FlashSelfAttention(use_alibi=True)((query, key, value), causal=True)
    torch.testing.assert_close(other, expected, rtol=1e-6, atol=1e-6)


def _alibi(config: dict[str, Any]) -> float:
    return replaced_loss({**config, "_match_weights": True}, use_alibi=True, alibi_bias_max=8)


def test_alibi_is_split_with_the_heads(world_pool: WorldPool) -> None:
    (whole,) = world_pool.run(1, _alibi, {})
    split = world_pool.run(2, _alibi, {"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "speed"})
    assert split == pytest.approx([whole, whole], rel=1e-6)
