"""A sharded model as lm-eval's tasks ask it: on rank 0, each question answered by all ranks.

Imported where lm-eval is installed alone. Tokens, the cut of long contexts and the ends of answers are those of its
own Hugging Face model, so that numbers are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from shardwise.errors import ConfigError
from shardwise.training.rank_calls import RankCalls
from shardwise.training.sample import continue_greedily
from shardwise.training.scores import Continuation, log_likelihoods, most_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_WRITTEN = 256  # tokens of an answer, unless the task says it
ROUND = 16  # tokens that are written before it is looked for an end
ACTS = {"until", "do_sample", "temperature", "max_gen_toks"}  # keys of generation_kwargs, as lm-eval normalizes them


class ShardedLanguageModel(TemplateLM):
    """Answers lm-eval's three kinds of questions.

    Args:
        calls: reaches all ranks.
        tokenizer: of the model; with the chat template, where tasks are asked through one.
    """

    def __init__(self, calls: RankCalls, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._calls, self.tokenizer = calls, tokenizer
        self._device = calls.model.device
        self.max_length = most_tokens(calls.model)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            ConfigError: the tokenizer has none.
        """
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path} has no eos_token, and lm-eval's tasks need the end of a "
                "text; name one in its tokenizer_config.json"
            )
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that nothing precedes."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer, as lm-eval names it in its caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids; without special ones where the text begins with the first of them."""
        begins = string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        wants = add_special_tokens if add_special_tokens is not None else not begins
        return list(self.tokenizer.encode(string, add_special_tokens=wants))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [Continuation(prompt, tokens[-self.max_length :]) for _, prompt, tokens in requests]
        return self._calls.call(log_likelihoods, rows)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts, each token behind as many as the model reads."""
        windows = [
            (number, Continuation(*make_disjoint_window(window)))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
        ]
        totals = [0.0] * len(requests)
        scored = self._calls.call(log_likelihoods, [row for _, row in windows])
        for (number, _), (total, _) in zip(windows, scored, strict=True):
            totals[number] += total
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes behind each prompt, up to one of the task's ends.

        Raises:
            ConfigError: the task asks for something else than the likeliest tokens.
        """
        return self._written([_Prompt(self, *request.args) for request in requests])

    def _written(self, prompts: Sequence[_Prompt]) -> list[str]:
        """Let all prompts be continued a round at a time, as long as they have not ended."""
        open_prompts = list(prompts)
        while open_prompts:
            count = min(ROUND, *(prompt.left for prompt in open_prompts))
            asked = [prompt.ids + prompt.written for prompt in open_prompts]
            rows = self._calls.call(continue_greedily, asked, count)
            for prompt, row in zip(open_prompts, rows, strict=True):
                prompt.written += row
            open_prompts = [prompt for prompt in open_prompts if prompt.left and prompt.end() is None]
        return [prompt.text() for prompt in prompts]


class _Prompt:
    """A prompt of a task, and what the model has written behind it so far."""

    def __init__(self, model: ShardedLanguageModel, context: str, settings: Mapping[str, Any]) -> None:
        asked: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), MOST_WRITTEN))
        _check_is_greedy(asked)
        end = str(model.tokenizer.decode([model.eot_token_id]))
        self._tokenizer = model.tokenizer
        self._ends = [text for text in (*asked["until"], end) if text]
        self._most = int(asked["max_gen_toks"])
        room = model.max_length - self._most
        if room < 1:
            raise ConfigError(
                f"the task asks for answers of {self._most} tokens (generation_kwargs.max_gen_toks), and the model "
                f"reads {model.max_length}; set fewer than that"
            )
        self.ids = model.tok_encode(context)[-room:]
        self.written: list[int] = []

    @property
    def left(self) -> int:
        """The number of tokens that may still be written."""
        return self._most - len(self.written)

    def end(self) -> int | None:
        """Return where in the written text its end is, if it has one."""
        text = self._decoded()
        return min((text.index(end) for end in self._ends if end in text), default=None)

    def text(self) -> str:
        """Return what is written before its end."""
        return self._decoded()[: self.end()]

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self.written))


def _check_is_greedy(asked: Mapping[str, Any]) -> None:
    """Refuse what a greedy answer would leave unheard."""
    others = [f"{key}={value!r}" for key, value in asked.items() if key not in ACTS]
    if asked["do_sample"]:
        others.append(f"do_sample=true, temperature={asked.get('temperature')}")
    if others:
        raise ConfigError(
            f"the task's generation_kwargs ask for {', '.join(others)}, and answers are the likeliest tokens; leave "
            "them out, or evaluate the exported model with lm-eval itself"
        )
