"""The tokenizer of a job: a given directory, the model directory's own, or a byte-level BPE trained on the corpus.

A trained tokenizer is a directory in the cache that `transformers.AutoTokenizer.from_pretrained` opens. Training is
deterministic; it reads the first `SAMPLE` characters of the corpus, or of several in equal parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.cache import cache_root
from shardwise.data.store import COMPLETE, build_once, digest
from shardwise.errors import DataError
from shardwise.job.schema import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

SAMPLE = 1 << 24
VERSION = 1  # of what a trained tokenizer is; part of its cache key
END_OF_TEXT, PADDING, MASK = "<|endoftext|>", "<pad>", "<mask>"
SENTINEL = "<extra_id_{}>"  # T5's, as many as its tokenizer has
SENTINELS = 100
SPECIAL = {  # of a tokenizer that is trained for a task, besides the end of a text
    "causal_lm": [],
    "masked_lm": [PADDING, MASK],
    "seq2seq_lm": [PADDING, *(SENTINEL.format(n) for n in range(SENTINELS))],
}
MORE_TEMPLATES = "additional_chat_templates/*.jinja"  # of a tokenizer with several, each by its name
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
BYTES = 256


class TextSource(Protocol):
    """Texts that a tokenizer is trained on: a `Corpus`, or the shards of a stream."""

    @property
    def format(self) -> str: ...
    @property
    def identity(self) -> str: ...
    def describe(self) -> str: ...
    def emptiness(self, unit: str) -> str: ...
    def texts(self) -> Iterator[tuple[str, bool]]: ...


@dataclass(frozen=True)
class TokenizerFacts:
    """The facts of a tokenizer that packing needs. `special_ids` are never masked; `sentinel_ids` stand for spans."""

    vocabulary_size: int
    eos_id: int | None
    mask_id: int | None
    special_ids: tuple[int, ...]
    sentinel_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer directory.

    Attributes:
        directory: absolute.
        identity: changes when its files do.
        trust_remote_code: whether it may run Python code of its own.
        key: of the job that names it, for messages; empty for one that was trained here.
    """

    directory: Path
    identity: str
    trust_remote_code: bool = False
    key: str = ""

    def remedy(self) -> str:
        """Return the way out where it cannot be opened."""
        if not self.key:
            return f"delete {self.directory}, and it is trained again"
        return f"save it again with `save_pretrained`, or set {self.key} to another directory"


def find_tokenizer(
    job: Job, corpora: Sequence[TextSource], model_vocabulary: int | None, say: Callable[[str], None]
) -> TokenizerSource | None:
    """The job's tokenizer, trained now where it has none. None for a corpus of token ids without a given one.

    One with the job's added tokens lies in the cache.
    """
    source = _given_or_trained(job, corpora, model_vocabulary, say)
    return source if source is None or not job.data.added_tokens else _extended(job, source, say)


def _given_or_trained(
    job: Job, corpora: Sequence[TextSource], model_vocabulary: int | None, say: Callable[[str], None]
) -> TokenizerSource | None:
    given = given_tokenizer(job)
    if given is not None:
        return given
    model = job.model.path
    if corpora[0].format == "tokens":
        return None
    if model is not None:
        raise DataError(
            f"model.path={model} holds no tokenizer, and its weights mean nothing under a new one; set data.tokenizer "
            "to the directory of the tokenizer that the model was trained with"
        )
    return _trained(job, corpora, model_vocabulary, say)


def given_tokenizer(job: Job) -> TokenizerSource | None:
    """Return the tokenizer of `data.tokenizer`, else that of the model directory; None where there is none."""
    if job.data.tokenizer is not None:
        return _source(Path(job.data.tokenizer), "data.tokenizer", trust_remote_code=False)
    model = job.model.path
    if model is not None and any((Path(model).expanduser() / name).is_file() for name in VOCABULARY_FILES):
        return _source(Path(model), "model.path", job.model.trust_remote_code)
    return None


def load_tokenizer(source: TokenizerSource) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory; nothing is fetched."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(source.directory), local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # tokenizers raises bare Exception for a corrupt file
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        key = f"{source.key}={str(source.directory)!r}: " if source.key else ""
        raise DataError(
            f"{key}the tokenizer in {source.directory} cannot be opened: {first_line}; {source.remedy()}"
        ) from error
    return tokenizer


def facts_of(tokenizer: PreTrainedTokenizerBase) -> TokenizerFacts:
    """Sizes and special tokens. A tokenizer without an end-of-sequence token ends documents with its separator."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    vocabulary = tokenizer.get_vocab()
    sentinels = takewhile(vocabulary.__contains__, (SENTINEL.format(n) for n in count()))
    return TokenizerFacts(
        vocabulary_size=max(vocabulary.values(), default=-1) + 1,
        eos_id=end,
        mask_id=tokenizer.mask_token_id,
        special_ids=tuple(sorted(tokenizer.all_special_ids)),
        sentinel_ids=tuple(vocabulary[token] for token in sentinels),
    )


def check_vocabulary(size: int, model_vocabulary: int | None, where: object) -> None:
    """Refuses a tokenizer with more tokens than the model has embeddings."""
    if model_vocabulary is not None and size > model_vocabulary:
        raise DataError(
            f"the tokenizer in {where} has {size} tokens, the model's vocabulary_size is {model_vocabulary}; "
            "set data.tokenizer to the model's own, or give the model a vocabulary_size of at least "
            f"{size}"
        )


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without the tokenizer's own special tokens."""
    encoded: Any = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _source(directory: Path, key: str, trust_remote_code: bool) -> TokenizerSource:
    directory = directory.expanduser().absolute()
    if not directory.is_dir():
        raise DataError(f"{key}={str(directory)!r} is not a directory; give the one with the tokenizer's files")
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise DataError(
            f"{key}={str(directory)!r} holds no tokenizer (none of {', '.join(VOCABULARY_FILES)}); give a directory "
            "that does"
        )
    places = sorted([*directory.iterdir(), *directory.glob(MORE_TEMPLATES)])
    files = [path for path in places if path.suffix in {".json", ".txt", ".model", ".jinja", ".py"}]
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    source = TokenizerSource(directory, digest(str(directory), *states), trust_remote_code, key)
    empty = [path.name for path in files if path.name in VOCABULARY_FILES and not path.stat().st_size]
    if empty:
        raise DataError(f"{key}={str(directory)!r}: its {empty[0]} is empty; {source.remedy()}")
    return source


def _extended(job: Job, source: TokenizerSource, say: Callable[[str], None]) -> TokenizerSource:
    """Return a tokenizer with the job's added tokens behind those of `source`."""
    tokens = job.data.added_tokens
    key = digest(VERSION, source.identity, *tokens)
    directory = cache_root(job.data.cache_directory) / "tokenizers" / key

    def build(target: Path) -> None:
        from shardwise.model.added_tokens import add_tokens  # slow to import; processes that tokenize need it not

        tokenizer = load_tokenizer(source)
        size = add_tokens(tokenizer, tokens)
        tokenizer.save_pretrained(str(target))
        (target / COMPLETE).write_text(json.dumps({"tokenizer": str(source.directory), "vocabulary_size": size}))

    build_once(directory, build, say)
    return TokenizerSource(directory, key, source.trust_remote_code, source.key)


def _trained(
    job: Job, corpora: Sequence[TextSource], model_vocabulary: int | None, say: Callable[[str], None]
) -> TokenizerSource:
    special = [END_OF_TEXT, *SPECIAL[job.model.task]]
    size = job.data.vocabulary_size
    least = BYTES + len(special)
    if size < least:
        raise DataError(
            f"data.vocabulary_size={size} is below {least}: all bytes and {', '.join(special[:3])}"
            f"{f' and {len(special) - 3} more' if len(special) > 3 else ''}; use {least}"
        )
    if model_vocabulary is not None and size > model_vocabulary:
        raise DataError(
            f"data.vocabulary_size={size} is more than the model's vocabulary_size={model_vocabulary}; use "
            f"{model_vocabulary} or less"
        )
    key = digest(VERSION, *(corpus.identity for corpus in corpora), size, special)
    described = ", ".join(corpus.describe() for corpus in corpora)
    directory = cache_root(job.data.cache_directory) / "tokenizers" / key

    def build(target: Path) -> None:
        say(f"training a byte-level BPE tokenizer of {size} tokens on {described}")
        train_tokenizer(corpora, size, special, target)
        (target / COMPLETE).write_text(json.dumps({"corpus": described, "vocabulary_size": size}))

    build_once(directory, build, say)
    return TokenizerSource(directory, key)


def train_tokenizer(corpora: Sequence[TextSource], size: int, special: list[str], directory: Path) -> None:
    """Train a byte-level BPE on the start of each corpus and save it as a `transformers` tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for corpus in corpora for text in _sample(corpus, SAMPLE // len(corpora)))
    tokenizer.train_from_iterator(texts, trainer)
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    named: dict[str, Any] = names | ({"pad_token": PADDING} if PADDING in special else {})
    named |= {"mask_token": MASK} if MASK in special else {}
    named |= {"additional_special_tokens": [token for token in special if token in SPECIAL["seq2seq_lm"][1:]]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(str(directory))


def _sample(corpus: TextSource, characters: int) -> Iterator[str]:
    left = characters
    for text, _ in corpus.texts():
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
    if left == characters:
        raise DataError(corpus.emptiness("text"))
