"""The data of tasks that read files: rows of images or of sound, as samples of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.data.corpus import data_format
from shardwise.data.factory import Samples
from shardwise.data.file_rows import FileRow, split_rows
from shardwise.data.images import open_images
from shardwise.data.split import split_rule
from shardwise.data.token_data import TokenData
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS

# By what the samples of a task are: gives the rows of a job, and what makes a map-style data set of some of them.
OPENERS: dict[str, Callable[[Job], tuple[list[FileRow], Callable[[Sequence[FileRow]], Any]]]] = {
    "images": open_images,
}


def gives_samples(job: Job) -> bool:
    """Return whether the job's data are samples of tensors: of files, or of `data.factory`."""
    return data_format(job.data) == "factory" or TASKS[job.model.task].reads_files


def open_file_samples(job: Job, model_vocabulary: int | None) -> TokenData:
    """Return the samples of a job whose task reads files.

    Raises:
        DataError: a row is not what the task reads.
    """
    rows, dataset = OPENERS[TASKS[job.model.task].samples](job)
    training, validation = split_rows(job, rows)
    name = f"data.path={job.data.path!r}"
    samples = [Samples(dataset(some), 0, len(some), name) for some in (training, validation)]
    samples[0].sample(0)
    return TokenData(
        train=samples[0],
        validation=samples[1],
        corpus=name,
        documents=len(rows),
        tokens=0,
        vocabulary_size=model_vocabulary or 0,
        split=split_rule(job.data),
        tokenizer_directory=job.data.tokenizer,
    )
