"""Added tokens: a model of a directory whose embeddings grow, on every layout against one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardwise.checkpoint.export import export_checkpoint
from shardwise.job.schema import Job
from shardwise.model.build import load_config
from shardwise.testing.capture import gather
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.setup import set_up, study
from tests.checkpoint.test_adapters import train
from tests.data.chats import END, byte_tokenizer, write_rows
from tests.parity.test_rows import CONFIGS, EVERY_LAYOUT, LENGTH, check

TOKENS = ["<user>", "<assistant>", "<sum>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OLD = 257  # rows of the tokenizer of bytes, and of the models
MODELS = {"llama": ("llama", False), "tied": ("llama", True), "gpt2": ("gpt2", True), "gptj": ("gptj", False)}
GPTJ = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_inner": 13, "n_positions": LENGTH, "rotary_dim": 4}
LORA = {"kind": "lora", "rank": 3, "alpha": 5.0, "modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with rows and small models, each with a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("added")
    (directory / "template.jinja").write_text(TEMPLATE)
    draw = random.Random(5)
    rows = []
    for _ in range(60):
        a, b = draw.randrange(10), draw.randrange(10)
        asked = {"role": "user", "content": f"<sum>{a}+{b}?"}
        answer = {"role": "assistant", "content": " ".join([str(a + b)] * draw.choice([1, 5]))}
        rows.append({"messages": [asked, answer]})
    write_rows(directory / "chats.jsonl", rows)
    for name, (family, tied) in MODELS.items():
        sizes = CONFIGS.get(family, {**GPTJ, "vocab_size": OLD})
        config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)  # biases too are not zero
        model.save_pretrained(directory / name)
        byte_tokenizer(directory / name)
    return directory


def token_job(bases: Path, base: str, layout: str, **sections: dict[str, Any]) -> Job:
    """A job that adds tokens to one of the models."""
    job: dict[str, Any] = {
        "model": {"path": str(bases / base)},
        "parallel": {"device": "cpu", **EVERY_LAYOUT[layout][1]},
        "precision": {"compute": "fp64"},
        "training": {"steps": 4, "sequences_per_step": 5, "microbatch_size": 1},
        "optimizer": {"warmup_steps": 0, "options": {"eps": 1e-4}},
        "data": {
            "path": str(bases / "chats.jsonl"), "format": "chat", "chat_template": str(bases / "template.jinja"),
            "sequence_length": LENGTH, "added_tokens": TOKENS, "cache_directory": str(bases / "cache"),
        },
    }  # fmt: skip
    for name, keys in sections.items():
        job[name] = {**job.get(name, {}), **keys}
    return Job.model_validate(job)


def test_tensor_ranks_share_grown_embeddings(world_pool: WorldPool, bases: Path) -> None:
    """260 rows and a bias, of which the added tokens' lie on the second rank alone."""
    check(world_pool, 2, [token_job(bases, "gptj", "tensor 2")])


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(EVERY_LAYOUT.keys() - {"expert 2"}))
def test_every_layout(world_pool: WorldPool, bases: Path, layout: str) -> None:
    jobs = [token_job(bases, model, layout) for model in MODELS]
    jobs += [token_job(bases, name, layout, adapter=LORA) for name in ("llama", "tied")]
    jobs.append(token_job(bases, "llama", layout, adapter={**LORA, "kind": "dora"}))
    check(world_pool, EVERY_LAYOUT[layout][0], jobs)


def start(job: Job) -> dict[str, Tensor]:
    return gather(set_up(job, torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_rows_start_bit_equal_on_every_layout(world_pool: WorldPool, bases: Path, model: str) -> None:
    starts = [
        world_pool.run(EVERY_LAYOUT[layout][0], start, token_job(bases, model, layout))[0]
        for layout in ("shard 2", "tensor 2", "pipeline 2", "shard 2 x replica 2")
    ]
    grown = [name for name, value in starts[0].items() if value.dim() and len(value) == OLD + len(TOKENS)]
    assert len(grown) == {"llama": 2, "tied": 1, "gpt2": 1, "gptj": 3}[model]
    own = AutoModelForCausalLM.from_pretrained(bases / model).state_dict()
    for other in starts:
        assert all(torch.equal(other[name], value) for name, value in starts[0].items())
        for name in grown:
            assert torch.equal(other[name][:OLD], own[name].double())
            apart = (other[name][OLD:] - own[name].double().mean(0)).abs().max()
            assert 0 < apart < 1e-3 * own[name].double().std()


def saved_run(bases: Path, output: Path, base: str = "llama", **sections: dict[str, Any]) -> Job:
    """A run on tensor ranks that saves checkpoints."""
    keys = {"checkpoint": {"every": 2, "keep_last": 9}, "observe": {"sample": False, "tensorboard": False}, **sections}
    return token_job(bases, base, "tensor 2", **keys).model_copy(update={"output": str(output)})


@pytest.mark.slow
@pytest.mark.parametrize("base", ["llama", "tied"])
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["whole", "lora"])
def test_export_opens_with_its_tokenizer(
    world_pool: WorldPool, bases: Path, tmp_path: Path, adapter: dict[str, Any], base: str
) -> None:
    """As transformers and peft open it; the base's own directory keeps the rows that it had."""
    single = {"compute": "fp32"}
    world_pool.run(2, train, saved_run(bases, tmp_path / "run", base, adapter=adapter, precision=single))
    written = tmp_path / "run" / ("adapter" if adapter else "model")
    whole = export_checkpoint(str(tmp_path / "run"), tmp_path / "whole", merge=bool(adapter))
    opened = (AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM).from_pretrained(written)
    tokenizer = AutoTokenizer.from_pretrained(written)
    ids = tokenizer(f"<user><sum>1+2?{END}<assistant>", return_tensors="pt")["input_ids"]
    assert ids[0, [0, 1, -1]].tolist() == [OLD, OLD + 2, OLD + 1]
    exported = AutoModelForCausalLM.from_pretrained(whole)
    assert exported.config.vocab_size == len(tokenizer) == len(AutoTokenizer.from_pretrained(whole)) == 260
    with torch.no_grad():
        assert torch.allclose(opened.eval()(ids).logits, exported.eval()(ids).logits, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_tokens_alone(world_pool: WorldPool, bases: Path, tmp_path: Path) -> None:
    """Adapters and saved modules are read from a checkpoint, new rows beside them drawn as before."""
    job = saved_run(bases, tmp_path / "run", adapter=LORA)
    world_pool.run(2, train, job)
    resume = {"resume": str(tmp_path / "run" / "checkpoints" / "step-00000002"), "every": 0}
    world_pool.run(2, train, saved_run(bases, tmp_path / "on", adapter=LORA, checkpoint=resume))
    again, first = (load_file(tmp_path / run / "adapter" / "adapter_model.safetensors") for run in ("on", "run"))
    assert all(torch.allclose(again[name], first[name], rtol=0, atol=1e-12) for name in first)
    others = {"added_tokens": [*TOKENS[:2], "<product>"]}
    with pytest.raises(WorldError, match=r"was trained with data.added_tokens=\['<user>', '<assistant>', '<sum>'\]"):
        world_pool.run(2, train, saved_run(bases, tmp_path / "no", adapter=LORA, checkpoint=resume, data=others))


def test_a_plan_knows_the_rows(bases: Path) -> None:
    """Also of a model that is elsewhere, whose tokenizer is taken to be as large as its vocabulary."""
    assert study(token_job(bases, "llama", "shard 2")).vocabulary_size == OLD + len(TOKENS)
    roomy = {"model_type": "llama", **CONFIGS["llama"], "vocab_size": 300}
    own = {"tokenizer": str(bases / "llama")}
    anew = token_job(bases, "llama", "shard 2", model={"path": None, "config": roomy}, data=own)
    assert study(anew).vocabulary_size == 300
    away = {"path": str(bases / "nowhere"), "config": roomy}
    assert load_config(token_job(bases, "llama", "shard 2", model=away)).vocab_size == 303
