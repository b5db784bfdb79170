"""Small conversations, a tokenizer of single bytes, and chat templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.job.schema import Job

END = "<|end|>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PLAIN = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Qwen3's: only the last answer is shown with its thoughts.
FORGETFUL = PLAIN.replace("m['content']", "('~' if loop.last and m['role'] == 'assistant' else '') + m['content']")

CHATS = [
    [("user", "2+3?"), ("assistant", "5")],
    [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "And 4+4?"), ("assistant", "8, I think")],
    [("user", "Hello"), ("assistant", "Hi"), ("user", "Bye")],
    [("user", "A question that is much longer than all the others?"), ("assistant", "No.")],
    [("user", "6+1?"), ("assistant", "7")],
    [("user", "Name three."), ("assistant", "One, two, three.")],
]


def byte_tokenizer(directory: Path, template: str | dict[str, str] | None = None) -> Path:
    """Save a tokenizer with a token for each byte and one for the end."""
    vocabulary = {END: 0} | {letter: number for number, letter in enumerate(BYTES, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = template
    wrapped.save_pretrained(str(directory))
    return directory


def as_messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_job(directory: Path, rows: list[dict[str, Any]], template: str | dict[str, str] = PLAIN, **data: Any) -> Job:
    """A job on these rows with the tokenizer of bytes; `data` are keys of its data section."""
    tokenizer = byte_tokenizer(directory / "tokenizer", template)
    path = write_rows(directory / "rows.jsonl", rows)
    defaults = {"path": str(path), "tokenizer": str(tokenizer), "cache_directory": str(directory / "cache")}
    return Job.model_validate({"data": {**defaults, "sequence_length": 64, "validation_fraction": 0.2, **data}})
