"""Tiny jobs for the parity tests: 26 wide, 13 rows somewhere, 97 tokens, sequences of 16."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from shardwise.commands.verify import verify_rank
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study

LENGTH = 16
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 26, "n_head": 2, "n_layer": 3, "n_inner": 13, "n_positions": LENGTH},
    "gpt_neox": {
        "model_type": "gpt_neox", "hidden_size": 26, "num_attention_heads": 1, "num_hidden_layers": 2,
        "intermediate_size": 13, "max_position_embeddings": LENGTH, "rope_parameters": {"rope_type": "default",
        "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "llama": {
        "model_type": "llama", "hidden_size": 26, "num_attention_heads": 1, "num_key_value_heads": 1,
        "num_hidden_layers": 2, "intermediate_size": 13, "max_position_embeddings": LENGTH,
    },
    "bert": {
        "model_type": "bert", "hidden_size": 26, "num_attention_heads": 2, "num_hidden_layers": 3,
        "intermediate_size": 13, "max_position_embeddings": LENGTH,
    },
}  # fmt: skip
VOCABULARY = 97
DROPOUT_FIELDS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    **dict.fromkeys(("llama", "mistral", "qwen3", "gemma"), ("attention_dropout",)),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gptj": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neo": ("resid_dropout", "embed_dropout", "attention_dropout"),
    "opt": ("dropout", "attention_dropout"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "falcon": ("hidden_dropout", "attention_dropout"),
}


def write_tokens(directory: Path) -> str:
    """A corpus of token documents of many lengths; returns its path."""
    path = directory / "tokens.jsonl"
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(120):
            ids = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(3, 40))]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return str(path)


def write_text(directory: Path) -> str:
    """A corpus of text, for masked language models, which need a tokenizer's mask token."""
    path = directory / "text.txt"
    draw = random.Random(2)
    path.write_text("\n".join("".join(chr(draw.randrange(97, 123)) for _ in range(60)) for _ in range(80)))
    return str(path)


def make_job(
    directory: str | Path,
    family: str = "gpt2",
    *,
    tied: bool = True,
    dropout: float = 0.0,
    attention: str = "eager",
    layers: int | None = None,
    **sections: dict[str, Any],
) -> Job:
    """A tiny job; `sections` add to those of the Job. The corpora are in `directory`."""
    config = dict(MODELS[family], tie_word_embeddings=tied)
    if layers is not None:
        config["n_layer" if family == "gpt2" else "num_hidden_layers"] = layers
    config |= dict.fromkeys(DROPOUT_FIELDS[family], dropout)
    masked = family == "bert"
    data: dict[str, Any] = {"sequence_length": LENGTH, "cache_directory": str(Path(directory) / "cache")}
    if masked:
        data |= {"path": str(Path(directory) / "text.txt"), "vocabulary_size": 262, "format": "text"}
    else:
        config["vocab_size"] = VOCABULARY
        data |= {"path": str(Path(directory) / "tokens.jsonl"), "format": "tokens"}
    base: dict[str, dict[str, Any]] = {
        "model": {"config": config, "task": "masked_lm" if masked else "causal_lm", "attention": attention},
        "parallel": {"device": "cpu"},
        "precision": {"compute": "fp64"},
        "training": {"steps": 4, "sequences_per_step": 8},
        "data": data,
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    if base["precision"]["compute"] == "fp16" and base["model"].get("attention") == "eager":
        base["model"]["attention"] = "auto"  # eager is refused there, since its scores overflow
    return Job.model_validate(base)


ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
TENSOR_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_inner": 13, "n_positions": LENGTH},
    "gpt_neox": {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 13,
        "max_position_embeddings": LENGTH, "rope_parameters": {**ROTARY, "partial_rotary_factor": 1.0},
    },
    "llama": {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 13, "max_position_embeddings": LENGTH, "attention_bias": True,
    },
    "mistral": {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 14, "max_position_embeddings": LENGTH, "head_dim": 6,
    },
    "gemma": {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 13, "max_position_embeddings": LENGTH, "head_dim": 8,
    },
    "qwen3": {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 13, "max_position_embeddings": LENGTH, "head_dim": 6,
    },
    "mixtral": {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 13, "max_position_embeddings": LENGTH, "num_local_experts": 3,
        "experts_implementation": "batched_mm",
    },
    "gptj": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_inner": 13, "n_positions": LENGTH, "rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": 24, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "intermediate_size": 13, "max_position_embeddings": LENGTH, "window_size": 4,
    },
    "opt": {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 13, "word_embed_proj_dim": 24,
        "max_position_embeddings": LENGTH,
    },
    "bert": {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 13,
        "max_position_embeddings": LENGTH,
    },
    "roberta": {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 13,
        "max_position_embeddings": LENGTH + 2,
    },
    "bloom": {"hidden_size": 24, "n_head": 4, "n_layer": 2},
    "falcon": {
        "hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True,
        "num_hidden_layers": 2, "ffn_hidden_size": 13, "max_position_embeddings": LENGTH,
    },
}  # fmt: skip


LAYERS = ("n_layer", "num_hidden_layers", "num_layers")


def tensor_job(
    directory: str | Path,
    family: str,
    *,
    tied: bool = True,
    dropout: float = 0.0,
    layers: int | None = None,
    config: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Job:
    """A tiny job of a model whose heads 2 or 4 tensor ranks can share; its MLP is 13 wide, and it has 2 blocks.

    `config` changes the model's.
    """
    more = config or {}
    config = {"model_type": family, "vocab_size": VOCABULARY, "tie_word_embeddings": tied, **TENSOR_CONFIGS[family]}
    config |= dict.fromkeys(DROPOUT_FIELDS.get(family, ()), dropout) | more
    if layers is not None:
        config[next(key for key in LAYERS if key in config)] = layers
        if family == "gpt_neo":
            config["attention_types"] = [[["global", "local"], layers // 2], [["global"], layers % 2]]
    if family in ("bert", "roberta"):  # a masked model has the vocabulary of a tokenizer
        del config["vocab_size"]
        model = {"config": config, "attention": "eager", "task": "masked_lm"}
        return make_job(directory, "bert", model=model, **sections)
    model = {"config": config, "attention": "eager", **sections.pop("model", {})}
    return make_job(directory, model=model, **sections)


class Pairs:
    """Token sequences for an encoder and a decoder, with labels; with `uneven` each is one longer than that before."""

    def __init__(self, size: int = 64, uneven: bool = False) -> None:
        self.ids = torch.randint(1, VOCABULARY, (size, 3, LENGTH - 3), generator=torch.Generator().manual_seed(3))
        self.uneven = uneven

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index, :, : 3 + index % (LENGTH - 6)] if self.uneven else self.ids[index]
        return dict(zip(("input_ids", "decoder_input_ids", "labels"), ids, strict=True))


def make_t5(dropout: float, tied: bool, gated: bool, blocks: tuple[int, int] = (2, 2)) -> nn.Module:
    """A tiny T5 with the task's own layers; `blocks` of encoder and decoder."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=5, d_ff=13, num_heads=4, dropout_rate=dropout,
        num_layers=blocks[0], num_decoder_layers=blocks[1], tie_word_embeddings=tied, attn_implementation="eager",
        feed_forward_proj="gated-gelu" if gated else "relu",
        relative_attention_num_buckets=8, relative_attention_max_distance=10, initializer_factor=0.5, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def t5_job(
    directory: str | Path, dropout: float = 0.1, tied: bool = True, gated: bool = False,
    blocks: tuple[int, int] = (2, 2), **sections: Any,
) -> Job:  # fmt: skip
    """A tiny job of an encoder and a decoder, which come from a factory, as its data does."""
    arguments = {"dropout": dropout, "tied": tied, "gated": gated, "blocks": blocks}
    model = {"factory": "tests.parity.jobs:make_t5", "loss": None, "factory_arguments": arguments}
    return make_module_job(directory, model=model, **{"data": {"factory": "tests.parity.jobs:Pairs"}, **sections})


def span_job(
    directory: str | Path, dropout: float = 0.1, tied: bool = True, gated: bool = False,
    blocks: tuple[int, int] = (2, 2), **sections: Any,
) -> Job:  # fmt: skip
    """A tiny T5 of a config, which fills in spans of text that are left out."""
    config = {
        "model_type": "t5", "d_model": 24, "d_kv": 5, "d_ff": 13, "num_heads": 4,
        "num_layers": blocks[0], "num_decoder_layers": blocks[1], "dropout_rate": dropout, "tie_word_embeddings": tied,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "initializer_factor": 0.5,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    data = {"vocabulary_size": 360, "format": "text", "path": str(Path(directory) / "text.txt"), "sequence_length": 20}
    model = {"config": config, "task": "seq2seq_lm", "attention": "eager", **sections.pop("model", {})}
    return make_job(directory, "gpt2", model=model, **{**sections, "data": data | {"mean_span_length": 2.0}})


def verify_one(job: Job, steps: int = 3, facts: ModelFacts | None = None) -> VerifyReport | None:
    """Run on every rank of a world."""
    return verify_rank(job, torch.device("cpu"), steps, facts or facts_of(job))


_known: dict[str, ModelFacts] = {}


def facts_of(job: Job) -> ModelFacts:
    """Return the facts of the job's model, which is studied once in a process for all jobs with equal facts.

    Not for jobs with a planted fault, which may lie in how a model is built or studied.
    """
    key = job.model_dump_json(
        include={"model": True, "adapter": True, "data": {"sequence_length", "factory", "added_tokens"}}
    )
    is_staged = job.parallel.pipeline_parallel_degree > 1
    if is_staged and key in _known and not _known[key].supports(Axis.PIPELINE).ok:
        key += " cut by a trace"
    if key not in _known:
        _known[key] = study(job)
    return _known[key]


def check_agrees(pool: WorldPool, ranks: int, job: Job) -> None:
    """`job` on `ranks` ranks computes what one process computes; two steps tell what three do."""
    report = pool.run(ranks, verify_one, job, 2, facts_of(job))[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)


# --- a user's own module ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, inner), nn.Linear(inner, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Regression(nn.Module):
    """Blocks, a buffer, functional dropout, and a weight used twice."""

    def __init__(self, width: int = 6, inner: int = 13, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width, inner) for _ in range(depth))
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x) * self.scale, 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def squared_error(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """(sum over the counted samples, how many)."""
    each = (output - batch.labels).square().flatten(1).mean(-1)
    return (each * batch.counted).sum(), batch.counted.sum()


class Points:
    """A map-style data set; with `lengths` of as many points a sample in turn."""

    def __init__(self, size: int = 64, width: int = 6, lengths: Sequence[int] = ()) -> None:
        self.x = torch.randn(size, max(lengths, default=1), width, generator=torch.Generator().manual_seed(3))
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        points = self.x[index]
        x = points[: self.lengths[index % len(self.lengths)]] if self.lengths else points[0]
        return {"x": x, "labels": x.roll(1, -1)}


def make_module_job(directory: str | Path, **sections: dict[str, Any]) -> Job:
    """A job of the user's own module and data."""
    here = "tests.parity.jobs"
    base: dict[str, dict[str, Any]] = {
        "model": {"factory": f"{here}:Regression", "loss": f"{here}:squared_error"},
        "parallel": {"device": "cpu"},
        "precision": {"compute": "fp64"},
        "training": {"steps": 4, "sequences_per_step": 8},
        "data": {"factory": f"{here}:Points", "cache_directory": str(Path(directory) / "cache")},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Job.model_validate(base)


# --- modules that are no chain of blocks -----------------------------------------------------------------------------


class SkipNet(nn.Module):
    """Two lists of blocks, the second of which also reads what the first made, in reverse; a mask made of numbers."""

    def __init__(self, width: int = 6, inner: int = 13, depth: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.down = nn.ModuleList(Layer(width, inner) for _ in range(depth))
        self.up = nn.ModuleList(Layer(width, inner) for _ in range(depth))
        self.middle = nn.Linear(width, width, bias=False)
        self.shared = nn.Dropout(0.2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[-1], device=x.device) < 5
        kept, x = [], nn.functional.dropout(self.first(x), 0.1, self.training)
        for block in self.down:
            x = x + self.shared(block(x) * self.scale)
            kept.append(x)
        x = torch.tanh(self.middle(x)) + torch.tensor(0.25)
        for block in self.up:
            x = self.shared(block(x + kept.pop())) * mask
        return self.last(x)


class Interleaved(nn.Module):
    """Blocks of two lists in turns on two streams, with a weight that is tied across the ends."""

    def __init__(self, width: int = 6, inner: int = 13, depth: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.left = nn.ModuleList(Layer(width, inner) for _ in range(depth))
        self.right = nn.ModuleList(Layer(width, inner) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        a = b = self.first(x)
        for left, right in zip(self.left, self.right, strict=True):
            a, b = a + left(b), b + right(a)
        return self.last(a * b)


class Branching(SkipNet):
    """Its forward goes one way or the other by what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Everywhere(SkipNet):
    """One weight is used between all blocks; of two dropouts one drops nothing, and the other is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.down, *self.up):
            x = nn.functional.dropout(self.beside(block(x)), 0.0, self.training)
            x = nn.functional.dropout(x, 0.1, self.training, inplace=True)
        return self.last(self.middle(self.first(x)))


class Counting(SkipNet):
    """It counts its calls where it begins, and reads the count where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        return super().forward(x) / self.calls.clone()


class InPlace(SkipNet):
    """It scales its input where that is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))
