"""Conversations and pairs: from the columns of a row to checked messages, or to a prompt and what completes it.

Formats, by the columns of a row: `chat` has `messages` (`role`, `content`) or ShareGPT's `conversations` (`from`,
`value`); `prompt_completion` has `prompt` and `completion`; `preference` has `chosen` and `rejected`, and `prompt`
where these do not begin with it. Prompts and completions are texts or lists of messages. `tools`, `system` and
`chat_template_kwargs`, what else the template is given, may stand beside messages. What follows, text and masks, is in
`shardwise.data.chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from shardwise.data.readers import check_text, short
from shardwise.errors import DataError
from shardwise.words import listed, nearest

COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "tools",
    "system",
    "chat_template_kwargs",
)
ASSISTANT, SYSTEM = "assistant", "system"
ROLES = (SYSTEM, "developer", "user", ASSISTANT, "tool", "function", "ipython")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}

# Names of what every rendering is given, which a row's `chat_template_kwargs` cannot be.
GIVEN_TO_TEMPLATES = (
    "messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "return_assistant_tokens_mask",
)  # fmt: skip

Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages of a row.

    Attributes:
        where: file and row, for messages of errors.
        messages: each with `role` and `content` at least, or with `tool_calls`.
        tools: JSON schemas that the template may show.
        prompt: number of first messages that are a prompt, which is never trained on; 0 for a chat.
        arguments: what the template is given beside these.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0
    arguments: Mapping[str, Any] = MappingProxyType({})


class TextPair(NamedTuple):
    """A prompt and its completion, as texts."""

    where: str
    prompt: str
    completion: str


class Preference(NamedTuple):
    """Two completions of one prompt, of which the first was preferred."""

    chosen: Conversation | TextPair
    rejected: Conversation | TextPair


def format_of_columns(columns: Collection[str]) -> str | None:
    """Return the format that these columns make; None where they hold no conversations."""
    if {"chosen", "rejected"} <= set(columns):
        return "preference"
    if {"prompt", "completion"} <= set(columns):
        return "prompt_completion"
    return "chat" if {"messages", "conversations"} & set(columns) else None


def chat(where: str, row: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a row of `messages` or `conversations`."""
    column = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
    if column is None:
        raise _missing(where, "messages", "chat reads messages, or conversations")
    messages = _behind_system(where, row, _messages(where, row[column], column))
    return Conversation(where, messages, _tools(where, row.get("tools")), arguments=_template_arguments(where, row))


def prompt_completion(where: str, row: Mapping[str, Any]) -> Conversation | TextPair:
    """Return the pair of a row of `prompt` and `completion`."""
    for column in ("prompt", "completion"):
        if row.get(column) is None:
            raise _missing(where, column, "prompt_completion reads prompt and completion")
    return _pair(where, row, row["prompt"], "completion")


def preference(where: str, row: Mapping[str, Any]) -> Preference:
    """Return both completions of a row of `chosen` and `rejected`.

    Where both are conversations that begin with another message than an answer, what they share is their prompt, behind
    the column `prompt` unless they begin with it.
    """
    for column in ("chosen", "rejected"):
        if row.get(column) is None:
            raise _missing(where, column, "preference reads prompt, chosen and rejected")
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{where}: chosen and rejected are equal, which prefers nothing; remove the row")
    prompt = row.get("prompt")
    if prompt is None or _begin_with_prompt(row):
        return _with_shared_prompt(where, row, prompt)
    return Preference(*(_pair(where, row, prompt, column) for column in ("chosen", "rejected")))


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield every text of a row's conversations, unchecked: what a tokenizer is trained on."""
    for column in COLUMNS[:6]:
        yield from _texts(row.get(column))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, Mapping):
        yield from _texts(value.get("content", value.get("value", value.get("text"))))


# --- pairs -----------------------------------------------------------------------------------------------------------


def _pair(where: str, row: Mapping[str, Any], prompt: Any, column: str) -> Conversation | TextPair:
    """Return a prompt and what the column says after it; both are texts, or both messages."""
    completion = row[column]
    if isinstance(prompt, str) and isinstance(completion, str):
        check_text(f"{where}, prompt", prompt)
        check_text(f"{where}, {column}", completion)
        if not completion.strip():
            raise _empty(where, column)
        if row.get("system"):
            raise DataError(
                f"{where}: system stands beside a prompt that is a text, and no chat template joins them; put it into "
                "the prompt, give messages, or leave it out"
            )
        return TextPair(where, prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise DataError(
            f"{where}: prompt is {short(prompt)} and {column} is {short(completion)}; give both as texts, or both as "
            "lists of messages"
        )
    before = _behind_system(where, row, _messages(where, prompt, "prompt"))
    after = _messages(where, completion, column)
    tools, arguments = _tools(where, row.get("tools")), _template_arguments(where, row)
    return Conversation(where, [*before, *after], tools, len(before), arguments)


def _begin_with_prompt(row: Mapping[str, Any]) -> bool:
    """Return whether both answers are conversations that hold their prompt: they begin with another than an answer."""
    first = [value[0] if isinstance(value, list) and value else None for value in (row["chosen"], row["rejected"])]
    return all(isinstance(message, Mapping) and _role_of(message) != ASSISTANT for message in first)


def _with_shared_prompt(where: str, row: Mapping[str, Any], prompt: Any) -> Preference:
    if isinstance(row["chosen"], str) or isinstance(row["rejected"], str):
        raise DataError(
            f"{where}: no prompt; chosen and rejected that are texts need a column prompt: fill it, or remove the row"
        )
    both = [_messages(where, row[column], column) for column in ("chosen", "rejected")]
    if isinstance(prompt, list):
        before = _messages(where, prompt, "prompt")
        if any(messages[: len(before)] != before for messages in both):
            both = [[*before, *messages] for messages in both]
    both = [_behind_system(where, row, messages) for messages in both]
    shared = 0
    while shared < min(map(len, both)) and both[0][shared] == both[1][shared]:
        shared += 1
    if not 0 < shared < min(map(len, both)):
        raise DataError(
            f"{where}: chosen and rejected share {shared} of their first messages, which are their prompt; give both a "
            "prompt and an answer behind it, or remove the row"
        )
    if isinstance(prompt, str):
        _check_is_among(where, prompt, both[0][:shared])
    tools, arguments = _tools(where, row.get("tools")), _template_arguments(where, row)
    return Preference(*(Conversation(where, messages, tools, shared, arguments) for messages in both))


def _check_is_among(where: str, prompt: str, shared: Collection[Message]) -> None:
    if not any(prompt.strip() in message["content"] for message in shared):
        raise DataError(
            f"{where}: the text in prompt stands in none of the messages that chosen and rejected share, which are "
            "their prompt; give it as messages, or leave it out"
        )


# --- messages --------------------------------------------------------------------------------------------------------


def _behind_system(where: str, row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages behind that of the column `system`, unless they begin with one of their own."""
    if not row.get("system") or messages[0]["role"] == SYSTEM:
        return messages
    check_text(f"{where}, system", row["system"])
    return [{"role": SYSTEM, "content": row["system"]}, *messages]


def _messages(where: str, value: Any, column: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: no messages in {column}, found {short(value)}; give a list of objects with role and content, or "
            "remove the row"
        )
    return [
        _message(f"{where}, message {number} of {column}", message) for number, message in enumerate(value, start=1)
    ]


def _message(where: str, value: Any) -> Message:
    """Return a message as templates read it, without keys that have no value."""
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where}: expected an object with role and content, found {short(value)}; give one, or remove the row"
        )
    message: Message = {key: inner for key, inner in value.items() if inner is not None}
    role = _role_of(message)
    if role not in ROLES:
        raise DataError(f"{where}: unknown role {short(role)}.{nearest(str(role), [*ROLES, *SHAREGPT_ROLES])}")
    if message.get("weight", 1) != 1:
        raise DataError(f"{where}: weight={message['weight']} is not supported; remove the row, or see data.train_on")
    content = message.pop("content", message.pop("value", None))
    message.pop("from", None)
    if content is None and not message.get("tool_calls"):
        raise DataError(
            f"{where}: no content, its keys are {sorted(message)}; give it content or tool_calls, or remove the row"
        )
    text = "" if content is None else _text(where, content)
    if role == ASSISTANT and not text.strip() and not message.get("tool_calls"):
        raise _empty(where, "content")
    return {**message, "role": role, "content": text}


def _role_of(message: Mapping[str, Any]) -> Any:
    """Return the role, in the names of chat templates."""
    role = message.get("role", message.get("from"))
    return SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role


def _text(where: str, content: Any) -> str:
    """Return a message's text; that of several parts is joined, since most templates read one."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise DataError(
                f"{where}: its content has parts that are no text, {short(content)}; only text is trained on: leave "
                "them out, or remove the row"
            )
        content = "".join(map(str, parts))
    check_text(where, content)
    return str(content)


def _tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """Return the schemas of tools; columns often hold them as JSON in a text."""
    if not value:
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: tools is a text, but not valid JSON ({error}); write a list of JSON schemas, or leave tools out"
        ) from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: tools must be a list of JSON schemas, found {short(tools)}; write one, or leave tools out"
        )
    return tools or None


def _template_arguments(where: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the template is given beside messages and tools."""
    arguments = row.get("chat_template_kwargs")
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"{where}: chat_template_kwargs must be an object of names and values, found {short(arguments)}; write "
            "one, or leave it out"
        )
    given = [name for name in GIVEN_TO_TEMPLATES if name in arguments]
    if given:
        raise DataError(
            f"{where}: chat_template_kwargs holds {listed(given)}, which every chat template is given anyway; leave it "
            "out there: messages and tools are columns, and the template is data.chat_template"
        )
    return arguments


def _missing(where: str, column: str, rule: str) -> DataError:
    return DataError(f"{where}: no {column}; data.format={rule}: fill it, or remove the row")


def _empty(where: str, column: str) -> DataError:
    return DataError(f"{where}: an empty {column}, which teaches nothing; remove the row, or say what was left out")
