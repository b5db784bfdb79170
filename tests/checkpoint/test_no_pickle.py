"""Every file of a checkpoint as a pickle that would do something: none is opened."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128_hexdigest

from shardwise.checkpoint.manifest import BLOCK_BYTES, OWNER
from shardwise.launch.process_group import process_group
from shardwise.training.setup import set_up
from tests.checkpoint.test_bad_input import Damage, a_job, alone, edited, newest, restore_all, written

__all__ = ["newest", "written"]  # fixtures


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def plant(path: Path, bomb: bytes) -> list[tuple[str, Damage]]:
    """Every file of the checkpoint as a bomb: as it is, of the right size, and with the right hashes."""

    def whole(file: str) -> Damage:
        return lambda at: (at / file).write_bytes(bomb)

    def sized(file: str, content: bytes) -> Damage:
        return lambda at: (at / file).write_bytes(content)

    def hashed(file: str, content: bytes) -> Damage:
        blocks = [content[i : i + BLOCK_BYTES] for i in range(0, len(content), BLOCK_BYTES)]
        change = edited(lambda m: m["files"][file].update(hashes=[xxh3_128_hexdigest(block) for block in blocks]))
        return lambda at: (sized(file, content)(at), change(at))

    made: list[tuple[str, Damage]] = [(file.name, whole(file.name)) for file in path.iterdir()]
    for file in path.glob("*.safetensors"):
        content = bomb + file.read_bytes()[len(bomb) :]
        made += [(file.name, sized(file.name, content)), (f"{file.name} hashed", hashed(file.name, content))]
    return made


def open_bombs(checkpoint: str, spare: str, corpora: str) -> None:
    """Prints what reading each bomb said, then whether any was unpickled; at last one is, to show that it is seen."""
    path, seen = Path(checkpoint), list[Any]()

    def watch(event: str, arguments: Any) -> None:
        if event == "pickle.find_class" and arguments[0] != __name__:
            frames = [frame.name for frame in traceback.extract_stack()]
            if "_tensor_to_object" not in frames:  # torch's control messages
                seen.append(arguments)

    bomb = pickle.dumps(Bomb(str(path.parent / "boom")))
    jobs = [a_job(Path(corpora), path.parents[1], resume) for resume in (str(path), "auto")]
    (path.parent / OWNER).write_bytes(bomb)
    with process_group("cpu", "gloo"):
        run = set_up(jobs[0], torch.device("cpu"))
        sys.addaudithook(watch)
        for name, damage in plant(path, bomb):
            damage(path)
            print(name, [error for error, _ in restore_all(run, jobs)])
            shutil.copytree(spare, path, dirs_exist_ok=True)
    print((path.parent / "boom").exists(), seen)
    pickle.loads(bomb)
    print((path.parent / "boom").exists(), seen)


def test_no_pickle_is_opened(newest: Path, corpora: Path, tmp_path: Path) -> None:
    spare = shutil.copytree(newest, tmp_path / "spare")
    *lines, quiet, loud = alone("test_no_pickle", "open_bombs", newest, spare, corpora)
    assert len(lines) == 3 + 2 * 2
    for line in lines:
        name, _, errors = line.partition(" [")
        assert ("damaged" in errors or "bytes; it holds" in errors) == (not name.endswith("hashed")), line
        assert errors.endswith("'']")  # auto took the older one, or the hostile values as values
    assert quiet == "False []"
    assert loud == "True [('posix', 'mkdir')]"
