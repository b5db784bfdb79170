"""One microbatch of one rank: named model inputs, labels, and what layout-independent randomness needs.

Made by `shardwise.data.loader.Stream`; read by the training step, the loss and layout-independent dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import xxhash
from torch import Tensor

from shardwise.job.devices import CPU, copies_aside, widest_float
from shardwise.job.tasks import IGNORED


def one_ahead(labels: Tensor) -> Tensor:
    """Return labels [..., S] that stand at their own tokens at the positions that predict these; the last has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def can_be_ignored(labels: Tensor) -> bool:
    """Tell whether labels can be IGNORED: neither floats nor flags and unsigned numbers, which have no -100."""
    return labels.dtype.is_signed and not labels.is_floating_point()


@dataclass
class Batch:
    """B samples. Every tensor has the batch as dim 0.

    inputs: keyword arguments of the model; `input_ids` [B, S] int64 for a language model, `position_ids` [B, S] where
    documents are isolated.
    labels: [B, S] int64, aligned with the output position (causal: label t is token t + 1); -100 is not counted.
    Floats (a user's regression) are counted by rows; of bools and unsigned numbers all labels of counted rows are.
    whole_labels: [B, S], where `labels` are a part of them.
    rows: [B] int64, the global sample counter of each row: a pure function of step and row, the same on every layout.
    document_ids: [B, S] int64, number of the document within its row, from 0; only where documents are isolated.
    weights: [B, S] float, what each label's loss is multiplied by before it is summed; only under a mean over samples
    (`with_sample_weights`). The weights of a sample are equal and add up to 1.
    counted: [B] bool, False for padding rows: they repeat a real row, and no loss may count them.
    is_token: [B, S] bool, False where a row is filled up; None where no row is, as far as is known. Unset: what an
    input `attention_mask` [B, S] says. Routers of experts do not count the rest.
    completions: [B, S] int64, number within its row of the completion that a position belongs to: 2k is the chosen one
    of pair k, 2k + 1 the rejected one; only for pairs of preferences.
    reference: [B, C] log-probability of each completion by a reference model, in the order of these numbers; once it is
    known, where there is one.
    digest: hash of the real samples (`batch_digest`), signed 64 bits.
    sequences_per_sample: into which each sample of the data was cut (`cut`).
    first_row: counter of the first row, known on the host of a batch that `to` has brought to an accelerator.
    lengths: of inputs that are joined (patches of images), the number of entries of each row in dim 1; what is behind
    is padding. The model gets the entries of all rows one behind the other. On the host.
    is_numbered: False where `rows` are right but for what all of them are from, which the step tells (`numbered_from`).
    """

    inputs: dict[str, Tensor]
    labels: Tensor | None
    rows: Tensor
    document_ids: Tensor | None = None
    weights: Tensor | None = None
    counted: Tensor = field(default=None)  # type: ignore[assignment]  # a tensor always, once constructed
    is_token: Tensor | None = None
    completions: Tensor | None = None
    reference: Tensor | None = None
    digest: int = 0
    sequences_per_sample: int = 1
    whole_labels: Tensor | None = None
    lengths: dict[str, list[int]] = field(default_factory=dict)
    first_row: int | None = None
    is_numbered: bool = True

    def arguments(self, rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Return the inputs as the model takes them, of some rows or all: those that are joined without padding."""
        taken = range(len(self.rows)) if rows is None else rows

        def argument(name: str, value: Tensor) -> Tensor:
            if name in self.lengths:
                return torch.cat([value[row][: self.lengths[name][row]] for row in taken])
            return value if rows is None else value[list(rows)]

        return {name: argument(name, value) for name, value in self.inputs.items()}

    def __post_init__(self) -> None:
        if self.counted is None:
            self.counted = torch.ones(len(self.rows), dtype=torch.bool, device=self.rows.device)
        mask = self.inputs.get("attention_mask")
        if self.is_token is None and mask is not None and mask.dim() == 2:
            self.is_token = mask != 0

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        batch = self.mapped(partial(moved, device=device))
        batch.first_row = self.first_row
        if len(self.rows) and self.rows.is_cpu and not batch.rows.is_cpu:  # a host would wait for it there
            batch.first_row = int(self.rows[0])
        return batch

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with each tensor changed."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return Batch(
            inputs={name: change(tensor) for name, tensor in self.inputs.items()},
            labels=changed(self.labels),
            rows=change(self.rows),
            document_ids=changed(self.document_ids),
            weights=changed(self.weights),
            counted=change(self.counted),
            is_token=changed(self.is_token),
            completions=changed(self.completions),
            reference=changed(self.reference),
            digest=self.digest,
            sequences_per_sample=self.sequences_per_sample,
            lengths=self.lengths,
            is_numbered=self.is_numbered,
        )

    def numbered_from(self, first: Tensor) -> Batch:
        """Return the batch with rows that count from `first`, 0-dim."""
        return replace(self, rows=self.rows - self.rows[:1] + first, first_row=None, is_numbered=True)

    def cut(self, number: int) -> Batch:
        """Return the batch with each sample [S] cut into `number` sequences [S / number], in order.

        Sample c becomes the sequences c * number and following, as it would in a run that had always had their length.
        Labels stay: that of a sequence's last token is the next one's first. Positions and documents count from 0 anew.
        """
        if number == 1:
            return self

        def apart(values: Tensor) -> Tensor:
            return values.reshape(len(values) * number, -1)

        assert self.labels is not None
        inputs, documents = {name: apart(values) for name, values in self.inputs.items()}, None
        if self.document_ids is not None:
            documents = apart(self.document_ids)
            documents = documents - documents[:, :1]
            positions = inputs["position_ids"]
            inputs["position_ids"] = positions - positions[:, :1] * (documents == 0)
        return replace(
            self,
            inputs=inputs,
            labels=apart(self.labels),
            rows=(self.rows[:, None] * number + torch.arange(number, device=self.rows.device)).flatten(),
            document_ids=documents,
            counted=self.counted.repeat_interleave(number),
            is_token=None if self.is_token is None else apart(self.is_token),
            sequences_per_sample=number,
        )

    def count(self) -> Tensor:
        """Scalar: the labels that are counted, or real rows where there are no labels or they are not class ids.

        Int64; with `weights` their sum in the device's widest dtype, which is the number of samples up to rounding.
        """
        if self.weights is not None:
            return self.weights.sum(dtype=widest_float(self.weights.device))
        if self.labels is None or self.labels.is_floating_point():
            return self.counted.sum()
        if not can_be_ignored(self.labels):
            return self.counted.sum() * self.labels[:1].numel()
        return (self.labels != IGNORED).sum()

    def with_sample_weights(self) -> Batch:
        """Return the batch with weights by which every sample that has a counted label counts 1.

        A sample is a pair of completions, or a document or a row where these are isolated, else a row of the batch.
        """
        assert self.labels is not None
        wide = widest_float(self.labels.device)
        counted = (self.labels != IGNORED).to(wide)
        numbers = torch.zeros_like(self.labels) if self.document_ids is None else self.document_ids
        numbers = numbers if self.completions is None else self.completions // 2
        sizes = torch.zeros(len(counted), int(numbers.max()) + 1, dtype=wide, device=counted.device)
        sizes.scatter_add_(1, numbers, counted)  # [B, documents]
        return replace(self, weights=counted / sizes.gather(1, numbers).clamp(min=1))


def in_order(parts: Sequence[tuple[Sequence[int], Batch]]) -> Batch:
    """Join batches of equal fields into one; each comes with the rows of the whole that its own become."""
    if len(parts) == 1:
        return parts[0][1]
    places = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
    batches = [batch for _, batch in parts]

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        given = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(given)[places] if given else None

    names = ("labels", "rows", "document_ids", "weights", "counted", "is_token", "completions", "reference")
    fields = {name: joined([getattr(batch, name) for batch in batches]) for name in names}
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches])[places] for name in batches[0].inputs}
    return Batch(inputs=inputs, **fields)  # type: ignore[arg-type]


def batch_digest(batch: Batch) -> int:
    """Hash of the real samples of a batch: the wrapping sum of each one's XXH3-64 over its counter, inputs and labels.

    A sum, so that the hash of a step does not depend on which rank or microbatch holds a sample.
    """
    columns = [batch.rows, *(value for _, value in sorted(batch.inputs.items()))]
    columns += [] if batch.labels is None else [batch.labels]
    lengths = [None, *(batch.lengths.get(name) for name in sorted(batch.inputs)), None]

    def content(row: int) -> Iterator[bytes]:
        for column, real in zip(columns, lengths):
            values = column[row] if real is None else column[row][: real[row]]
            yield values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    rows = batch.counted.nonzero().flatten().tolist()
    return wrap(sum(xxhash.xxh3_64_intdigest(b"".join(content(row))) for row in rows))


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on `device`, fp64 in its widest dtype. The host does not wait for a copy that goes on aside."""
    device = torch.device(device)
    if tensor.dtype == torch.float64:
        tensor = tensor.to(widest_float(device))
    if tensor.device.type == CPU and copies_aside(device.type):
        tensor = tensor.pin_memory()  # from other memory it would
    return tensor.to(device, non_blocking=copies_aside(device.type))


def wrap(value: int) -> int:
    """`value` as a signed 64-bit integer, as int64 tensors wrap around."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
