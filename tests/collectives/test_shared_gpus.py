"""Several ranks on one GPU: what carries their tensors, with GPUs that are not there; the last tests need one."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import engine, registration, topology
from shardwise.commands import verify
from shardwise.errors import ConfigError, LegalityError, MachineError
from shardwise.job.schema import Job
from shardwise.launch import process_group as process_groups
from shardwise.launch.environment import RankEnvironment
from shardwise.launch.expected_world import expected_world, world_size
from shardwise.launch.job_group import usable_backend
from shardwise.plan.plan import Plan, World, resolve
from shardwise.smp.backend import choose_backend
from shardwise.smp.script import Script, launch_script
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job
from tests.plan.rules.jobs import FACTS


def job(backend: str = "auto", **parallel: Any) -> Job:
    return Job.model_validate({"parallel": {"device": "cuda", "ddp_dist_backend": backend, **parallel}})


def planned(world: World, backend: str = "auto") -> tuple[str, str]:
    plan = resolve(job(backend), world, FACTS)
    return plan.backend, plan.rules["backend"]


def test_auto_is_the_engine_where_ranks_share_a_gpu() -> None:
    through = ", and NCCL joins one rank of each; the engine moves their tensors through the host's memory"
    assert planned(World(2, "cuda", 2, gpus=2)) == ("nccl", "ddp_dist_backend auto on cuda")
    assert planned(World(2, "cuda", 2)) == ("nccl", "ddp_dist_backend auto on cuda")
    assert planned(World(4, "cuda", 4, gpus=1)) == (
        "shardwise",
        "ddp_dist_backend auto on cuda: 4 ranks of a host share 1 GPU(s)" + through,
    )
    elsewhere = World(4, "cuda", 2, hosts=2, gpus=2, engine=True)
    assert planned(elsewhere) == (
        "shardwise",
        "ddp_dist_backend auto on cuda: ranks of another host share a GPU" + through,
    )
    assert planned(World(2, "cuda", 2, gpus=2), "shardwise") == ("shardwise", "ddp_dist_backend given")


def shown_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def of_job(job: Job) -> Plan:
    return resolve(job, expected_world(job, None), FACTS)


def test_a_jobs_own_workers_are_counted_against_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_gpus(monkeypatch, 2)
    assert of_job(job(workers=2)).backend == of_job(job()).backend == "nccl"
    plan = of_job(job(workers=4))
    assert plan.world == World(4, "cuda", 4, gpus=2) and plan.backend == "shardwise"
    assert plan.fingerprint == of_job(job("auto", workers=4)).fingerprint
    with pytest.raises(LegalityError, match=r"4 ranks of a host share 2 GPU\(s\).*; use auto or shardwise, or 2 rank"):
        of_job(job("nccl", workers=4))


def test_without_the_engine_there_is_nothing_to_fall_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(say: object) -> None:
        raise MachineError("there is no compiler")

    shown_gpus(monkeypatch, 1)
    plan = of_job(job(workers=2))
    monkeypatch.setattr(engine, "build", fail)
    with pytest.raises(MachineError, match=r"no compiler\. The ranks share GPUs, which NCCL refuses; use a rank a GPU"):
        usable_backend(plan, print)


def place(rank: int, world: int, local: int) -> RankEnvironment:
    return RankEnvironment(rank, world, rank % local, local, "h", 1, "torchrun")


def met(uuids: str) -> tuple[World, str]:
    """The world of a rank that sees one GPU, whose uuid is its letter; and what `_check_shared` says of NCCL."""
    rank, here = dist.get_rank(), place(dist.get_rank(), len(uuids), len(uuids))
    properties = SimpleNamespace(name="H100", uuid=uuids[rank])
    patch = pytest.MonkeyPatch()
    with patch.context() as fake:
        fake.setattr(torch.cuda, "device_count", lambda: 1)
        fake.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        fake.setitem(process_groups._stores, here, dist.PrefixStore(f"met/{uuids}", dist.group.WORLD.get_group_store()))  # type: ignore[union-attr]
        world = world_size(job(), here)
        try:
            process_groups._check_shared("cpu:gloo,cuda:nccl", torch.device("cuda"), here)
            return world, ""
        except MachineError as error:
            return world, str(error)


def test_ranks_of_a_launcher_tell_one_another_which_gpu_they_see(world_pool: WorldPool) -> None:
    """A launcher may show each rank a GPU of its own, as `srun --gpus-per-task=1` does, or all ranks the same."""
    assert world_pool.run(2, met, "ab") == [(World(2, "cuda", 2, gpus=2), "")] * 2
    for world, said in world_pool.run(2, met, "aa"):
        assert world == World(2, "cuda", 2, gpus=1) and world.shares_gpus
        assert "2 ranks of this host share 1 GPU(s)" in said and "ddp_dist_backend to auto or shardwise" in said


def test_gpus_are_dealt_out_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_gpus(monkeypatch, 2)
    assert [process_groups._gpu("cuda", place(rank, 4, 4)) for rank in range(4)] == [0, 1, 0, 1]
    shown_gpus(monkeypatch, 0)
    with pytest.raises(MachineError, match=r"finds no GPU.*parallel\.device to cpu"):
        process_groups._device("cuda", place(0, 1, 1))


def agreed(brought: list[str], device_type: str) -> list[str]:
    store, names = dist.HashStore(), [""] * len(brought)

    def ask(rank: int) -> None:
        names[rank] = process_groups.agree(store, place(rank, len(brought), 1), brought[rank], device_type)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(brought))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_hosts_agree_on_what_all_can_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreed(["nccl", "nccl", "shardwise"], "cuda") == ["shardwise"] * 3
    assert "the native engine: rank 2 shares a GPU with another, which NCCL refuses." in capsys.readouterr().err
    assert agreed(["shardwise", "gloo"], "cpu") == ["gloo"] * 2
    assert "over Gloo: rank 1 cannot use the native engine" in capsys.readouterr().err
    assert agreed(["nccl", "nccl"], "cuda") == ["nccl"] * 2


def test_scripts_need_a_gpu_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown_gpus(monkeypatch, 1)
    (tmp_path / "script.py").write_text("")
    with pytest.raises(ConfigError, match=r"--workers=2 needs as many GPUs, this host shows 1.*--workers=1 or less"):
        launch_script(Script(str(tmp_path / "script.py"), (), "cuda"), 2)


def test_smps_backend_is_the_engine_where_ranks_share_a_gpu() -> None:
    assert choose_backend(job().parallel, World(2, "cuda", 2, gpus=1), []) == "shardwise"
    assert choose_backend(job().parallel, World(2, "cuda", 2, gpus=2), []) == "nccl"


# --- on a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@gpu
@pytest.mark.parametrize("degrees", [{}, {"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}])
def test_ranks_that_share_a_gpu_compute_what_one_process_does(
    monkeypatch: pytest.MonkeyPatch, corpora: Path, degrees: dict[str, int]
) -> None:
    """FSDP2, a pipeline, tensor parallelism: losses, gradients and updates of three steps, by the oracle."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of the workers; two of them share it on any machine
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    precise = {"compute": "fp32"}
    parallel = {"device": "cuda", "workers": 2, **degrees}
    report = verify.verify(make_job(corpora, parallel=parallel, precision=precise))
    assert report is not None and report.agrees


def on_gpu(backend: str) -> tuple[tuple[int, ...], float]:
    """Which ranks share this one's GPU, and the largest error of a gather and a sum, plain and on a stream."""
    registration.register()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group, rank, size = dist.new_group(backend=backend), dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("gpu", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    found = topology.discover_topology(store, rank, size, topology.gpu_identity("cuda", 0))
    errors: list[torch.Tensor] = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # what is asked for has not been computed yet
            whole, part = torch.zeros(size * 300_001, device=device), torch.full((300_001,), rank + 1.0, device=device)
            work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
            part.fill_(-1.0)
            work.wait()
            dist.all_reduce(part, group=group)
            right = torch.arange(1.0, size + 1, device=device).repeat_interleave(300_001)
            errors += [(whole - right).abs().max(), (part + size).abs().max()]
    torch.cuda.synchronize()
    return found.sharers(rank), max(error.item() for error in errors)


@gpu
def test_streams_of_a_gpu_keep_their_order(world_pool: WorldPool) -> None:
    assert world_pool.run(2, on_gpu, "shardwise") == [((0, 1), 0.0)] * 2
