"""torch's own tests on the engine, beside Gloo: the runner, and those that torch installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collectives.upstream import adapted
from tests.collectives.upstream.__main__ import run, scripts
from tests.collectives.upstream.comparison import REASONS, Comparison

SCRIPT = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu


class SumTest(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(2)
    def test_sum(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("nccl", store=store, rank=self.rank, world_size=self.world_size)
        data = torch.ones(2, device="cuda")
        dist.all_reduce(data)
        self.assertEqual(dist.get_backend(), "nccl")
        self.assertEqual(data, torch.full((2,), 4.0))

    def test_name(self):
        self.assertEqual(1, 2)
"""


def test_a_text_is_adapted_in_the_backends_name_and_in_what_asks_for_a_gpu() -> None:
    text = "x.cuda(self.rank); init(backend='nccl' or \"gloo\", b='cpu:gloo'); dist.Backend.GLOO; ones(1, device=rank)"
    adapted_text = "x; init(backend='nccl' or \"own\", b='cpu:own'); dist.Backend.OWN; ones(1, device='cpu')"
    text += "; min(8, torch.get_device_module(self.device).device_count()); backend.create_device(interface=LOOPBACK)"
    adapted_text += f"; min(8, {adapted.RANKS}); None"
    assert adapted.adapt(text, "own", without_nccl=False) == adapted_text
    assert adapted.adapt(text, "own", without_nccl=True) == adapted_text.replace("nccl", "own")


def test_a_table_names_what_passes_on_one_backend_alone() -> None:
    passed, failed = {"outcome": "passed", "why": ""}, {"outcome": "failed", "why": "x\nValueError: no | sum\n"}
    comparison = Comparison({"a.one": passed, "a.two": passed, "a.three": failed}, {"a.one": passed, "a.two": failed})
    assert (comparison.both, comparison.gloo_alone, comparison.unexplained) == (["a.one"], ["a.two"], ["a.two"])
    assert "| Gloo | `a.two` | failed: ValueError: no / sum |" in comparison.table()


@pytest.mark.slow
def test_a_script_runs_on_both_backends(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's tests import the package expecttest")
    (tmp_path / "test_sum.py").write_text(SCRIPT)
    comparison = run(scripts(tmp_path))
    assert comparison.both == ["test_sum: SumTest.test_sum"]
    assert comparison.gloo["test_sum: SumTest.test_name"]["outcome"] == "failed"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_what_torch_installs_passes_where_it_passes_on_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("expecttest", reason="torch's tests import the package expecttest")
    comparison = run(scripts(None))
    with capsys.disabled():
        print(comparison.table())
    assert len(comparison.both) > 150
    assert not comparison.unexplained
    assert len(REASONS) <= 10
