"""Texts that the model writes behind the prompts of a job, at each of its evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.data.chat_template import read_template
from shardwise.errors import DataError
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record
from shardwise.training.run_end import open_tokenizer
from shardwise.training.sample import continue_greedily
from shardwise.training.setup import AssembledJob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[dict[str, Any]]


class PromptSamples(Callback):
    """Continues the job's prompts at each evaluation, and adds them to its record as `samples`. Collective."""

    def __init__(self, assembled: AssembledJob) -> None:
        self._assembled = assembled
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._prompts: list[list[int]] = []

    def on_start(self, session: ObservedSession) -> None:
        """Render and tokenize the prompts.

        Raises:
            DataError: the data has no tokenizer, or the chat template refuses a prompt, or it has no token.
        """
        prompts = session.job.evaluation.prompts
        if not prompts:
            return
        self._tokenizer = open_tokenizer(self._assembled)
        if self._tokenizer is None:
            raise DataError("evaluation.prompts are texts, and the data has no tokenizer; set data.tokenizer")
        template = read_template(session.job.data)
        for number, prompt in enumerate(prompts):
            try:
                self._prompts.append(prompt_tokens(self._tokenizer, prompt, template))
            except Exception as error:  # a template may raise anything
                raise DataError(f"evaluation.prompts[{number}]: {type(error).__name__}: {error}") from error
            if not self._prompts[-1]:
                raise DataError(f"evaluation.prompts[{number}]={prompt!r} has no token; give a text, or leave it out")

    def on_evaluation(self, session: ObservedSession, record: Record) -> None:
        """Continue the prompts, and say how."""
        if self._tokenizer is None:
            return
        end, most = self._assembled.data.eos_id, session.job.observe.sample_tokens
        written = continue_greedily(self._assembled.model, self._prompts, most, end)
        texts = [str(self._tokenizer.decode(tokens)) for tokens in written]
        prompts = [str(self._tokenizer.decode(tokens)) for tokens in self._prompts]
        record["samples"] = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        for prompt, text in zip(session.job.evaluation.prompts, texts, strict=True):
            session.note(f"sample: {_shown(prompt)} -> {text}")


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], template: str | None
) -> list[int]:
    """Return the token ids of a prompt: a text alone, or as a message where there is a chat template."""
    if isinstance(prompt, str) and template is None and tokenizer.chat_template is None:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def _shown(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""
