"""Map-style data sets of the user's own: `data.factory` returns something with `len` and `[index] -> dict of tensors`.

The last `validation_fraction` of the samples (at least one) is kept for validation. The key `labels` goes to
`Batch.labels`, the others are keyword arguments of the model. A data set may have an attribute `stacked`: the names of
the tensors that become a dim more in a batch. Those of all others, such as patches of images, stand one behind the
other. For causal language models of transformers labels stand at their own token, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shardwise.data.batch import Batch, one_ahead
from shardwise.errors import DataError
from shardwise.job.data_section import DataSection
from shardwise.job.objects import in_parentheses, load_object, named_error, raised_at, user_code
from shardwise.job.tasks import IGNORED

COMPARED = 4  # samples of each split that ranks compare


class TensorHash(NamedTuple):
    """Hash of a sample's tensor, and its dtype and shape."""

    content: str
    shape: str


@dataclass(frozen=True)
class Samples:
    """`count` samples of a map-style data set from `base` on."""

    dataset: Any
    base: int
    count: int
    name: str  # for messages
    stacked: frozenset[str] | None = None  # tensors that become a dim more in a batch; None: all. Others are joined
    labels_ahead: bool = False  # a batch has each label one position ahead of its token, where that is predicted
    classes: tuple[int, int] | None = None  # number of the classes that labels are, and dims of a sample's labels

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        """Samples stacked on a new dim 0, those that are joined with padding behind them; the seed plays no part."""
        samples = [self._with_labels(self.sample(index), index) for index in indices]
        for index, sample in zip(indices, samples, strict=True):
            self._check_alike(samples[0], sample, index)
        lengths = {key: [len(sample[key]) for sample in samples] for key in samples[0] if self._is_joined(key)}
        stacked = {
            key: pad_sequence([sample[key] for sample in samples], batch_first=True)
            if key in lengths
            else torch.stack([sample[key] for sample in samples])
            for key in samples[0]
        }
        labels = stacked.pop("labels", None)
        rows = torch.tensor(counters, dtype=torch.int64)
        return Batch(inputs=stacked, labels=labels, rows=rows, lengths=lengths)

    def _with_labels(self, sample: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        """Return a sample with its labels as the job's loss takes them."""
        labels = sample.get("labels")
        if labels is None:
            return sample
        if self.labels_ahead:
            labels = one_ahead(labels)
        if self.classes is not None:
            labels = self._checked_classes(labels, index, *self.classes)
        return {**sample, "labels": labels}

    def _checked_classes(self, labels: Tensor, index: int, classes: int, dims: int) -> Tensor:
        """Return classes as the loss takes them. Raises DataError where they are none."""
        is_whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        if not is_whole or labels.dim() != dims:
            wanted = "one whole number" if dims == 0 else "a whole number for each token"
            raise DataError(
                f"{self.name}: sample {self.base + index} has labels of {labels.dtype} and shape {list(labels.shape)}, "
                f"and the task takes {wanted}; return the number of a class"
            )
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise DataError(
                f"{self.name}: sample {self.base + index} has the class {int(wrong[0])}, and the model's are 0 to "
                f"{classes - 1}; give model.labels a name for each, or {IGNORED} where nothing is counted"
            )
        return labels.to(torch.int64)

    def _is_joined(self, key: str) -> bool:
        return self.stacked is not None and key not in self.stacked

    def _shape(self, key: str, value: Tensor) -> tuple[int, ...]:
        """Return the shape that is one in all samples."""
        return tuple(value.shape[1:] if self._is_joined(key) else value.shape)

    def sample(self, index: int) -> dict[str, Tensor]:
        """One checked sample."""
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        with user_code(f"{self.name}: sample {self.base + index}"):
            sample = self.dataset[self.base + index]
        if not isinstance(sample, dict) or not all(isinstance(value, Tensor) for value in sample.values()):
            what = type(sample).__name__
            if isinstance(sample, dict):
                what = "a dict of " + ", ".join(sorted({type(value).__name__ for value in sample.values()}))
            raise DataError(f"{self.name}: sample {self.base + index} is {what}; return a dict of tensors")
        if not set(sample) - {"labels"}:
            raise DataError(
                f"{self.name}: sample {self.base + index} has no model inputs, its keys are {list(sample)}; add those "
                "that the model's forward takes"
            )
        return sample

    def _check_alike(self, first: dict[str, Tensor], other: dict[str, Tensor], index: int) -> None:
        expected = {key: self._shape(key, value) for key, value in first.items()}
        shapes = {key: self._shape(key, value) for key, value in other.items()}
        if expected != shapes:
            raise DataError(
                f"{self.name}: sample {self.base + index} has shapes {shapes}, another of its batch {expected}; "
                "all samples must have the same keys and shapes (pad them)"
            )


def content_hash(*parts: Samples) -> str:
    """Return a hash of how many samples there are and of what a few of them hold, equal on every rank.

    A tensor that differs when its sample is read twice (an augmentation) counts by its shape alone.
    """
    content = xxhash.xxh3_64()
    for samples in parts:
        content.update(str(len(samples)).encode())
        for index in sorted({round(step * (len(samples) - 1) / (COMPARED - 1)) for step in range(COMPARED)}):
            first, second = (_tensor_hashes(samples.sample(index)) for _ in range(2))
            for key, (whole, shape) in first.items():
                is_drawn = second.get(key) != (whole, shape)
                content.update(f"{key} {shape if is_drawn else whole}".encode())
    return content.hexdigest()


def _tensor_hashes(sample: dict[str, Tensor]) -> dict[str, TensorHash]:
    """Return the hashes of a sample's tensors by key, in the order of the keys."""
    hashes = {}
    for key, value in sorted(sample.items()):
        shape = f"{value.dtype} {tuple(value.shape)}"
        content = xxhash.xxh3_64(shape.encode())
        content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        hashes[key] = TensorHash(content.hexdigest(), shape)
    return hashes


def open_samples(data: DataSection) -> tuple[Samples, Samples]:
    """(training, validation) samples of `data.factory`."""
    name = f"data.factory={data.factory!r}"
    make = load_object(str(data.factory), "data.factory")
    try:
        dataset = make(**data.factory_arguments)
    except Exception as error:  # the user's code may raise anything
        raise DataError(
            f"{name} raised {named_error(error)}{in_parentheses(raised_at(error))}; mend it there"
        ) from error
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{name} returned {type(dataset).__name__}; return a map-style data set, with __len__ and __getitem__"
        )
    size = len(dataset) if data.max_documents is None else min(len(dataset), data.max_documents)
    if size < 2:
        raise DataError(f"{name} has {size} samples; give two at least, one for training and one for validation")
    validation = max(1, floor(size * data.validation_fraction))
    stacked = getattr(dataset, "stacked", None)
    training = Samples(dataset, 0, size - validation, name, stacked)
    training.sample(0)
    return training, Samples(dataset, size - validation, validation, name, stacked)
