"""Samples of `data.factory` for models of transformers: labels stand and count as they do there, or are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwise.data.batch import Batch, one_ahead
from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.setup import study
from tests.parity.jobs import check_agrees, make_job, make_module_job
from tests.parity.test_classification import Labelled, class_job

WIDTH = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 13}
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 40, "num_hidden_layers": 2, **WIDTH}


class Texts:
    """Rows of token ids that are their own labels, but for the first few of each."""

    def __init__(self, size: int = 32, length: int = 12) -> None:
        self.ids = torch.randint(0, 40, (size, length), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[: 1 + index % 4] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def text_job(directory: Path, **sections: Any) -> Job:
    base: dict[str, Any] = {
        "model": {"config": {**CONFIG, "max_position_embeddings": 12}, "factory": None, "loss": None},
        "data": {"factory": f"{__name__}:Texts", "sequence_length": 12, "validation_fraction": 0.25},
        "training": {"steps": 2, "sequences_per_step": 4, "microbatch_size": 2, "evaluate_batches": 2},
    }
    return make_module_job(directory, **{**base, **sections})


def evaluated(job: Job) -> tuple[float, dict[str, Tensor]]:
    with Session(job, device=torch.device("cpu")) as session:
        loss = session.evaluate()
        return loss, {name: tensor.clone() for name, tensor in session.model.whole_tensors()}


def test_labels_stand_at_their_own_token_as_in_transformers(world_pool: WorldPool, tmp_path: Path) -> None:
    [(loss, weights)] = world_pool.run(1, evaluated, text_job(tmp_path))
    values = {**CONFIG, "max_position_embeddings": 12}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values)).double().eval()
    model.load_state_dict(weights, strict=False)
    rows = [Texts()[index] for index in range(24, 32)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        assert loss == pytest.approx(float(model(**batch).loss), rel=1e-6)  # which takes logits in fp32


def test_labels_of_samples_leave_the_head_in_the_loss(tmp_path: Path) -> None:
    """A forward with labels would take a loss of its own of the logits, which then had to be whole."""
    facts = study(text_job(tmp_path))
    assert facts.head == "lm_head" and facts.vocabulary_parameters == ("model.embed_tokens.weight", "lm_head.weight")


def test_the_oracle_reads_them_so_too(world_pool: WorldPool, tmp_path: Path) -> None:
    check_agrees(world_pool, 2, text_job(tmp_path, parallel={"device": "cpu", "pipeline_parallel_degree": 2}))


class OfKind(Labelled):
    """Labels that are no classes of the model, by the word that says how."""

    def __init__(self, of_tokens: bool, kind: str) -> None:
        super().__init__(of_tokens)
        self.kind = kind

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        label = sample["labels"]
        kinds = {"float": label.double(), "several": torch.zeros(3, dtype=torch.int64), "outside": label + 7}
        return {**sample, "labels": kinds.get(self.kind, label.to(torch.int32))}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("float", r"has labels of torch\.float64 and shape \[\], and the task takes one whole number"),
        ("several", r"has labels of torch\.int64 and shape \[3\], and the task takes one whole number"),
        ("outside", r"has the class \d, and the model's are 0 to 2; give model\.labels a name for each"),
        ("int32", ""),
    ],
)
def test_labels_that_are_no_classes_are_named(world_pool: WorldPool, tmp_path: Path, kind: str, said: str) -> None:
    arguments = {"of_tokens": False, "kind": kind}
    data = {"factory": f"{__name__}:OfKind", "factory_arguments": arguments}
    job = class_job("gpt2", "sequence_classification", tmp_path, data=data)
    [loss, refusal] = world_pool.run(1, first_step, job)[0]
    assert re.search(said, refusal) if said else loss > 0


def first_step(job: Job) -> tuple[float, str]:
    try:
        with Session(job, device=torch.device("cpu")) as session:
            return session.step(next(iter(session.batches()))).loss, ""
    except DataError as error:
        return 0.0, str(error)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_labels": 1}, "num_labels=1 of the model's config: two classes at least"),
        ({"problem_type": "regression"}, "problem_type='regression' of the model's config"),
    ],
)
def test_heads_of_one_number_are_no_classifiers(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    model = {"config": {**CONFIG, **config, "pad_token_id": 0}, "labels": [], "task": "sequence_classification"}
    job = class_job("gpt2", "sequence_classification", tmp_path, model=model)
    with pytest.raises(ConfigError, match=said):
        build_model(job)


PLACES = {  # of labels, for a class of a model of one's own
    "LlamaForCausalLM": "next",
    "BartForCausalLM": "same",
    "XLNetLMHeadModel": "same",
    "BertForMaskedLM": "same",
    "BertForSequenceClassification": "same",
    "T5ForConditionalGeneration": "same",
    "ProphetNetForCausalLM": "other",
    "MixtralForCausalLM": "next",
}


def of_own(name: str, **settings: Any) -> Any:
    """Return a toy of a class, without dropout."""
    config = toy_config(re.split(r"For|LM", name)[0].lower(), **settings)
    made = CONFIG_MAPPING[config.pop("model_type")](**config)
    for key in [key for key in made.to_dict() if "drop" in key]:
        setattr(made, key, 0.0)
    torch.manual_seed(4)
    return getattr(transformers, name)(made)


@pytest.mark.parametrize("name", PLACES)
def test_a_class_tells_how_a_model_of_ones_own_takes_labels(name: str) -> None:
    assert discover(of_own(name), Job.model_validate({"model": {"factory": "a:b"}})).given_labels == PLACES[name]


def loss_of_a_step(model: Any, batch: dict[str, Tensor]) -> float | str:
    """Return the loss of a step in a loop of one's own, with that of routers, or the refusal."""
    sections: Any = {"training": {"steps": 1, "microbatch_size": 2}, "data": {"sequence_length": 8}}
    try:
        with Session(model=model, **sections, parallel={"device": "cpu"}, device=torch.device("cpu")) as session:
            result, coefficient = session.step([batch], learning_rate=0.0), session.plan.balancing_coefficient
    except (ConfigError, DataError) as error:
        return str(error)
    return result.loss + (coefficient * result.routers.balancing_loss if result.routers and coefficient else 0.0)


OWN_LOOPS: list[tuple[str, dict[str, Any], dict[str, Tensor], str]] = [  # class, config, labels, refusal
    *((name, {}, {}, "") for name in ("LlamaForCausalLM", "BartForCausalLM", "XLNetLMHeadModel", "BertForMaskedLM")),
    ("T5ForConditionalGeneration", {}, {}, ""),
    ("BertForSequenceClassification", {"num_labels": 3}, {"labels": torch.tensor([1, 2])}, ""),
    ("BartForSequenceClassification", {"num_labels": 3}, {"labels": torch.tensor([1, 2])}, ""),
    ("BertForSequenceClassification", {"num_labels": 3}, {"labels": torch.rand(2, 3)}, r"labels of torch\.float32"),
    ("BertForSequenceClassification", {"num_labels": 1}, {"labels": torch.tensor([0, 0])}, "is no mean cross-entropy"),
    ("ProphetNetForCausalLM", {}, {}, "the loss of ProphetNetForCausalLM is no mean cross-entropy"),
    ("MixtralForCausalLM", {"output_router_logits": True}, {}, ""),
]


@pytest.mark.parametrize(("name", "config", "labels", "said"), OWN_LOOPS)
def test_a_loop_of_ones_own_has_the_loss_of_the_class_or_says_so(
    world_pool: WorldPool, name: str, config: dict[str, Any], labels: dict[str, Tensor], said: str
) -> None:
    ids = torch.randint(1, 40, (2, 8), generator=torch.Generator().manual_seed(5))
    model = of_own(name, **config)
    if name == "BartForSequenceClassification":  # it looks for the one end of a text
        ids[ids == model.config.eos_token_id] = 5
        ids[:, -1] = model.config.eos_token_id
    batch = {"input_ids": ids, "labels": ids.flip(0), **labels}
    [outcome] = world_pool.run(1, loss_of_a_step, model, batch)
    if said:
        assert isinstance(outcome, str) and re.search(said, outcome)
    else:
        assert outcome == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def loss_of_a_job(job: Job, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]] | str:
    """Return the loss of a step on a batch of one's own, and the weights that it had, or the refusal."""
    try:
        with Session(job, device=torch.device("cpu")) as session:
            weights = {name: tensor.clone() for name, tensor in session.model.whole_tensors()}
            return session.step([batch], learning_rate=0.0).loss, weights
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("name", "said"), [("gpt2", ""), ("xlnet", ""), ("bart", ""), ("prophetnet", "is no mean")])
def test_own_batches_of_a_model_of_the_job_have_the_loss_of_its_class(
    world_pool: WorldPool, corpora: Path, name: str, said: str
) -> None:
    config = toy_config(name)
    job = make_job(corpora, model={"config": config, "dropout": 0.0}, training={"microbatch_size": 2})
    ids = torch.randint(1, 40, (2, 8), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "labels": ids.flip(0)}
    [outcome] = world_pool.run(1, loss_of_a_job, job, batch)
    if said:
        assert isinstance(outcome, str) and said in outcome
        return
    loss, weights = outcome
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.pop("model_type")](**config)).double().eval()
    model.load_state_dict(weights, strict=False)
    assert loss == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_labels_that_logits_have_no_places_for_are_named(world_pool: WorldPool) -> None:
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "labels": torch.zeros(2, 5, dtype=torch.int64)}
    [said] = world_pool.run(1, mismatched, batch)
    assert "labels of the shape [2, 5] for logits of [2, 8] places" in said


def mismatched(batch: dict[str, Tensor]) -> str:
    with (
        pytest.raises(DataError) as raised,
        Session(
            model=of_own("BertForMaskedLM"), training={"steps": 1, "microbatch_size": 2}, parallel={"device": "cpu"},
            data={"sequence_length": 8}, device=torch.device("cpu"),
        ) as session,
    ):  # fmt: skip
        session.step([batch])
    return str(raised.value)


def llama() -> Any:
    return of_own("LlamaForCausalLM")


def bart() -> Any:
    return of_own("BartForCausalLM")


def t5() -> Any:
    return of_own("T5ForConditionalGeneration")


def mixtral() -> Any:
    return of_own("MixtralForCausalLM", output_router_logits=True, experts_implementation="eager")


OWN_FACTORIES = [llama, *(pytest.param(make, marks=pytest.mark.slow) for make in (bart, t5, mixtral))]


@pytest.mark.parametrize("make", OWN_FACTORIES)
def test_a_factory_of_a_transformers_model_agrees_with_one_process(
    world_pool: WorldPool, tmp_path: Path, make: Any
) -> None:
    model = {"config": None, "factory": f"{__name__}:{make.__name__}", "loss": None}
    check_agrees(world_pool, 2, text_job(tmp_path, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, bart])
def test_text_of_a_factory_s_model_is_of_next_tokens_whatever_its_class_does(
    world_pool: WorldPool, corpora: Path, make: Any
) -> None:
    sections = make_job(corpora, "llama").model_dump(exclude_unset=True)
    check_agrees(world_pool, 2, Job.model_validate({**sections, "model": {"factory": f"{__name__}:{make.__name__}"}}))


def loss_of_a_batch(model: Any, ids: Tensor) -> tuple[float, float]:
    """Return the loss of a step of aligned labels, and the cross-entropy of the model's logits and these."""
    labels = one_ahead(ids)
    own = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
    batch = Batch({"input_ids": ids}, labels, torch.arange(2))
    sections: Any = {"training": {"steps": 1, "microbatch_size": 2}, "data": {"sequence_length": 8}}
    with Session(model=model, **sections, parallel={"device": "cpu"}, device=torch.device("cpu")) as session:
        return session.step([batch], learning_rate=0.0).loss, float(own)


def test_labels_that_are_aligned_ask_for_nothing_of_the_class(world_pool: WorldPool) -> None:
    """As those of a corpus: the class, which takes a loss of several tokens ahead, is not asked."""
    ids = torch.randint(1, 40, (2, 8), generator=torch.Generator().manual_seed(5))
    [(loss, own)] = world_pool.run(1, loss_of_a_batch, of_own("ProphetNetForCausalLM"), ids)
    assert loss == pytest.approx(own, rel=1e-5)
