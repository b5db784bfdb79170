"""From conversations to token ids and a mask of those that are trained on.

The template renders a conversation as transformers does. What is trained on are spans of the rendered text: those of
the template's `{% generation %}` blocks, or, without any, what each answer adds to the rendering of the messages before
it with their generation prompt. These renderings are prefixes of the whole where a template is prefix-stable; where it
is not the row is refused. A token is trained on if it holds a character of a span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardwise.data.compressed import UTF_8
from shardwise.data.conversations import ASSISTANT, Conversation, Message, TextPair
from shardwise.data.tokenizer import TokenizerSource
from shardwise.errors import DataError
from shardwise.job.data_section import DataSection
from shardwise.words import nearest_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROWS_AT_ONCE = 256  # of a call of the tokenizer
SHOWN = 24  # characters of two renderings where they part

Span = tuple[int, int]


class RenderedRow(NamedTuple):
    """The text of a row and the spans of it that are trained on.

    Attributes:
        is_pair: the text is a prompt with its completion: it has the tokenizer's own special tokens, and an end.
    """

    where: str
    text: str
    spans: list[Span]
    is_pair: bool


class TokenizedRow(NamedTuple):
    """A row's token ids and, for each, whether it is trained on."""

    where: str
    ids: np.ndarray
    trained: np.ndarray


def read_template(data: DataSection) -> str | None:
    """Return the Jinja template of `data.chat_template`; None where the tokenizer's own is taken."""
    if data.chat_template is None:
        return None
    path = Path(data.chat_template)
    if not path.is_file():
        raise DataError(f"data.chat_template={data.chat_template!r} is no file.{nearest_file(path)}")
    try:
        return path.read_text(encoding=UTF_8)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template={data.chat_template!r} cannot be read: {error}; give a readable text file"
        ) from error


class ChatTemplate:
    """A tokenizer and its template.

    Args:
        tokenizer: opened from `source`.
        source: for messages.
        template: in the place of the tokenizer's own.
        train_on: `assistant`, `last_assistant`, `completion` or `all`.

    Raises:
        DataError: the tokenizer does not say where its tokens stand in a text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: TokenizerSource, template: str | None, train_on: str
    ) -> None:
        self.tokenizer, self.template, self.train_on = tokenizer, template, train_on
        self._source = source
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer in {source.directory} does not say where its tokens stand in a text, which the mask of "
                "what is trained on needs; set data.tokenizer to a directory with a tokenizer.json"
            )

    def tokenized(self, rows: Iterable[Conversation | TextPair]) -> Iterator[TokenizedRow]:
        """Yield the token ids and masks of rows, many in one call of the tokenizer."""
        waiting: list[RenderedRow] = []
        for row in rows:
            waiting.append(self.rendered(row))
            if len(waiting) == ROWS_AT_ONCE:
                yield from self._encoded(waiting)
                waiting = []
        yield from self._encoded(waiting)

    def rendered(self, row: Conversation | TextPair) -> RenderedRow:
        """Return the text of a row and what of it is trained on.

        Raises:
            DataError: the template refuses the row, or does not show which text is an answer's.
        """
        if isinstance(row, TextPair):
            text = row.prompt + row.completion
            first = 0 if self.train_on == "all" else len(row.prompt)
            return RenderedRow(row.where, text, [(first, len(text))], is_pair=True)
        has_blocks = GENERATION.search(self._template_of(row)) is not None
        text, blocks = self._render(row, row.messages, blocks=has_blocks)
        spans = [(0, len(text))] if self.train_on == "all" else self._answers(row, text, blocks if has_blocks else None)
        return RenderedRow(row.where, text, spans, is_pair=False)

    def _answers(self, row: Conversation, text: str, blocks: list[Span] | None) -> list[Span]:
        """Return the spans of the answers that are trained on; `blocks` are those of the template, if it has any."""
        answers = [number for number, message in enumerate(row.messages) if message["role"] == ASSISTANT]
        trained = [number for number in answers if number >= row.prompt]
        trained = trained[-1:] if self.train_on == "last_assistant" else trained
        if blocks is not None and trained == answers:
            return blocks
        if blocks is not None and len(blocks) == len(answers):
            return blocks[len(blocks) - len(trained) :]
        return [self._added(row, text, number) for number in trained]

    def _template_of(self, row: Conversation) -> str:
        """Return the template; a tokenizer may have one of its own for tools."""
        try:
            return str(self.tokenizer.get_chat_template(self.template, row.tools))
        except ValueError as error:
            raise DataError(
                f"the tokenizer in {self._source.directory} has no chat template; set data.chat_template to a file "
                "with the one that the model was trained with"
            ) from error

    def _render(
        self, row: Conversation, messages: list[Message], prompt: bool = False, blocks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of some first messages of a row, and its spans in generation blocks where asked for.

        Args:
            row: the conversation.
            messages: the first ones of it.
            prompt: whether the template adds how an answer begins.
            blocks: whether the spans are wanted.
        """
        from transformers.utils import chat_template_utils

        template = self._template_of(row)
        render: Any = chat_template_utils.render_jinja_template
        settings: dict[str, Any] = {
            "conversations": [messages],
            "tools": row.tools,
            "chat_template": template,
            "return_assistant_tokens_mask": blocks,
            "add_generation_prompt": prompt,
        }
        from jinja2 import TemplateSyntaxError

        try:
            rendered, spans = render(**{**self.tokenizer.special_tokens_map, **row.arguments}, **settings)
        except TemplateSyntaxError as error:
            owner = "data.chat_template" if self.template else f"the tokenizer in {self._source.directory}"
            raise DataError(
                f"the chat template of {owner} is no Jinja, line {error.lineno}: {error}; mend it, or set "
                "data.chat_template to another"
            ) from error
        except Exception as error:  # Jinja's own errors, and those that a template raises
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{row.where}: the chat template refuses the roles {roles}: {type(error).__name__}: {error}; change "
                "the row, or set data.chat_template to a template that takes it"
            ) from error
        return str(rendered[0]), [(first, last) for first, last in spans[0]] if spans else []

    def _added(self, row: Conversation, text: str, number: int) -> Span:
        """Return the span that message `number` adds to those before it and the generation prompt."""
        before, _ = self._render(row, row.messages[:number], prompt=True)
        through, _ = self._render(row, row.messages[: number + 1])
        for prefix in (before, through):
            if not text.startswith(prefix):
                raise self._unstable(row, text, prefix, number)
        if not through.startswith(before):
            raise self._unstable(row, through, before, number)
        return len(before), len(through)

    def _unstable(self, row: Conversation, text: str, prefix: str, number: int) -> DataError:
        at = next((i for i, (a, b) in enumerate(zip(text, prefix)) if a != b), min(len(text), len(prefix)))
        last = "" if self.train_on == "last_assistant" else ", or try data.train_on: last_assistant"
        return DataError(
            f"{row.where}: the chat template is not prefix-stable and has no {{% generation %}} block, so that the "
            f"tokens of message {number + 1} cannot be told from the others: its beginning alone is rendered with "
            f"{prefix[at : at + SHOWN]!r} where the whole has {text[at : at + SHOWN]!r}; set data.chat_template to a "
            f"template with {{% generation %}} around what the assistant says{last}"
        )

    # ---- tokens

    def _encoded(self, rows: list[RenderedRow]) -> Iterator[TokenizedRow]:
        for is_pair, group in groupby(rows, key=lambda row: row.is_pair):
            alike = list(group)
            encoded: Any = self.tokenizer(
                [row.text for row in alike],
                add_special_tokens=is_pair,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for row, ids, offsets in zip(alike, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                yield self._ended(row, np.asarray(ids, dtype=np.int64), overlapping(offsets, row.spans))

    def _ended(self, row: RenderedRow, ids: np.ndarray, trained: np.ndarray) -> TokenizedRow:
        """Return the row, a completion's with the end of a text, which is trained on."""
        end = self.tokenizer.eos_token_id
        if row.is_pair and end is not None:
            if not len(ids) or ids[-1] != end:
                ids, trained = np.append(ids, end), np.append(trained, True)
            trained[-1] = True
        return TokenizedRow(row.where, ids, trained)


def overlapping(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Return for each token [n] whether it holds a character of a span; one without characters is at its end."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    starts = np.where(starts == ends, starts - 1, starts)  # of a space that a tokenizer trims from its offsets
    trained = np.zeros(len(starts), dtype=bool)
    for first, last in spans:
        trained |= (starts < last) & (ends > first)
    return trained
