"""Several sources as one run's data: the token stream through kills, layouts and changes, and how it is prepared."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.data.batch import Batch, wrap
from shardwise.data.loader import Stream
from shardwise.data.mixture import Mixture
from shardwise.data.packing import ENDLESS
from shardwise.data.prepare import prepare
from shardwise.data.shares import Assignment
from shardwise.data.state import OF_SOURCE, SAMPLES, ConsumedSources, data_state
from shardwise.errors import ConfigError, DataError, UserCodeError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.testing.oracle_mixture import DefinedMixture
from tests.data.conftest import JobMaker

FUZZ = [pytest.param(seed, marks=[] if seed < 6 else pytest.mark.slow) for seed in range(200)]
LAYOUTS = ((1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 2), (8, 1))  # data ranks, microbatches


class Numbers:
    """Sequence i of source k is [k, i]."""

    sequence_length = 2

    def __init__(self, source: int, size: int) -> None:
        self.source, self.size = source, size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        ids = torch.tensor([[self.source, index] for index in indices])
        return Batch({"input_ids": ids}, ids.clone(), torch.tensor(counters))


def a_mixture(sizes: Sequence[int], assignment: Assignment, seed: int = 3) -> Mixture:
    names = tuple(f"s{number}" for number in range(len(sizes)))
    splits: Any = tuple(Numbers(number, size) for number, size in enumerate(sizes))
    return Mixture(names, splits, assignment, seed)


def drawn_mixture(rng: random.Random) -> tuple[list[int], Assignment]:
    sizes = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.3:
        return sizes, Assignment.of_epoch([max(1, round(size * rng.choice([0.5, 1, 2]))) for size in sizes])
    starts = [0, *sorted(rng.sample(range(1, 400), rng.randint(0, 2)))]
    return sizes, Assignment.of_weights([(start, [rng.random() + 0.01 for _ in sizes]) for start in starts])


def read_step(
    mixture: Mixture, state: dict[str, int], size: int, layout: tuple[int, int]
) -> tuple[Any, dict[str, int]]:
    """Every rank of a layout goes on from `state`; return their samples by number, the hash, and their state."""
    ranks, accumulation = layout
    microbatch = -(-size // (ranks * accumulation))
    samples, digest, states = {}, 0, []
    for rank in range(ranks):
        stream = Stream(mixture, mixture.seed, size, microbatch, accumulation, ranks, rank)
        ours = data_state(stream)
        if state:
            ours.load_state_dict(json.loads(json.dumps(state)))
        for batch in ours.next_step():
            digest = wrap(digest + batch.digest)
            for row, ids, real in zip(
                batch.rows.tolist(), batch.inputs["input_ids"].tolist(), batch.counted, strict=True
            ):
                if real:
                    assert row not in samples
                    samples[row] = tuple(ids)
        states.append(ours.state_dict())
    assert all(one == states[0] for one in states)
    return (samples, digest), states[0]


@pytest.mark.parametrize("seed", FUZZ)
def test_kills_and_other_layouts_leave_the_token_stream(seed: int) -> None:
    rng = random.Random(seed)
    sizes, assignment = drawn_mixture(rng)
    mixture = a_mixture(sizes, assignment, seed)
    whole, _ = read_step(mixture, {}, 480, (1, 1))  # one process, undisturbed
    state: dict[str, int] = {}
    kept: dict[str, int] = {}
    samples: dict[int, tuple[int, int]] = {}
    digest = saved = 0
    while len(samples) < 480:
        size = min(rng.randint(8, 40), 480 - len(samples))
        (read, hashed), after = read_step(
            mixture, state, max(size, 1), rng.choice(LAYOUTS if size >= 8 else LAYOUTS[:1])
        )
        if rng.random() < 0.2:  # killed: what came after the last checkpoint is read again
            state, digest = kept, saved
            samples = {row: ids for row, ids in samples.items() if row < state.get(SAMPLES, 0)}
            continue
        assert not read.keys() & samples.keys()
        samples |= read
        state, digest = after, wrap(digest + hashed)
        if rng.random() < 0.5:
            kept, saved = state, digest
    assert (samples, digest) == whole
    for source, size in enumerate(sizes):  # passes: every sequence once before any comes again
        read_of = Counter(index for number, index in samples.values() if number == source)
        assert not read_of or max(read_of.values()) - min(read_of[index] for index in range(size)) <= 1
        assert read_of.total() == state[f"{OF_SOURCE}s{source}"]


def test_sources_go_on_where_they_were_when_weights_change() -> None:
    sizes = [40, 50, 60]
    first = a_mixture(sizes[:2], Assignment.of_weights([(0, [1, 3])]))
    (before, _), state = read_step(first, {}, 20, (1, 1))
    assert state == {SAMPLES: 20, f"{OF_SOURCE}s0": 5, f"{OF_SOURCE}s1": 15}
    second = a_mixture(sizes, Assignment.of_weights([(0, [1, 1, 2])]))
    (after, _), later = read_step(second, state, 40, (2, 1))
    assert later == {SAMPLES: 60, f"{OF_SOURCE}s0": 15, f"{OF_SOURCE}s1": 25, f"{OF_SOURCE}s2": 20}
    of_second = [ids for ids in [*before.values(), *after.values()] if ids[0] == 1]
    assert len(set(of_second)) == len(of_second) == 25  # none came again
    (again, _), last = read_step(a_mixture(sizes[:2], Assignment.of_weights([(0, [1, 1])])), later, 8, (1, 1))
    assert last[f"{OF_SOURCE}s2"] == 20 and len(again) == 8  # kept for the source that is left out
    with pytest.raises(KeyError):
        ConsumedSources(Stream(second, 3, 8, 8, 1, 1, 0), second).load_state_dict({})


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 2 else pytest.mark.slow) for n in range(12)])
def test_the_oracle_reads_the_same(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"s{number}": rng.randint(3, 90) for number in range(rng.randint(1, 4))}
    weighted = seed % 2 == 0
    sources = [
        {"name": name, "path": "x"} | ({"weight": round(rng.random() + 0.01, 4)} if weighted else {"repeat": 1.5})
        for name in sizes
    ]
    curriculum = [{"tokens": 300 * 256 - 1, "weights": {"s0": 2.0}}] if weighted else []
    job = load_job({"data": {"sources": sources, "curriculum": curriculum}})
    values = [float(str(source.get("weight", 0))) for source in sources]
    assignment = (
        Assignment.of_weights([(0, values), (300, [2.0, *values[1:]])])
        if weighted
        else Assignment.of_epoch([round(1.5 * size) for size in sizes.values()])
    )
    mixture, defined = a_mixture(list(sizes.values()), assignment, job.training.seed), DefinedMixture(job, sizes)
    assert all(mixture.place_of(number) == defined.place_of(number) for number in range(1400))


# --- from files


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    for name, count in (("web", 40), ("code", 20)):
        rows = [
            {"text": f"{name} number {n} of these documents " * 3, "score": n / count, "ok": n % 2 == 0}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def with_sources(make_job: JobMaker, corpora: Path, *sources: dict[str, Any], **keys: Any) -> Job:
    named = [source | {"path": str(corpora / source["path"])} for source in sources]
    return make_job(sources=named, **keys)


def keeps_even(row: dict[str, Any]) -> bool:
    return bool(row["ok"])


def answers_one(row: dict[str, Any]) -> int:
    return 1


def test_sources_are_prepared_with_one_tokenizer(corpora: Path, make_job: JobMaker) -> None:
    web, code = (
        {"path": "web.jsonl", "weight": 3},
        {"path": "code.jsonl", "weight": 1, "filter": {"score": {"min": 0.5}}},
    )
    data = prepare(with_sources(make_job, corpora, web, code))
    assert isinstance(data.train, Mixture) and data.train.names == ("code", "web")
    assert [source.data.documents for source in data.sources] == [10, 40]
    assert {source.data.tokenizer_directory for source in data.sources} == {data.tokenizer_directory}
    assert list(data.sets) == ["code", "web"] and data.unigram_entropy
    places = [data.train.place_of(number) for number in range(400)]
    batch = data.train.batch(list(range(8)), list(range(8)), 0)
    for row, (source, index) in enumerate(places[:8]):
        assert torch.equal(
            batch.inputs["input_ids"][row], data.train.splits[source].batch([index], [row], 0).inputs["input_ids"][0]
        )
    assert sum(source == 1 for source, _ in places) == 300
    assert prepare(with_sources(make_job, corpora, code, web)).content == data.content  # their order does not matter
    assert pickle.loads(pickle.dumps(data)).train.place_of(77) == places[77]
    given = {"tokenizer": data.tokenizer_directory}
    by_function = code | {"filter": f"{__name__}:keeps_even"}
    by_values = code | {"filter": {"ok": True, "score": {"max": 2}}}
    first, second = (prepare(with_sources(make_job, corpora, web, one, **given)) for one in (by_function, by_values))
    assert [first.sources[0].data.documents, first.content] == [10, second.content]
    by_size = prepare(with_sources(make_job, corpora, {"path": "web.jsonl"}, {"path": "code.jsonl"}, **given))
    assert len(by_size.train) == sum(len(source.data.train) for source in by_size.sources)


def test_a_stream_is_prepared_beside_a_corpus(corpora: Path, make_job: JobMaker) -> None:
    web = {"path": "web.jsonl", "streaming": True, "weight": 3}
    job = with_sources(make_job, corpora, web, {"path": "code.jsonl", "weight": 1}, num_workers=3)
    data = prepare(job)
    code, streamed = data.sources
    assert [list(data.sets), list(data.streams), list(streamed.data.streams)] == [["code", "web"], ["web"], [""]]
    assert streamed.data.tokenizer_directory == code.data.tokenizer_directory == data.tokenizer_directory
    tokens = data.streams["web"]
    assert (tokens.settings.name, tokens.settings.workers) == ("web", 3)
    known = data.describe()
    assert [known[key] for key in ("documents", "tokens", "training_sequences")] == [None] * 3
    assert list(known["sources"]["web"]["shards"]) == ["web.jsonl"] and "shards" not in known["sources"]["code"]
    assert known["sources"]["web"]["sequences"] is None and len(data.train) == ENDLESS
    assert isinstance(data.train, Mixture)
    places = [data.train.place_of(number) for number in range(400)]
    assert [index for source, index in places if source == 1] == list(range(300))
    assert [data.validation.place_of(number)[1] < 20 for number in range(80)] == [True] * 80


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (({"path": "web.jsonl", "weight": 0}, {"path": "code.jsonl", "weight": 0}), "from sample 0 on are all 0"),
        (({"path": "gone.jsonl"},), "data.sources, gone: data.path="),
        (({"path": "gone.jsonl", "streaming": True, "weight": 1},), "data.sources, gone: data.path="),
        (({"path": "web.jsonl", "streaming": True},), "web is a stream, and nobody has counted its samples"),
        (({"path": "web.jsonl", "streaming": True, "weight": 1, "field": "no"},), "sources, web: web.jsonl, row 0: no"),
        (({"path": "empty.jsonl"},), "empty.jsonl' is empty"),
        (({"path": "web.jsonl", "filter": {"score": {"min": 9}}},), "of those that data.filter="),
        (({"path": "web.jsonl", "filter": f"{__name__}:answers_one"},), "it must return true or false"),
        (({"path": "web.jsonl"}, {"path": "chat.jsonl"}), "which do not mix"),
        (({"path": "web.jsonl"}, {"path": "web.jsonl"}), "2 sources have the name 'web'"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_read(
    corpora: Path, make_job: JobMaker, sources: tuple[dict[str, Any], ...], words: str
) -> None:
    (corpora / "empty.jsonl").write_text("")
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (corpora / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    with pytest.raises((ConfigError, DataError, UserCodeError)) as error:
        prepare(with_sources(make_job, corpora, *sources))
    assert words in str(error.value)
