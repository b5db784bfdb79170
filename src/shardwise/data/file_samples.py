"""The data of tasks that read files: rows of images or of sound, as samples of tensors."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.data.corpus import data_format
from shardwise.data.factory import Samples
from shardwise.data.file_rows import FileDataset, FileRow, row_hashes, split_file_rows
from shardwise.data.image_chats import open_image_chats
from shardwise.data.images import open_images
from shardwise.data.speech import open_speech
from shardwise.data.split import split_rule
from shardwise.data.store import digest
from shardwise.data.token_data import TokenData
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.job.tasks import FILE_FORMATS, TASKS
from shardwise.words import one_of

# By what the samples of a task are: the rows of a job for a model of so many tokens, and what makes tensors of them.
OPENERS: dict[str, Callable[[Job, int | None], tuple[list[FileRow], FileDataset]]] = {
    "images": open_images,
    "speech": open_speech,
    "chat": open_image_chats,
}


def gives_samples(job: Job) -> bool:
    """Return whether the job's data are samples of tensors: of files, or of `data.factory`."""
    if TASKS[job.model.task].reads_files:
        return True
    return not job.data.sources and data_format(job.data) == "factory"


def open_file_samples(job: Job, model_vocabulary: int | None) -> TokenData:
    """Return the samples of a job whose task reads files.

    Raises:
        ConfigError: the data has another format than the task reads.
        DataError: a row is not what the task reads.
    """
    samples, form = TASKS[job.model.task].samples, data_format(job.data)
    if form not in FILE_FORMATS[samples]:
        raise ConfigError(
            f"data.path={job.data.path!r} holds {form}, and model.task={job.model.task!r} reads "
            f"{one_of(FILE_FORMATS[samples])}; set data.path to such rows, or data.factory"
        )
    rows, dataset = OPENERS[samples](job, model_vocabulary)
    name, hashes = f"data.path={job.data.path!r}", row_hashes(rows)
    splits = [
        Samples(dataset.make(some), 0, len(some), name, dataset.stacked) for some in split_file_rows(job, rows, hashes)
    ]
    splits[0].sample(0)
    return TokenData(
        train=splits[0],
        validation=splits[1],
        corpus=name,
        documents=len(rows),
        tokens=0,
        vocabulary_size=model_vocabulary or 0,
        split=split_rule(job.data),
        tokenizer_directory=dataset.tokenizer,
        content=digest(*hashes.tolist()),
    )
