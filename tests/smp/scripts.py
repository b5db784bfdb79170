"""Training as an SMP script does it, beside plain transformers: what the parity tests run on every rank."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import shardwise.smp as smp
from tests.parity.bart import make_bart

VOCABULARY, LENGTH, ROWS, STEPS = 97, 16, 8, 3
LEARNING_RATE = 0.1
BLOCKS = {"transformer.h", "gpt_neox.layers", "encoder.block", "decoder.block"}
BLOCKS |= {"model.encoder.layers", "model.decoder.layers"}


def make_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny model of three blocks, the same on every rank."""
    torch.manual_seed(3)
    if family == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config: Any = GPT2Config(n_embd=24, n_head=4, n_layer=3, n_positions=LENGTH, vocab_size=VOCABULARY, **off)
        return GPT2LMHeadModel(config).to(dtype)
    if family in ("t5", "t5_tied"):
        tied = family == "t5_tied"
        config = T5Config(
            d_model=24, d_kv=6, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4, vocab_size=VOCABULARY,
            dropout_rate=0.0,
            relative_attention_num_buckets=8, relative_attention_max_distance=10, initializer_factor=0.5,
            feed_forward_proj="relu" if tied else "gated-gelu", tie_word_embeddings=tied, decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).to(dtype)
    if family in ("bart", "marian", "m2m_100"):
        return make_bart(family, (3, 2), dropout=0.0).to(dtype)
    if family == "falcon":
        config = FalconConfig(
            hidden_size=24, num_attention_heads=4, num_kv_heads=2, num_hidden_layers=3, vocab_size=VOCABULARY,
            new_decoder_architecture=True, alibi=False, bias=False, attention_dropout=0.0, hidden_dropout=0.0,
        )  # fmt: skip
        return FalconForCausalLM(config).to(dtype)
    config = GPTNeoXConfig(
        hidden_size=24, num_attention_heads=4, num_hidden_layers=3, intermediate_size=48, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).to(dtype)


def batches() -> Tensor:
    """[steps, rows, length] token ids, the same on every rank."""
    return torch.randint(0, VOCABULARY, (STEPS, ROWS, LENGTH), generator=torch.Generator().manual_seed(5))


@smp.step
def train_step(model: Any, ids: Tensor) -> Tensor:
    """Forward and backward of a causal language model."""
    loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
    model.backward(loss)
    return loss


def replaced_loss(config: dict[str, Any], **creation: Any) -> float:
    """The loss of a GPT-2 whose blocks are those of smp.nn, made with the settings `creation`."""
    smp.init(config)
    try:
        with smp.model_creation(tensor_parallelism=True, **creation):
            module = make_model("gpt2")
        model: Any = smp.DistributedModel(module)
        ids = batches()[0]
        return float(model(input_ids=ids, labels=ids)["loss"].detach())
    finally:
        smp.state.reset()


def reference(model: nn.Module, ways: int, clip: float | None) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by step and piece, and the weights after the steps, of plain torch on one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        losses.append([])
        for piece in batch.chunk(ways):
            loss = model(input_ids=piece, labels=piece).loss
            (loss / ways).backward()
            losses[-1].append(float(loss.detach()))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses, model.state_dict()


def train(
    config: dict[str, Any], family: str, checkpointed: bool = False, reference_dtype: Any = torch.float64
) -> tuple[float, float]:
    """Largest error of the losses, and of the weights after the steps, against plain transformers."""
    os.environ.pop("SM_HP_MP_PARAMETERS", None)
    model = make_model(family, reference_dtype)
    plain = copy.deepcopy(model)
    smp.init(config)
    try:
        return _train(model, plain, config, checkpointed)
    finally:
        smp.state.reset()


def _train(module: nn.Module, plain: nn.Module, config: dict[str, Any], checkpointed: bool) -> tuple[float, float]:
    model = smp.DistributedModel(module)
    if checkpointed:
        for name in BLOCKS & {name for name, _ in module.named_modules()}:
            for block in module.get_submodule(name).children():
                smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), static_loss_scale=1024.0
    )

    shared = config.get("prescaled_batch", False)
    ranks, mine = (smp.rdp_size(), smp.rdp_rank()) if shared else (smp.dp_size(), smp.dp_rank())
    count = config.get("microbatches", 1)
    losses = []
    for batch in batches():
        rows = batch.chunk(ranks)[mine]
        optimizer.zero_grad(set_to_none=True)
        out = train_step(model, rows if smp.pp_rank() == 0 else torch.zeros(len(rows), 0))
        optimizer.step()
        losses.append([float(loss) for loss in out.outputs])
    clip = 1.0 if config.get("sharded_data_parallel_degree", 1) > 1 else None
    expected, weights = reference(plain, ranks * count, clip)
    merged = not shared and smp.tp_size() > 1
    ours = torch.tensor(losses)
    theirs = torch.tensor(expected)[:, mine * count : (mine + 1) * count]
    if merged:  # the loss is of the tensor group's rows together
        size, group = smp.tp_size() * count, smp.rdp_rank()  # in the default placement data ranks count tensors first
        ours = ours.mean(1)
        theirs = torch.tensor(expected)[:, group * size : (group + 1) * size].mean(1)
    found = model.state_dict()
    return _error(ours, theirs), max(_error(found[name], value) for name, value in weights.items())


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-3))
