"""Parity of preference training with one process of plain transformers, torch and peft, on every axis.

The oracle renders, masks and packs by itself, keeps an untouched model as the reference, and computes the loss pair by
pair. Answers have from 2 to 24 tokens, steps do not divide over the ranks, and an epoch ends within a step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma import modeling_gemma

from shardwise.errors import ConfigError
from shardwise.job.schema import Job, PrecisionSection
from shardwise.model.facts import ModelFacts
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training import precomputed_reference
from shardwise.training.objectives.preference import DirectPreference
from shardwise.training.session import Session
from shardwise.training.setup import study
from tests.data.chats import PLAIN, byte_tokenizer, write_rows
from tests.parity.jobs import verify_one
from tests.parity.test_adapters import against_peft
from tests.parity.test_rows import CONFIGS, EPOCH, EVERY_LAYOUT, FIVE, LAYOUTS, LENGTH

LORA = {"kind": "lora", "rank": 3, "alpha": 5.0}
# lora_B is zero at first, and A's gradient with it: what Adam divides by is rounding for some of its elements.
OPTIMIZER = {"learning_rate": 0.02, "warmup_steps": 0, "options": {"eps": 1e-4}}


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with preferences as texts and as messages, and a tokenizer."""
    directory = tmp_path_factory.mktemp("preferences")
    byte_tokenizer(directory / "tokenizer", PLAIN)
    draw, texts, chats = random.Random(4), [], []
    for _ in range(60):
        a, b = draw.randrange(10), draw.randrange(10)
        question, answer = f"{a}+{b}?", " ".join([str(a + b)] * draw.choice([1, 1, 1, 7]))
        other = " ".join([str(abs(a - b))] * draw.choice([1, 1, 1, 7])) + "!"
        texts.append({"prompt": question, "chosen": answer, "rejected": other})
        answers = [{"role": "assistant", "content": text} for text in (answer, other)]
        prompt = [{"role": "user", "content": question}]
        chats.append({"prompt": prompt, "chosen": answers[:1], "rejected": answers[1:]})
    write_rows(directory / "texts.jsonl", texts)
    write_rows(directory / "chats.jsonl", chats)
    return directory


def preference_job(
    directory: Path, family: str, layout: str, rows: str = "texts", adapter: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None, model: dict[str, Any] | None = None, dpo: dict[str, Any] | None = None,
    **data: Any,
) -> Job:  # fmt: skip
    keys = {"path": str(directory / f"{rows}.jsonl"), "tokenizer": str(directory / "tokenizer"), "format": "preference"}
    return Job.model_validate(
        {
            "model": {"config": {"model_type": family, **CONFIGS[family], **(model or {})}},
            "adapter": adapter or {},
            "parallel": {"device": "cpu", **EVERY_LAYOUT[layout][1]},
            "precision": {"compute": "fp64"},
            "optimizer": OPTIMIZER,
            "training": {"dpo": {"beta": 0.7, **(dpo or {})}, **(training or FIVE)},
            "data": {**keys, "sequence_length": LENGTH, "cache_directory": str(directory / "cache"), **data},
        }
    )


def check(world_pool: WorldPool, job: Job, layout: str) -> None:
    """The report agrees, and is exact but for Gemma, whose norms compute in fp32."""
    # peft names parameters of stacks as its files do, so those are compared with the oracle's own adapters.
    verified = verify_with_facts if job.adapter.kind == "none" or job.adapter.target_parameters else against_peft
    report = world_pool.run(EVERY_LAYOUT[layout][0], verified, job, study(job), timeout=600)[0]
    assert report.agrees, f"{job.parallel} {job.data} {job.training}\n{report.first}\n{report.diagnosis}"
    assert report.max_relative_error < (1e-6 if job.model.config["model_type"] == "gemma" else 1e-9)  # type: ignore[index]


def verify_with_facts(job: Job, facts: ModelFacts) -> VerifyReport | None:
    return verify_one(job, 3, facts)


QUICK: dict[str, dict[str, Any]] = {
    "context 2": {},
    "pipeline 2": {"adapter": LORA, "dpo": {"precompute_reference": True}},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", QUICK)
def test_preferences_on_two_ranks(world_pool: WorldPool, preferences: Path, layout: str) -> None:
    check(world_pool, preference_job(preferences, "llama", layout, **QUICK[layout]), layout)


IN_FP32 = {  # seed, learning rate, betas and beta
    "margins that nearly cancel": (3, 0.005, [0.95, 0.99], 0.7),
    "weight decay that cancels clipped gradients": (6, 0.001, [0.8, 0.95], 0.3),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", IN_FP32)
def test_ipo_in_fp32_is_allowed_its_rounding(world_pool: WorldPool, preferences: Path, case: str) -> None:
    seed, rate, betas, beta = IN_FP32[case]
    training = {**FIVE, "seed": seed, "dpo": {"beta": beta, "loss": "ipo"}}
    job = preference_job(preferences, "llama", "shard 2", training=training)
    options = {"name": "Adam", "learning_rate": rate, "options": {"betas": betas}}
    update = {"precision": PrecisionSection(compute="fp32"), "optimizer": job.optimizer.model_copy(update=options)}
    report = world_pool.run(2, verify_with_facts, job.model_copy(update=update), study(job), timeout=600)[0]
    assert report.agrees, f"{report.first}\n{report.diagnosis}"


@pytest.mark.sampled(1)
def test_ipo_in_fp16_may_overflow_in_its_first_steps(world_pool: WorldPool, preferences: Path) -> None:
    """The model is its reference until it is updated, and each loss a plain fraction."""
    job = preference_job(preferences, "llama", "shard 2", dpo={"beta": 0.1, "loss": "ipo", "length_normalised": True})
    job = job.model_copy(update={"precision": PrecisionSection(compute="fp16")})
    report = world_pool.run(2, verify_with_facts, job, study(job), timeout=600)[0]
    assert report.agrees, f"{report.first}\n{report.diagnosis}"
    assert any("overflowed" in note for note in report.notes)


OF_EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"model": {"num_local_experts": 4}},
    # Named, since peft's all-linear adapts Mixtral's routers too, which are no nn.Linear.
    "lora beside experts": {
        "model": {"num_local_experts": 4},
        "adapter": {**LORA, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    },
    "lora of experts": {
        "model": {"num_local_experts": 4, "experts_implementation": "eager"},
        "adapter": {**LORA, "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chats": {"rows": "chats", "training": EPOCH, "dpo": {"label_smoothing": 0.2}},
    "ipo": {"dpo": {"loss": "ipo"}, "packing": False},
    "length": {"dpo": {"length_normalised": True}, "truncation": True, "sequence_length": 22},
    "lora": {"adapter": LORA},
    "lora with dropout": {"adapter": {**LORA, "dropout": 0.3}, "dpo": {"label_smoothing": 0.1}},
    "dora": {"adapter": {**LORA, "kind": "dora"}, "dpo": {"loss": "ipo", "length_normalised": True}},
    "precomputed": {"training": EPOCH, "dpo": {"precompute_reference": True}},
    "lora precomputed": {"adapter": LORA, "dpo": {"precompute_reference": True}},
    "lora with a saved head": {
        "adapter": {**LORA, "modules_to_save": ["lm_head"]},
        "model": {"tie_word_embeddings": False},
    },
}
FAMILIES = ("llama", "gpt2", "qwen3")
CASES = [
    pytest.param(family, layout, name, id=f"{family}-{layout}-{name}")
    for family in FAMILIES
    for layout in LAYOUTS
    for name in VARIANTS
]
MORE = [
    *(
        pytest.param("gemma", layout, name, id=f"gemma-{layout}-{name}")
        for layout in LAYOUTS
        for name in ("whole", "lora", "dora")
    ),
    *(
        pytest.param("mixtral", layout, name, id=f"mixtral-{layout}-{name}")
        for layout in LAYOUTS
        for name in ("experts", "lora beside experts")
    ),
    pytest.param("mixtral", "expert 2", "experts", id="mixtral-expert 2-experts"),
    pytest.param("mixtral", "expert 2", "lora beside experts", id="mixtral-expert 2-lora beside experts"),
    pytest.param("mixtral", "expert 2", "lora of experts", id="mixtral-expert 2-lora of experts"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "name"), CASES + MORE)
def test_preferences_on_every_layout(
    world_pool: WorldPool, preferences: Path, family: str, layout: str, name: str
) -> None:
    check(world_pool, preference_job(preferences, family, layout, **(VARIANTS | OF_EXPERTS)[name]), layout)


def in_fp64_throughout(job: Job, facts: ModelFacts) -> VerifyReport | None:
    def norm(self: Any, hidden: Tensor) -> Tensor:
        scaled: Tensor = hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)
        return scaled

    def embed(self: Any, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight, self.padding_idx) * self.scalar_embed_scale

    with (
        mock.patch.object(modeling_gemma.GemmaRMSNorm, "forward", norm),
        mock.patch.object(modeling_gemma.GemmaTextScaledWordEmbedding, "forward", embed),
    ):
        return verify_one(job, 3, facts)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(modeling_gemma, "GemmaTextScaledWordEmbedding"), reason="embeddings have no scale yet")
@pytest.mark.parametrize("layout", ["shard 4", "tensor 2"])
def test_gemma_is_exact_where_it_computes_in_fp64(world_pool: WorldPool, preferences: Path, layout: str) -> None:
    """Its norms compute in fp32, and the scale of its embeddings is rounded to it; nothing else differs."""
    job = preference_job(preferences, "gemma", layout)
    report = world_pool.run(EVERY_LAYOUT[layout][0], in_fp64_throughout, job, study(job), timeout=600)[0]
    assert report.agrees and report.max_relative_error < 1e-9, (report.first, report.max_relative_error)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["copy", "adapters off"])
def test_preferences_in_16_bits(world_pool: WorldPool, preferences: Path, adapter: dict[str, Any]) -> None:
    """First in fp64, then with gradients held to the noise of rounding."""
    job = preference_job(preferences, "llama", "tensor 2", adapter=adapter)
    job = job.model_copy(update={"precision": PrecisionSection(compute="bf16")})
    report = world_pool.run(2, verify_with_facts, job, study(job))[0]
    assert report.agrees, (report.first, report.diagnosis)


def with_fault(job: Job, facts: ModelFacts) -> VerifyReport | None:
    with FAULTS["reference_not_frozen"]():
        return verify_one(job, 3, facts)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["copy", "adapters off"])
def test_verify_names_a_reference_that_is_not_frozen(
    world_pool: WorldPool, preferences: Path, adapter: dict[str, Any]
) -> None:
    job = preference_job(preferences, "llama", "shard 2", adapter=adapter)
    report = world_pool.run(2, with_fault, job, study(job))[0]
    assert not report.agrees and report.fault == "reference_not_frozen", report.diagnosis


def losses_of(job: Job, steps: int) -> list[float]:
    """Train so many steps, from a checkpoint where there is one, and save each."""
    with Session(job, device=torch.device("cpu")) as session:
        done = session.restore()
        losses = []
        for batches in session.batches():
            losses.append(session.step(batches).loss)
            session.save(wait=True)
            if done + len(losses) == steps:
                break
    return losses


def resumed(job: Job) -> tuple[list[float], list[float]]:
    """Return the losses of three steps, and of the third alone, after two of them."""
    whole = losses_of(job.model_copy(update={"output": f"{job.output}-whole"}), 3)
    losses_of(job, 2)
    checkpoint = job.checkpoint.model_copy(update={"resume": "auto"})
    return whole, losses_of(job.model_copy(update={"checkpoint": checkpoint}), 3)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["copy", "adapters off"])
def test_a_resumed_run_has_the_reference_of_its_start(
    world_pool: WorldPool, preferences: Path, tmp_path: Path, adapter: dict[str, Any]
) -> None:
    job = preference_job(preferences, "llama", "shard 2", adapter=adapter)
    job = job.model_copy(update={"output": str(tmp_path / "run")})
    whole, rest = world_pool.run(2, resumed, job)[0]
    assert len(whole) == 3 and rest == whole[2:]
    assert abs(whole[2] - whole[0]) > 1e-3  # the logarithm of 2, which a reference of the resumed weights would give


def numbers_of(job: Job) -> list[float]:
    """Train two steps and evaluate: losses, norms of gradients, rewards, and those of held-out pairs.

    Ahead of the first update the accuracy of rewards is of two that are equal but for rounding.
    """
    numbers: list[float] = []
    with Session(job, device=torch.device("cpu")) as session:
        assert job.training.dpo.precompute_reference <= (session.model.reference is None)
        for batches, _ in zip(session.batches(), range(2)):
            result = session.step(batches)
            numbers += [
                result.loss,
                result.grad_norm,
                result.metrics["rewards_chosen"],
                result.metrics["rewards_margin"],
            ]
        session.evaluate()
        return numbers + [value for value in session.evaluated.values() if isinstance(value, float)]


def numbers_of_each(plain: Job, precomputed: Job, others: list[Job]) -> list[list[float]]:
    """Return those without and with a cache, then of a second run and of the other jobs, none of which computes any."""
    first = [numbers_of(plain), numbers_of(precomputed)]
    with mock.patch.object(precomputed_reference, "_computed", side_effect=AssertionError("they are in the cache")):
        return first + [numbers_of(job) for job in [precomputed, *others]]


TWO = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["copy", "adapters off"])
@pytest.mark.parametrize("layout", TWO)
def test_precomputed_log_probabilities_give_the_same_numbers(
    world_pool: WorldPool, preferences: Path, tmp_path: Path, layout: str, adapter: dict[str, Any]
) -> None:
    """A run has the numbers of one without, and runs on other layouts read what it has written."""

    def job(on: str, precompute: bool) -> Job:
        dpo = {"precompute_reference": precompute}
        return preference_job(preferences, "llama", on, adapter=adapter, dpo=dpo, cache_directory=str(tmp_path))

    others = [job(other, True) for other in TWO if other != layout]
    plain, *rest = world_pool.run(2, numbers_of_each, job(layout, False), job(layout, True), others, timeout=600)[0]
    for number, numbers in enumerate(rest):
        assert numbers == pytest.approx(plain, rel=1e-12 if number < 2 else 1e-9, abs=1e-12), number


def references_of(job: Job) -> tuple[list[Tensor | None], list[Tensor | None], str]:
    """Return log-probabilities of a step's completions, as its batches have them and as its model gives them."""
    with Session(job, device=torch.device("cpu")) as session:
        objective = session.assembled.objective
        assert isinstance(objective, DirectPreference)
        batches = next(session.batches())
        bare = [replace(batch, reference=None) for batch in batches]
        computed = [batch.reference for batch in objective.with_reference(bare, 0)]
        with pytest.raises(ConfigError, match=r"take those of session\.batches"):
            session.step(bare)
        return [batch.reference for batch in batches], computed, session.assembled.data.reference_note


def test_precomputed_log_probabilities_are_kept(world_pool: WorldPool, preferences: Path, tmp_path: Path) -> None:
    def read(**keys: Any) -> tuple[list[Tensor], list[Tensor], str]:
        dpo = {"precompute_reference": True}
        job = preference_job(preferences, "llama", "shard 2", dpo=dpo, cache_directory=str(tmp_path), **keys)
        result: tuple[list[Tensor], list[Tensor], str] = world_pool.run(1, references_of, job)[0]
        return result

    kept, computed, note = read()
    assert "are computed" in note and len(kept) == 5
    for values, expected in zip(kept, computed, strict=True):
        assert values.lt(0).any() and torch.allclose(values, expected, rtol=1e-12, atol=0.0)
    again, _, note = read(training={**FIVE, "microbatch_size": 5})  # another run of the same weights and rows
    assert "are read from" in note and torch.equal(again[0], torch.cat(kept))
    others, _, note = read(training={**FIVE, "seed": 1})  # draws other weights
    assert "are computed" in note and not torch.equal(others[0], kept[0])
    for file in tmp_path.glob("references/*/*.safetensors"):
        file.write_bytes(b"no tensors")
    with pytest.raises(WorldError, match=r"cached log-probabilities .* cannot be read .*; delete it"):
        read()
