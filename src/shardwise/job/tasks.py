"""The tasks that `model.task` can name: one record each, plain data.

A task is a head of transformers, what its samples are and how their labels are counted. The schema of a job, the
legality table, the reader of its data, the loss and the tools that try every model type read the same records.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

IGNORED = -100  # label of a position that no loss counts; torch's and transformers' own ignore_index
FILE_FORMATS = {  # values of `data.format` of what a task reads, beside auto
    "images": ("image_folder", "jsonl", "parquet", "dataset"),
    "speech": ("jsonl", "parquet", "dataset"),
    "chat": ("chat",),
}


@dataclass(frozen=True)
class ModelTask:
    """A task.

    Attributes:
        name: the value of `model.task`.
        auto_class: transformers' class that makes its models.
        mapping: transformers' mapping from configs to the models that it makes.
        labels: what the loss counts: the `next` token of each position, a token of the `same` position, tokens of a
            `decoder` that reads them one later, or `classes`.
        samples: what is read: `text` or token ids; tensors of a `factory` alone; or rows of `images` with a class,
            of `speech` with its text, of a `chat` with images.
        peft: the name of the task in files of adapters; empty where peft has none.
    """

    name: str
    auto_class: str
    mapping: str
    labels: Literal["next", "same", "decoder", "classes"]
    samples: Literal["text", "factory", "images", "speech", "chat"] = "text"
    peft: str = ""

    @property
    def classifies(self) -> bool:
        """True where labels are classes, of samples or of their tokens."""
        return self.labels == "classes"

    @property
    def counted(self) -> str:
        """Word for what a loss is a mean over."""
        return "label" if self.classifies else "token"

    @property
    def reads_files(self) -> bool:
        """True where rows name files of images or of sound, which are read as they are trained on."""
        return self.samples in ("images", "speech", "chat")

    @property
    def whole_sequences(self) -> str:
        """Why context ranks cannot share its sequences, as a clause; empty where the model decides."""
        if self.classifies:
            return "a head of classes reads whole sequences"
        return "sequences of tokens are split, and samples of files are others" if self.reads_files else ""

    def model_class(self) -> Any:
        """Return transformers' class that makes a model of a config, or of a directory."""
        import transformers

        return getattr(transformers, self.auto_class)

    def types(self) -> Any:
        """Return transformers' mapping from classes of configs to those of models."""
        import transformers

        return getattr(transformers, self.mapping)

    def arguments(self, config: Any) -> frozenset[str]:
        """Return the names of what the forward of transformers' model of a config takes; none for code of its own."""
        models = self.types().get(type(config), None)
        model = models[0] if isinstance(models, tuple) else models  # the first is the head for this task
        return frozenset() if model is None else frozenset(inspect.signature(model.forward).parameters)


TASKS = {
    task.name: task
    for task in (
        ModelTask("causal_lm", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "next", peft="CAUSAL_LM"),
        ModelTask("masked_lm", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", "same"),
        ModelTask(
            "seq2seq_lm",
            "AutoModelForSeq2SeqLM",
            "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
            "decoder",
            peft="SEQ_2_SEQ_LM",
        ),
        ModelTask(
            "sequence_classification",
            "AutoModelForSequenceClassification",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
            "classes",
            "factory",
            peft="SEQ_CLS",
        ),
        ModelTask(
            "token_classification",
            "AutoModelForTokenClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
            "classes",
            "factory",
            peft="TOKEN_CLS",
        ),
        ModelTask(
            "image_classification",
            "AutoModelForImageClassification",
            "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
            "classes",
            "images",
        ),
        ModelTask(
            "speech_seq2seq", "AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "decoder", "speech"
        ),
        ModelTask(
            "image_text_to_text", "AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "next", "chat"
        ),
    )
}
