"""One forward on fake tensors shows the head, the kinds of dropout and what the blocks are called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_outputs import CausalLMOutput

from shardwise.model.build import build_model, parameters_on_meta
from shardwise.model.discover import find_block_lists
from shardwise.model.probe import ForwardProbe, parameters_without_gradient, probe_forward, unfit_dtypes
from shardwise.testing.widening import WithoutNarrowing, needs_fp32_weights
from tests.habits import keeping
from tests.habits.building import POSITIONS, WIDTH
from tests.model import toys

HEADS = {"bert": "cls.predictions.decoder", "roberta": "lm_head.decoder", "gemma2": None}  # gemma2: soft cap after it
HEAD_BIAS = {"bert", "roberta", "gptj"}
# With every probability at 0.1, under the kernel that transformers chooses.
FUNCTIONAL = {"bloom", "opt", "gemma2", "falcon"}
ALTERNATING = {"gemma2"}  # full and sliding attention: two masks
NO_ATTENTION_DROPOUT = {"falcon"}  # its SDPA path without alibi passes none


def _probe(model: nn.Module, example: dict[str, Tensor] | None = None) -> ForwardProbe:
    return probe_forward(model, find_block_lists(model), 64, example)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("model_type", toys.CONFIGS)
def test_every_family(model_type: str) -> None:
    attention = "eager" if model_type == "gemma2" else "auto"  # its own choice changed between versions
    seen = _probe(build_model(toys.job(model_type, dropout=0.1, attention=attention)))
    assert seen.failure == ""
    assert seen.head == HEADS.get(model_type, "lm_head")
    assert seen.head_has_bias == (model_type in HEAD_BIAS)
    assert seen.has_functional_dropout == (model_type in FUNCTIONAL)
    assert seen.has_attention_dropout == (model_type not in NO_ATTENTION_DROPOUT)
    assert seen.blocks_share_arguments == (model_type not in ALTERNATING)
    assert seen.block_calls == 2


@pytest.mark.sampled(7)
@pytest.mark.parametrize("model_type", toys.CONFIGS)
def test_no_dropout(model_type: str) -> None:
    seen = _probe(build_model(toys.job(model_type, dropout=0.0)))
    assert not seen.has_functional_dropout and not seen.has_attention_dropout


def test_eager_attention_drops_by_a_function() -> None:
    seen = _probe(build_model(toys.job("llama", attention="eager", dropout=0.1)))
    assert seen.has_functional_dropout and seen.has_attention_dropout


@pytest.mark.parametrize("scaled", [{"model_type": "cohere"}, {"model_type": "granite", "logits_scaling": 2.0}])
def test_scaled_logits_are_not_the_heads(scaled: dict[str, Any]) -> None:
    job = toys.job("llama", config=None)
    values = {**toys.WIDE, **scaled}
    seen = _probe(build_model(job.model_copy(update={"model": job.model.model_copy(update={"config": values})})))
    assert seen.failure == "" and seen.head is None


class _WithHead(nn.Module):
    """A language model whose logits are spoilt in the way of `after`."""

    def __init__(self, after: Any, head: type[nn.Linear] = nn.Linear, times: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList([toys.Block(8)])
        self.head = head(8, 30)
        self.after = after
        self.times = times

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        x = self.blocks[0](self.words(input_ids))
        for _ in range(self.times):
            logits = self.head(x)
        return CausalLMOutput(logits=self.after(logits))


class _OtherLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("head", {"after": lambda logits: logits}),
        ("head", {"after": lambda logits: logits.contiguous()}),
        (None, {"after": lambda logits: logits * 2}),
        (None, {"after": lambda logits: logits.mul_(2)}),
        (None, {"after": lambda logits: logits.float()}),
        (None, {"after": lambda logits: logits[:, 1:]}),
        (None, {"after": lambda logits: logits, "head": _OtherLinear}),
        (None, {"after": lambda logits: logits, "times": 2}),
    ],
)
def test_head_must_be_the_last_operation(expected: str | None, arguments: dict[str, Any]) -> None:
    with parameters_on_meta():
        model = _WithHead(**arguments)
    seen = _probe(model)
    assert seen.failure == "" and seen.head == expected and seen.head_has_bias == (expected is not None)


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_by_module_or_function(functional: bool) -> None:
    example = {"x": torch.empty(2, 5, 8)}
    model = build_model(toys.factory_job("tower", factory_arguments={"dropout": 0.5, "functional": functional}))
    assert _probe(model, example).has_functional_dropout is functional
    model.eval()
    assert not _probe(model, example).has_functional_dropout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family, dropped", [("opt", 0.0), ("bart", 0.0), ("bart", 0.1)])
@pytest.mark.parametrize("training", [True, False])
def test_layer_drop_is_seen_before_training_too(family: str, dropped: float, training: bool) -> None:
    name = "layerdrop" if family == "opt" else "encoder_layerdrop"
    small = {"vocab_size": 32, "encoder_layers": 2, "decoder_layers": 2}
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(family, **small, **{name: dropped}))
    seen = probe_forward(model.train(training), find_block_lists(model), 8)
    assert seen.failure == "" and seen.drops_blocks is (dropped > 0)


def test_blocks_called_with_different_arguments() -> None:
    example = {"x": torch.empty(2, 5, 8)}
    same = build_model(toys.factory_job("tower"))
    other = build_model(toys.factory_job("tower", factory_arguments={"own_scales": True}))
    assert _probe(same, example).blocks_share_arguments
    assert not _probe(other, example).blocks_share_arguments


class _Detour(toys.Tower):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scales) * 2  # what a block gets is not what the one before returned
        return self.readout(x)


def test_blocks_that_are_no_chain() -> None:
    with parameters_on_meta():
        model = _Detour()
    assert not _probe(model, {"x": torch.empty(2, 5, 8)}).blocks_share_arguments


class _Undecided(toys.Tower):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return super().forward(x if x.sum() > 0 else -x)


def test_a_forward_that_depends_on_data_gets_the_cautious_answer() -> None:
    with parameters_on_meta():
        model = _Undecided()
    seen = _probe(model, {"x": torch.empty(2, 5, 8)})
    assert "cannot run on fake tensors" in seen.failure
    assert seen == ForwardProbe(failure=seen.failure)


class _Deciding(nn.Module):
    """It decides by values in one of these ways, and reads the weight of a block that does not run."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "a number":
            x = self.blocks[int(x[0, 0, 0] > 0)](x)
        elif self.way == "positions":
            x = self.blocks[0](x[(x > 0).nonzero()[:, 0]])
        else:
            while x.sum().item() != 0.5:
                x = x + x.abs()
        penalty: Tensor = self.blocks[1][0].weight.square().sum()
        return x + penalty


@pytest.mark.parametrize(("way", "reads"), [("a number", True), ("positions", True), ("a loop", False)])
def test_what_a_forward_reads_is_known_where_it_decides_by_values(way: str, reads: bool) -> None:
    with parameters_on_meta():
        model = _Deciding(way)
    probed = probe_forward(model, [["blocks.0", "blocks.1"]], 5, {"x": torch.zeros(2, 5, 8)})
    assert "cannot run on fake tensors" in probed.failure
    assert probed.outside_reads == (("blocks.1.0.weight",) if reads else ())


def test_the_model_is_left_as_it_was() -> None:
    with parameters_on_meta():
        model = _Undecided()
    before, state = torch.get_rng_state(), {name: id(tensor) for name, tensor in model.state_dict().items()}
    buffer = model.scales
    _probe(model, {"x": torch.empty(2, 5, 8)})
    assert not hasattr(model, "kept") and model.scales is buffer and buffer.tolist() == [0.0, 1.0, 2.0]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert list(model.state_dict()) == list(state) and torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_a_model_larger_than_the_machine() -> None:
    config = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    job = toys.job("llama", config={**config, "head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 40})
    model = build_model(job)
    assert sum(p.numel() for p in model.parameters()) * 4 > 1e11
    assert _probe(model).block_calls == 40


class Fp32Router(nn.Module):
    """A model whose router's weight transformers would keep in fp32; it may cast it all the same."""

    _keep_in_fp32_modules_strict = ("router",)

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.embedding, self.router, self.casts = nn.Embedding(7, 4), nn.Parameter(torch.ones(3, 4)), casts

    def forward(self, input_ids: Tensor) -> Tensor:
        weight = self.router.float() if self.casts else self.router
        return nn.functional.linear(self.embedding(input_ids).float(), weight)


def test_a_forward_that_needs_weights_in_fp32_is_found() -> None:
    assert unfit_dtypes(Fp32Router(casts=True), 8) == {}
    assert set(unfit_dtypes(Fp32Router(casts=False), 8)) == {"fp64", "bf16"}
    assert [needs_fp32_weights(Fp32Router(casts).double()) for casts in (True, False)] == [False, True]
    with WithoutNarrowing():
        assert Fp32Router(casts=False).double()(torch.zeros(1, 2, dtype=torch.long)).dtype == torch.float64


def test_caches_of_the_users_files_hold_nothing_of_a_search_for_gradients() -> None:
    keeping.CACHE.clear()
    with parameters_on_meta():
        model = keeping.CachesInGlobals()
    assert not parameters_without_gradient(model, {"x": torch.empty(2, POSITIONS, WIDTH, device="meta")})
    assert not keeping.CACHE
