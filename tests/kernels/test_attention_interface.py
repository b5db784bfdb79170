"""Every family with every kernel that runs here, against its own eager attention in untouched transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, T5ForConditionalGeneration

from shardwise.kernels.attention import masks
from shardwise.kernels.attention.interface import use_attention_kernel
from shardwise.kernels.dropout import DropoutScope, dropout_scope
from shardwise.model.registry import known_families
from shardwise.model.replacements import replace_attention
from tests.parity.jobs import TENSOR_CONFIGS, VOCABULARY

LENGTH = 16
GROUPED = TENSOR_CONFIGS["gemma"]
CONFIGS: dict[str, dict[str, Any]] = {
    **TENSOR_CONFIGS,
    "mistral": {**TENSOR_CONFIGS["mistral"], "sliding_window": 5},
    "mixtral": {**TENSOR_CONFIGS["mixtral"], "sliding_window": 5},
    "gemma2": {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": {**GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "falcon alibi": {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "alibi": True,
                     "new_decoder_architecture": False, "multi_query": False},
    "t5": {"d_model": 24, "d_kv": 6, "d_ff": 13, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
           "relative_attention_max_distance": 10, "decoder_start_token_id": 0},
}  # fmt: skip
FAMILIES = sorted(CONFIGS)
MASKED = ("bert", "roberta")
KERNELS = ("auto", "eager", "sdpa", "blockwise")
CANNOT = {("gemma2", "sdpa"), ("t5", "blockwise"), ("falcon alibi", "eager")}  # cap; gradient of a bias; reference
COUNTS_TOKENS = ("bloom", "falcon", "falcon alibi", "opt")  # by a mask [B, S], and they take no other
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9, [0] * 11 + [1] * 5])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "BLOCK", 6)


def test_every_family_is_here() -> None:
    with_kernels = {name for name, family in known_families().items() if family.attention is not None}
    assert {name.partition(" ")[0] for name in CONFIGS} == with_kernels


def models(family: str, dtype: torch.dtype, kernel: str) -> tuple[Any, Any]:
    """(transformers' own with eager attention, the same weights led to a kernel)."""
    kind = family.partition(" ")[0]
    config = CONFIG_MAPPING[kind](**{"vocab_size": VOCABULARY, **CONFIGS[family]})
    config.use_cache = False
    for name, value in list(vars(config).items()):
        if ("drop" in name or name == "dropout_rate") and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    made = AutoModelForMaskedLM if kind in MASKED else AutoModelForCausalLM
    reference = "sdpa" if family == "falcon alibi" else "eager"  # transformers' eager one adds its ALiBi twice
    if kind == "t5":
        config._attn_implementation = reference
        theirs: nn.Module = T5ForConditionalGeneration(config)
    else:
        theirs = made.from_config(config, attn_implementation=reference)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1 if kind == "t5" or parameter.dim() == 1 else 4)  # scores that differ; T5's do
    ours = copy.deepcopy(theirs).to(dtype).train()
    replace_attention(ours)
    use_attention_kernel(ours, kernel)
    return theirs.to(dtype).train(), ours


def inputs(family: str) -> dict[str, Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if family == "t5" else {})


def outcome(model: Any, arguments: dict[str, Tensor], counted: Tensor | None = None) -> dict[str, Tensor]:
    """Logits, and the gradients of all parameters from a fixed gradient at the counted positions."""
    model.zero_grad()
    logits = model(**arguments).logits
    if counted is not None:
        logits = logits.masked_fill(~counted.unsqueeze(-1), 0.0)
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype)
    logits.backward(upstream)
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach(), **grads}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference relative to its tensor's largest element; of gradients that are nothing but rounding (of key
    biases, which softmax cancels) relative to the largest of all."""
    assert ours.keys() == theirs.keys()
    whole = max(float(value.abs().max()) for name, value in theirs.items() if name != "logits")
    scales = {name: max(float(value.abs().max()), 1e-2 * whole) for name, value in theirs.items()}
    return max(float((ours[name] - value).abs().max()) / scales[name] for name, value in theirs.items())


def matrix() -> Iterator[Any]:
    """In the default run every family with `auto` in fp32 and one more kernel; everything else is slow."""
    for number, family in enumerate(FAMILIES):
        for kernel in KERNELS:
            for dtype in TOLERANCE:
                short = dtype == torch.float32 and kernel in ("auto", KERNELS[1 + number % 3])
                if (family, kernel) not in CANNOT:
                    yield pytest.param(family, kernel, dtype, marks=() if short else pytest.mark.slow)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family, kernel, dtype", list(matrix()))
def test_forward_and_gradients(family: str, kernel: str, dtype: torch.dtype) -> None:
    theirs, ours = models(family, dtype, kernel)
    if dtype == torch.float32:
        assert distance(outcome(ours, inputs(family)), outcome(theirs, inputs(family))) < TOLERANCE[dtype]
        return
    # In bf16 two right programs differ by what either rounds: our distance to fp32 is held to that of eager.
    exact = outcome(models(family, torch.float32, kernel)[0], inputs(family))
    found, wanted = (
        {name: value.float() for name, value in outcome(model, inputs(family)).items()} for model in (ours, theirs)
    )
    assert distance(found, exact) < distance(wanted, exact) + TOLERANCE[dtype]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding(family: str) -> None:
    """Columns that are padding count nowhere."""
    theirs, ours = models(family, torch.float32, "auto")
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    seen[1, 11:] = 0
    arguments = {**inputs(family), "attention_mask": seen}
    counted = torch.ones(2, LENGTH, dtype=torch.bool) if family == "t5" else seen.bool()
    assert distance(outcome(ours, arguments, counted), outcome(theirs, arguments, counted)) < 1e-5


def mask_of_numbers() -> Tensor:
    """The first tokens of each row see each other, as a mask of four dims that a caller makes."""
    places = torch.arange(LENGTH)
    seen = (places <= places.view(-1, 1)) | (places < 5)
    return torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in COUNTS_TOKENS])
def test_a_mask_of_the_callers_own(family: str, kernel: str) -> None:
    """It alone says what is hidden, keys ahead too."""
    theirs, ours = models(family, torch.float32, kernel)
    name = "decoder_attention_mask" if family == "t5" else "attention_mask"
    arguments = {**inputs(family), name: mask_of_numbers()}
    assert distance(outcome(ours, arguments), outcome(theirs, arguments)) < 1e-5


@pytest.mark.sampled(9)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "t5"])
def test_documents(family: str) -> None:
    """Packed documents get what each gets alone, windows and biases included."""
    theirs, ours = models(family, torch.float32, "auto")
    ids = inputs(family)["input_ids"]
    packed = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.partition(" ")[0] != "bloom":  # which takes no positions
        starts = torch.tensor([[0] * 7 + [7] * 9, [0] * 11 + [11] * 5])
        count = getattr(theirs.base_model.embeddings, "padding_idx", 0) + 1 if family == "roberta" else 0
        packed["position_ids"] = torch.arange(LENGTH) - starts + count
    with dropout_scope(DropoutScope(0, 0, torch.arange(2), documents=DOCUMENTS)):
        found = ours(**packed).logits
    for row, cut in enumerate((7, 11)):
        alone = [theirs(input_ids=part).logits for part in (ids[row : row + 1, :cut], ids[row : row + 1, cut:])]
        torch.testing.assert_close(found[row : row + 1], torch.cat(alone, 1), rtol=1e-5, atol=1e-5)
