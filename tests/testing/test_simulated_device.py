"""The simulated device, and what the discipline finds on it: in forks, since torch registers a device for good."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from shardwise._torch_compat.groups import fake_store
from shardwise._torch_compat.tracing import asks_for_values
from shardwise.errors import MachineError
from shardwise.testing.simulated.device import Simulation, module, simulated_device
from shardwise.testing.simulated.discipline import Discipline, DisciplineError, DisciplineMode, FaultKind
from tests.fork_server import call

DEVICE = "simulated"
WIDTH, ROWS, LENGTH = 32, 2, 8


class Block(nn.Module):
    """A small transformer's, which is computed again in backward."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device=device)
        self.query = nn.Linear(WIDTH, 3 * WIDTH, device=device)
        self.out = nn.Linear(WIDTH, WIDTH, device=device)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, device=device), nn.GELU(), nn.Dropout(0.1))
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.compute, hidden, use_reentrant=False)
        return output

    def compute(self, hidden: Tensor) -> Tensor:
        heads = self.query(self.norm(hidden)).view(ROWS, LENGTH, 4, -1).transpose(1, 2).chunk(3, -1)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=0.1)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH))
        return hidden + self.narrow(self.wide(hidden))


# ---- faults, each at the line that says so


def reads_a_value() -> None:
    loss = torch.empty((), device=DEVICE)
    loss.item()  # fault


def reads_a_condition() -> None:
    if torch.empty(3, device=DEVICE).sum() > 0:  # fault
        return


def finds_nonzero() -> None:
    torch.empty(3, device=DEVICE).nonzero()  # fault


def selects_by_mask() -> None:
    values = torch.empty(3, device=DEVICE)
    values[values > 0]  # fault


def compares() -> None:
    values = torch.empty(3, device=DEVICE)
    torch.equal(values, values)  # fault


def repeats_to_an_unknown_length() -> None:
    counts = torch.empty(3, dtype=torch.int64, device=DEVICE)
    torch.arange(3, device=DEVICE).repeat_interleave(counts)  # fault


def copies_to_host() -> None:
    torch.empty(3, device=DEVICE).cpu()  # fault


def copies_into_host() -> None:
    host = torch.empty(3, pin_memory=True)
    host.copy_(torch.empty(3, device=DEVICE))  # fault


def copies_pageable_to_device() -> None:
    torch.empty(3).to(DEVICE)  # fault


def waits_for_the_device() -> None:
    torch.accelerator.synchronize()  # fault


def waits_for_a_stream() -> None:
    torch.accelerator.current_stream().synchronize()  # fault


def waits_for_an_event() -> None:
    event = torch.Event(DEVICE)
    event.record()
    event.synchronize()  # fault


def reads_in_backward() -> None:
    weight = torch.empty(3, device=DEVICE, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * gradient.norm().item())  # fault
    (weight * 2).sum().backward()


def reads_in_a_recomputed_forward() -> None:
    def forward(hidden: Tensor) -> Tensor:
        scale = hidden.mean().item()  # fault
        return hidden * hidden * scale

    checkpoint(forward, torch.empty(3, device=DEVICE, requires_grad=True), use_reentrant=False).sum().backward()


def prefetches_unpinned() -> None:
    batch = torch.empty(3)
    batch.to(DEVICE, non_blocking=True)  # fault


def fetches_to_unpinned() -> None:
    host = torch.empty(3)
    host.copy_(torch.empty(3, device=DEVICE), non_blocking=True)  # fault


def fetches_many_to_unpinned() -> None:
    hosts = [torch.empty(3), torch.empty(4, pin_memory=True)]
    torch._foreach_copy_(hosts, [torch.empty(3, device=DEVICE), torch.empty(4, device=DEVICE)], True)  # fault


def reads_too_early() -> None:
    host = torch.empty(3, pin_memory=True)
    host.copy_(torch.empty(3, device=DEVICE), non_blocking=True)
    host.sum()  # fault


def reads_what_to_made_too_early() -> None:
    host = torch.empty(3, device=DEVICE).to("cpu", non_blocking=True)
    host.mul(2)  # fault


def waits_for_another_stream() -> None:
    side, host = torch.Stream(DEVICE), torch.empty(3, pin_memory=True)
    with side:
        host.copy_(torch.empty(3, device=DEVICE), non_blocking=True)
    torch.accelerator.current_stream().record_event().query()  # which knows nothing of `side`
    host.sum()  # fault


def overwrites_what_is_copied() -> None:
    host = torch.empty(3, pin_memory=True)
    host.to(DEVICE, non_blocking=True)
    host.zero_()  # fault


def gives_numpy_too_early() -> None:
    host = torch.empty(3, device=DEVICE).to("cpu", non_blocking=True)
    host.numpy()  # fault


def makes_a_tensor_of_values() -> None:
    torch.tensor([1.0, 2.0], device=DEVICE)  # fault


def indexes_by_a_list() -> None:
    values = torch.empty(3, device=DEVICE)
    values[[0, 2]]  # fault


def indexes_by_a_host_tensor() -> None:
    values = torch.empty(3, device=DEVICE)
    values[torch.arange(2)]  # fault


def writes_by_a_host_index() -> None:
    values = torch.empty(3, device=DEVICE)
    values[torch.arange(2)] = 1.0  # fault


def attends_as_a_cpu() -> None:
    query = torch.empty(1, 2, 4, 8, device=DEVICE)
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)  # fault


KEPT: list[Tensor] = []


def keeps_a_loss() -> None:
    KEPT.append(torch.empty(3, device=DEVICE).sum())  # fault


def keeps_a_gradient() -> None:
    KEPT.append(torch.empty(3, device=DEVICE))  # fault


FAULTS: dict[Callable[[], None], FaultKind] = {
    **dict.fromkeys(
        (reads_a_value, reads_a_condition, finds_nonzero, selects_by_mask, repeats_to_an_unknown_length, compares,
         copies_to_host, copies_into_host,
         copies_pageable_to_device, waits_for_the_device, waits_for_a_stream, waits_for_an_event, reads_in_backward),
        FaultKind.HOST_WAITS,
    ),
    **dict.fromkeys((prefetches_unpinned, fetches_to_unpinned, fetches_many_to_unpinned), FaultKind.NOT_PINNED),
    **dict.fromkeys(
        (reads_too_early, reads_what_to_made_too_early, waits_for_another_stream, overwrites_what_is_copied,
         gives_numpy_too_early),
        FaultKind.TOO_EARLY,
    ),
    **dict.fromkeys(
        (makes_a_tensor_of_values, indexes_by_a_list, indexes_by_a_host_tensor, writes_by_a_host_index),
        FaultKind.MADE_ON_HOST,
    ),
    attends_as_a_cpu: FaultKind.CPU_ONLY,
    keeps_a_loss: FaultKind.OUTLIVES,
    keeps_a_gradient: FaultKind.OUTLIVES,
}  # fmt: skip


def faults_of(body: Callable[[], None], **settings: Any) -> list[Any]:
    """Return (kind, place) of the faults of a step that does `body`."""
    with simulated_device() as simulation, simulation.fakes, DisciplineMode(Discipline(**settings)).watching() as seen:
        try:
            with seen.step():
                body()
        except RuntimeError as error:
            assert asks_for_values(error)
        return [(fault.kind, fault.place) for fault in seen.faults]


def line_of(body: Callable[[], None]) -> str:
    lines, start = inspect.getsourcelines(body)
    (at,) = (number for number, line in enumerate(lines) if line.rstrip().endswith("# fault"))
    return f"testing/test_simulated_device.py:{start + at}"


@pytest.mark.parametrize("body", FAULTS, ids=lambda body: body.__name__)
def test_a_fault_is_found_at_its_line(body: Callable[[], None]) -> None:
    assert call(faults_of, body) == [(FAULTS[body], line_of(body))]


def test_a_fault_is_found_in_a_recomputed_forward() -> None:
    body = reads_in_a_recomputed_forward
    assert call(faults_of, body) == 2 * [(FaultKind.HOST_WAITS, line_of(body))]


def test_the_first_fault_may_end_the_step() -> None:
    with pytest.raises(DisciplineError, match=f"{line_of(reads_a_value)} .*reads_a_value.*the host waits"):
        call(faults_of, reads_a_value, raises=True)


def test_faults_of_exempt_functions_are_left_out() -> None:
    assert call(faults_of, reads_a_value, exempt=["reads_a_value"]) == []


def mixed(*shape: int) -> str:
    """Return what torch says of the sum of a vector on the device and a tensor of the host."""
    with simulated_device() as simulation, simulation.fakes:
        try:
            return str((torch.empty(3, device=DEVICE) + torch.empty(shape)).device)
        except RuntimeError as error:  # it cannot be pickled
            return str(error)


def test_a_mix_of_host_and_device_is_an_error() -> None:
    assert call(mixed) == "simulated:0"  # a number of the host's is an argument of the kernel
    assert re.search(r"two (different )?devices,? simulated:0(,| and) cpu", call(mixed, 3))


# ---- what is no fault


def repeats_to_a_known_length() -> None:
    counts = torch.empty(3, dtype=torch.int64, device=DEVICE)
    torch.arange(3, device=DEVICE).repeat_interleave(counts, output_size=7)


def writes_beside_a_copy() -> None:
    host = torch.empty(6, pin_memory=True)
    host[:3].copy_(torch.empty(3, device=DEVICE), non_blocking=True)
    host[3:].fill_(1)


def fetches_and_prefetches() -> None:
    """Copy both ways on a stream of their own, with events; waits are outside of the step."""
    side, host = torch.Stream(DEVICE), torch.empty(3, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        moved = torch.empty(3).pin_memory().to(DEVICE, non_blocking=True)
        host.copy_(moved, non_blocking=True)
        host.to(DEVICE, non_blocking=True)  # after the copy into it, on the same stream
        event = side.record_event()
    moved.record_stream(side)
    torch.accelerator.current_stream().wait_event(event)
    host.to(DEVICE, non_blocking=True)  # after it by the event
    scaled = moved * 2 + torch.empty(())  # a number of the host's is an argument of the kernel
    assert scaled.device == torch.device(DEVICE, 0)


def fetched_after_its_event() -> list[Any]:
    with simulated_device() as simulation, simulation.fakes, DisciplineMode(Discipline()).watching() as seen:
        host = torch.empty(3, device=DEVICE).to("cpu", non_blocking=True)
        assert host.is_pinned() and not torch.empty(3).is_pinned()
        torch.accelerator.current_stream().record_event().synchronize()
        host.sum()
        return seen.faults


def test_copies_that_are_waited_for_are_no_fault() -> None:
    assert call(faults_of, fetches_and_prefetches) == []
    assert call(faults_of, writes_beside_a_copy) == []
    assert call(faults_of, repeats_to_a_known_length) == []
    assert call(fetched_after_its_event) == []


def sharded_steps(fused: bool) -> tuple[list[str], dict[str, int], int]:
    """Three steps of FSDP2, AdamW and checkpoints on one of 8 ranks: (faults, bytes at the peak, bytes of weights)."""
    with simulated_device() as simulation:
        dist.init_process_group("cpu:fake,simulated:fake", rank=0, world_size=8, store=fake_store())
        try:
            mesh = dist.device_mesh.init_device_mesh(DEVICE, (8,))
            with simulation.fakes, DisciplineMode(Discipline()).watching() as seen:
                model, optimizer = sharded(mesh, fused)
                for _ in range(3):
                    with seen.step(model, optimizer):
                        sharded_step(model, optimizer)
        finally:
            dist.destroy_process_group()
        weights = sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
        return [str(fault) for fault in seen.faults], dict(simulation.memory.peak), weights


def sharded(mesh: dist.DeviceMesh, fused: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=DEVICE)
    return model, torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)


def sharded_step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    hidden = torch.empty(ROWS, LENGTH, WIDTH).pin_memory().to(DEVICE, non_blocking=True)
    output = model(hidden).float()
    F.mse_loss(output, torch.zeros_like(output)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fused", [True, False])
def test_a_clean_step_has_no_fault(fused: bool) -> None:
    faults, peak, weights = call(sharded_steps, fused)
    assert faults == []
    assert peak["simulated"] > 4 * weights and peak["cpu"] > 0


# ---- the device itself


def answers() -> None:
    before = torch.accelerator.current_accelerator(), torch.Stream, torch.Generator
    (torch.ones(2, requires_grad=True) * 2).sum().backward()  # the engine has started before there is a device
    with simulated_device() as simulation:
        assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
        assert (torch.accelerator.device_count(), torch.accelerator.current_device_index()) == (1, 0)
        torch.accelerator.set_device_index(0)
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        streams_are_current(simulation)
        memory_is_counted(simulation)
        generators_are_kept()
        trains_under_autocast(simulation)
    assert (torch.accelerator.current_accelerator(), torch.Stream, torch.Generator) == before
    assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2]


def streams_are_current(simulation: Simulation) -> None:
    default, side = torch.accelerator.current_stream(), torch.Stream(simulation.device)
    with side:
        assert torch.accelerator.current_stream() is side and side != default
    assert torch.accelerator.current_stream() is default
    event = side.record_event()
    default.wait_event(event)
    assert event.query() and isinstance(event, torch.Event) and isinstance(side, torch.Stream)


def memory_is_counted(simulation: Simulation) -> None:
    with simulation.fakes:
        held, host = torch.empty(1000, device=DEVICE), torch.empty(10)
        torch.empty(500, device=DEVICE)
        held.view(10, 100).add_(1)
    assert simulation.memory.live == {"simulated": 4000, "cpu": 40}
    assert (torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()) == (4000, 6000)
    held.untyped_storage().resize_(0)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0 and host.device.type == "cpu"


def generators_are_kept() -> None:
    torch.manual_seed(7)
    assert module.initial_seed() == 7
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.manual_seed(8)
    assert module.initial_seed() == 7
    generator = torch.Generator(DEVICE).manual_seed(3)
    assert generator.device.type == DEVICE and isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator) and torch.Generator().device.type == "cpu"


def trains_under_autocast(simulation: Simulation) -> None:
    with simulation.fakes:
        block = Block(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            output = block(torch.empty(ROWS, LENGTH, WIDTH, device=DEVICE))
            assert block.out(output).dtype is torch.bfloat16
        output.sum().backward()
        assert block.out.weight.grad is not None and block.out.weight.grad.dtype is torch.float32
        torch.rand(3, device=DEVICE, generator=torch.Generator(DEVICE))


def test_the_device_answers_while_it_is_there() -> None:
    call(answers)


def takes_another_name() -> None:
    torch.utils.rename_privateuse1_backend("another")
    with simulated_device():
        pass


def test_a_second_device_is_refused() -> None:
    with pytest.raises(MachineError, match="'another'"):
        call(takes_another_name)
