"""The one word under launchers and trainers of others: torchrun, Accelerate, Hugging Face's Trainer, Lightning.

The programs of Accelerate and Trainer are those of docs/how-to/collectives.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import DOCS, block_with

PAGE = "how-to/collectives.md"
SOURCE = Path(__file__).parents[2] / "src"
SHOWN = """
import torch.distributed
assert torch.distributed.get_backend() == "shardwise"
assert torch.distributed.get_world_size() == 2
assert all(torch.isfinite(each).all() for each in model.parameters())
print("trained on two ranks")
"""
# Lightning takes the word itself.
LIGHTNING = """
import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

model = BoringModel()
strategy = DDPStrategy(process_group_backend="shardwise")
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(model)
"""


def run(directory: Path, line: str, program: str) -> str:
    """Run a line that a page shows, with `program` as train.py; return what it prints."""
    (directory / "train.py").write_text(program)
    install(directory)
    words = shlex.split(line)
    modules = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
    command = [sys.executable, "-m", modules[words[0]], *words[1:]]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(directory / "site")]),
        "HF_HOME": str(directory / "home"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(directory: Path) -> None:
    """Make the package's entry point known as an installation does."""
    installed = directory / "site" / "entry-0.dist-info"
    installed.mkdir(parents=True)
    point = "[torch.backends]\nshardwise = shardwise.collectives.registration:register\n"
    (installed / "entry_points.txt").write_text(point)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 0\n")


def line_of_page(launcher: str) -> str:
    """The page's one line of a launcher."""
    [line] = re.findall(rf"^{launcher} .*$", (DOCS / PAGE).read_text(encoding="utf-8"), re.M)
    return line


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
@pytest.mark.parametrize("program", ["Accelerator(", "Trainer("])
def test_a_program_of_the_page_trains(tmp_path: Path, launcher: str, program: str) -> None:
    printed = run(tmp_path, line_of_page(launcher), block_with(PAGE, program) + SHOWN)
    assert printed.count("trained on two ranks") == 2


@pytest.mark.slow
def test_lightning_trains(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    printed = run(tmp_path, line_of_page("torchrun"), LIGHTNING + SHOWN)
    assert printed.count("trained on two ranks") == 2
