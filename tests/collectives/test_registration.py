"""One word for torch: the entry point by which `import torch` learns of the backend, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PROGRAM = """
import sys
import torch
import torch.distributed as dist

loaded = sorted(name for name in sys.modules if name.startswith("shardwise"))
assert loaded == ["shardwise", "shardwise.collectives", "shardwise.collectives.registration"], loaded
dist.init_process_group("shardwise")
data = torch.ones(2)
dist.all_reduce(data)
assert dist.get_backend() == "shardwise" and data.tolist() == [2.0, 2.0]
dist.destroy_process_group()
print("summed")
"""


@pytest.mark.slow
def test_torch_finds_the_backend_by_its_entry_point(tmp_path: Path) -> None:
    points = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["torch.backends"]
    installed = tmp_path / "site" / "entry-0.dist-info"
    installed.mkdir(parents=True)
    lines = [f"{name} = {value}" for name, value in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 0\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(PYPROJECT.parent / "src"), str(tmp_path / "site")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.count("summed") == 2, done.stderr
