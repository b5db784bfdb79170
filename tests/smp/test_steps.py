"""Steps, requests and messages: what scripts rely on beside the numbers, and how their mistakes end."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.smp.exceptions import (
    MessageError,
    NotInitializedError,
    PartitionError,
    SMPValidationError,
    StepUsageError,
)
from shardwise.smp.v1.step_outputs import collect_outputs
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model, train_step

PIPELINE: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


@smp.step(non_split_inputs=["whole"], input_split_axes={"turned": 1})
def cut(first: Any, turned: Any, whole: Any, **named: Any) -> Any:
    return {"shapes": (first["x"].shape[0], turned.shape[1], whole.shape[0]), "t": [first["x"]], "other": named}


def test_arguments_are_cut_and_outputs_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({"microbatches": 2}))
    with pytest.raises(NotInitializedError, match=r"smp\.init"):
        cut(1, 2, 3)
    smp.init({"microbatches": 4})
    try:
        assert smp.num_microbatches() == smp.state.cfg.microbatches == 2
        x = torch.arange(8.0).view(4, 2)
        out = cut({"x": x}, torch.zeros(3, 6), x, plain="kept")
        assert out["shapes"] == ([2, 2], [3, 3], [4, 4]) and out["other"] == {"plain": ["kept", "kept"]}
        assert torch.equal(out["t"][0].concat(), x) and out["t"][0].stack().shape == (2, 2, 2)
        assert torch.equal(out["t"][0].reduce_mean(), x.view(2, 2, 2).mean(0))
        with pytest.raises(SMPValidationError, match="microbatches=2 does not divide the 3 rows of 'first'"):
            cut({"x": x[:3]}, x, x)
        assert smp.allgather("a", smp.DP_GROUP) == ["a"] and smp.broadcast("a", smp.PP_GROUP) is None
    finally:
        smp.state.reset()


@pytest.mark.parametrize(
    "config, said",
    [
        ({"microbatch": 2}, "Did you mean 'microbatches'"),
        ({"pipeline_parallel_degree": 3}, "does not divide the 1 ranks"),
        ({"contiguous": True}, "SMP for TensorFlow"),
        ({"partitions": 1, "pipeline_parallel_degree": 2}, "disagree"),
        ({"microbatches": 0}, "init: microbatches=0: must be greater"),
        (
            {"offload_activations": True, "activation_loading_horizon": 0},
            "init: activation_loading_horizon=0: must be greater",
        ),
        ({"hybrid_shard_degree": 2}, "hybrid_shard_degree=2 is of SMP version 2"),
        ({"sharded_data_parallel_degree": 2, "shard_optimizer_state": True}, "the state alone; keep one"),
    ],
)
def test_wrong_options_are_refused(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], said: str) -> None:
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    try:
        with pytest.raises(ConfigError, match=said):
            smp.init(config)
    finally:
        smp.state.reset()


def _mistakes() -> list[str]:
    smp.init(PIPELINE)
    try:
        module = make_model("gpt2")
        model: Any = smp.DistributedModel(module)
        said = []

        @smp.step
        def twice(model: Any, ids: Tensor) -> Tensor:
            model(input_ids=ids)
            found: Tensor = model(input_ids=ids).logits
            return found

        @smp.step
        def never(model: Any, ids: Tensor) -> Tensor:
            return ids

        @smp.step
        def train(model: Any, ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
            return loss

        @smp.step(input_split_axes={"ids": 5})
        def turned(model: Any, ids: Tensor) -> Tensor:
            return ids

        ids = batches()[0]
        tried: list[Callable[[], Any]] = [
            lambda: turned(model, ids),
            lambda: model(input_ids=ids),
            lambda: model.backward(torch.zeros(())),
            lambda: smp.set_partition(module, 2),
            lambda: smp.set_activation_checkpointing(module, strategy="some"),
            lambda: smp.send(1, smp.rank(), smp.RankType.WORLD_RANK),
            lambda: smp.recv_from(5, smp.RankType.PP_RANK),
            lambda: train(model, ids[:3] if smp.pp_rank() == 0 else torch.zeros(8, 0)),
            lambda: never(model, ids),
        ]
        for call in tried:
            try:
                call()
            except (StepUsageError, SMPValidationError, MessageError) as error:
                said.append(str(error))
        return said
    finally:
        smp.state.reset()


def test_mistakes_have_names_and_fixes(world_pool: WorldPool) -> None:
    for said in world_pool.run(2, _mistakes):
        assert len(said) == 9 and all(issubclass(kind, ShardwiseError) for kind in (StepUsageError, MessageError))
        assert "'ids' is cut along axis 5 and has a tensor of shape [8, 16]" in said[0]
        assert "decorated with @smp.step" in said[1] and "stage 2 does not exist" in said[3]
        assert "does not divide the 3 rows of 'ids'" in said[-2]  # on the other stages too, which only wait for them
        assert "did not call the model" in said[-1]


def _placed() -> Any:
    smp.init(PIPELINE | {"auto_partition": False, "default_partition": 1})
    try:
        module: Any = make_model("gpt2")
        model: Any = smp.DistributedModel(module)
        smp.set_partition(module.transformer.h[0], 0)
        seen = []
        model.register_post_partition_hook(lambda model, optimizer: seen.append(model.partitioned))
        model.register_post_step_hook(lambda model, optimizer: seen.append("step"))

        @smp.step
        def evaluate(model: Any, ids: Tensor) -> Any:
            out = model(input_ids=ids, labels=ids)
            return out["loss"], float(out["loss"])

        with torch.no_grad():
            loss, numbers = evaluate(model, batches()[0])
        stages = [list(blocks) for blocks in model._smp.weights.parallel.plan.stages]
        if smp.pp_rank() == 0:
            smp.broadcast({"x": torch.ones(2)}, smp.PP_GROUP)
            got: Any = smp.recv_from(1, smp.RankType.PP_RANK)
        else:
            got = smp.recv_from(0, smp.RankType.PP_RANK)["x"].sum().item()
            smp.send("back", 0, smp.RankType.PP_RANK)
        return stages, seen, [float(each) for each in loss.outputs], numbers, got
    finally:
        smp.state.reset()


def test_partitions_hooks_evaluation_and_messages(world_pool: WorldPool) -> None:
    first, second = world_pool.run(2, _placed)
    assert first[0] == [["transformer.h.0"], ["transformer.h.1", "transformer.h.2"]]
    assert first[1] == second[1] == [True, "step"]
    assert first[2] == second[2] == first[3] == second[3]
    with torch.no_grad():
        plain = make_model("gpt2")
        expected = [float(plain(input_ids=ids, labels=ids).loss) for ids in batches()[0].chunk(2)]
    assert first[2] == pytest.approx(expected, rel=1e-6)
    assert (first[4], second[4]) == ("back", 2.0)


def _mismatched(what: str) -> str:
    smp.init({"ddp": True})
    me, other = smp.rank(), 1 - smp.rank()
    try:
        if what == "both send":
            smp.send(me, other)
        elif what == "both receive":
            smp.recv_from(other)
        elif what == "barrier" and me:
            smp.barrier()
        elif what == "gather":
            smp.barrier() if me else smp.allgather(me, smp.WORLD)
        elif what == "end" and me:
            return ""
        else:
            smp.recv_from(other)
    except MessageError as error:
        return str(error)
    finally:
        smp.state.reset()
    return "it went on"


@pytest.mark.parametrize(
    "what, said",
    [
        ("both send", "is in smp.send or smp.broadcast with this rank too"),
        ("both receive", "is in smp.recv_from with this rank too"),
        ("barrier", "waits for this rank in smp.barrier|is in smp.recv_from with this rank"),
        ("gather", "waits for this rank in smp.(barrier|allgather)"),
        ("end", "has ended"),
    ],
)
def test_messages_that_do_not_match_are_found_at_once(world_pool: WorldPool, what: str, said: str) -> None:
    first, second = world_pool.run(2, _mismatched, what)
    found = [text for text in (first, second) if text]  # of two that wait for each other one may have ended already
    assert any(re.search(said, text) for text in found)
    assert all("neither can go on" in text or "have to call it" in text for text in found)
    assert len(found) == (1 if what == "end" else 2)


def _asked_alone(config: dict[str, Any], of: str = "model.state_dict") -> str:
    """One rank asks for a state that others hold a part of, and these wait for it elsewhere."""
    smp.init({"ddp": True, **config})
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"))
        optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        train_step(model, batches()[0])
        optimizer.step()
        try:
            if smp.rank() == 0:
                getattr(optimizer if of.startswith("optimizer") else model, of.partition(".")[2])()
            smp.barrier()
        except MessageError as error:
            return str(error)
        return ""
    finally:
        smp.state.reset()


@pytest.mark.parametrize("config", [{"partitions": 2, "microbatches": 2}, {"sharded_data_parallel_degree": 2}])
def test_a_state_that_others_do_not_come_for_is_found_at_once(world_pool: WorldPool, config: dict[str, Any]) -> None:
    said, other = world_pool.run(2, _asked_alone, config)
    found = (
        "model.state_dict with rank 1, which (waits for this rank in smp.barrier|has ended)"  # it may have seen it too
    )
    assert re.search(found, said) and "all of ranks [0, 1] have to call it" in said
    assert re.search("smp.barrier with rank 0, which (waits for this rank in model.state_dict|has ended)", other)


@pytest.mark.parametrize("config", [{"shard_optimizer_state": True}, {"sharded_data_parallel_degree": 2}])
def test_an_optimizers_shards_that_others_do_not_come_for(world_pool: WorldPool, config: dict[str, Any]) -> None:
    """As a script saves that writes files where `dp_rank()` is 0, with state that is sharded over data ranks."""
    said, other = world_pool.run(2, _asked_alone, config, "optimizer.local_state_dict")
    assert "optimizer.local_state_dict with rank 1" in said and "all of ranks [0, 1] have to call it" in said
    assert "smp.barrier with rank 0" in other


class Trainer:
    """Of scripts whose step stands in a class and leaves the instance out."""

    scale = 2.0

    @smp.step
    def without(x: Any, factor: float) -> Any:  # type: ignore[misc]
        return x * factor

    @smp.step
    def with_it(self, x: Any) -> Any:
        return x * self.scale


def test_steps_in_a_class_may_leave_the_instance_out() -> None:
    smp.init({})
    try:
        x = torch.ones(2, 2)
        assert torch.equal(Trainer().without(x, 3.0).concat(), x * 3)  # type: ignore[call-arg,arg-type]
        assert torch.equal(Trainer().with_it(x).concat(), x * 2)
        with pytest.raises(TypeError):
            Trainer().without(x)  # type: ignore[call-arg,arg-type]
    finally:
        smp.state.reset()


class Net(nn.Module):
    """A module that is no language model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4] -> [B, 3]."""
        found: Tensor = self.layer(x)
        return found


def _own_module() -> float:
    smp.init({"ddp": True, "microbatches": 2})
    try:
        net = Net()
        # Before the model is wrapped, and with a parameter twice, as scripts collect a tied one.
        optimizer = torch.optim.Adadelta([*net.parameters(), net.layer.weight])
        model: Any = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(optimizer)
        scaler = smp.amp.GradScaler(enabled=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        @smp.step
        def train(model: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            model.backward(scaler.scale(loss))
            return loss

        held: list[Any] = []
        model.register_post_partition_hook(lambda model, optimizer: held.append(optimizer))
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(float(train(model, scaler, torch.ones(4, 4), torch.ones(4).long()).reduce_mean()))
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        assert held == [optimizer] and len(optimizer.param_groups[0]["params"]) == 2
        return losses[-1] - losses[0]
    finally:
        smp.state.reset()


def test_a_module_of_ones_own_learns(world_pool: WorldPool) -> None:
    assert max(world_pool.run(2, _own_module)) < 0


def test_torchs_own_data_parallelism_is_refused() -> None:
    smp.init({})
    try:
        with pytest.raises(SMPValidationError, match="leave DistributedDataParallel out"):
            smp.DistributedModel(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(SMPValidationError, match="leave DistributedDataParallel out"):
            nn.parallel.DistributedDataParallel(smp.DistributedModel(nn.Linear(2, 2)))
    finally:
        smp.state.reset()


def test_a_steps_outputs_go_with_the_step() -> None:
    """Not with Python's search for cycles: logits are what is largest in a step."""
    seen: list[weakref.ref[Tensor]] = []

    @smp.step
    def train(model: Any, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        seen.append(weakref.ref(output))
        model.backward(output.sum())
        return x

    smp.init({"microbatches": 2})
    gc.disable()
    try:
        train(smp.DistributedModel(Net()), torch.ones(4, 4))
        assert [output() for output in seen] == [None, None]
    finally:
        gc.enable()
        smp.state.reset()


def test_backward_takes_gradients_as_torchs_own_does() -> None:
    """A gradient too few was dropped with its tensor, and one of another shape was broadcast."""
    smp.init({})
    try:
        model: Any = smp.DistributedModel(Net())
        rows = model(torch.ones(4, 4))[:, :1]
        for tensors, gradients, said in (
            (rows, None, r"tensor 0 of shape \[4, 1\] is no scalar; take its mean"),
            ([rows.sum(), rows.sum()], [torch.ones(())], "2 tensors and 1 grad_tensors"),
            ([rows], [torch.ones(4)], r"grad_tensors\[0\] has the shape \[4\], and its tensor \[4, 1\]"),
        ):
            with pytest.raises(StepUsageError, match=said):
                model.backward(tensors, gradients)
        model.backward([rows, rows.sum()], [torch.ones(4, 1), None])
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        smp.state.reset()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"a": 1}, {"b": 1}, r"returns a mapping of \['a'\] for microbatch 0 and a mapping of \['b'\]"),
        ([1], [1, 2], "returns 1 values for microbatch 0 and 2 values for microbatch 1"),
        (torch.zeros(()), None, "returns a tensor for microbatch 0 and a value for microbatch 1"),
        ({"a": [1]}, {"a": None}, "returns 1 values for microbatch 0 and a value"),
    ],
)
def test_results_of_other_parts_are_named(first: Any, second: Any, said: str) -> None:
    with pytest.raises(StepUsageError, match=said):
        collect_outputs([first, second], detach=True)


@pytest.mark.parametrize("setting", [{"non_split_inputs": ["mask"]}, {"input_split_axes": {"mask": 1}}])
def test_names_of_arguments_that_a_step_does_not_take_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(SMPValidationError, match=r"'mask' is no argument of .* 'run', which takes ids, masks\. Did"):

        @smp.step(**setting)
        def run(ids: Tensor, masks: Tensor) -> None: ...


def test_a_script_has_one_model_and_its_backward() -> None:
    @smp.step
    def train(model: Any, x: Tensor, own: bool) -> Tensor:
        loss: Tensor = model(x).sum()
        if own:
            loss.backward()
        model.backward(loss)
        return loss

    for _ in range(2):  # after reset and init there is none
        smp.init({"microbatches": 2})
        try:
            net = Net()
            model: Any = smp.DistributedModel(net)
            with pytest.raises(SMPValidationError, match=r"DistributedModel\(Net\): .* use that one"):
                smp.DistributedModel(net)
            with pytest.raises(StepUsageError, match=r"'train' runs backward itself.* use model\.backward\(loss\)"):
                train(model, torch.ones(4, 4), True)
            assert all(parameter.grad is None for parameter in model.parameters())
            train(model, torch.ones(4, 4), False)
            model.backward(model(torch.ones(4, 4)).sum())
            assert all(parameter.grad is not None for parameter in model.parameters())
        finally:
            smp.state.reset()


def _checkpointed_across(automatic: bool) -> str:
    smp.init(PIPELINE | ({} if automatic else {"auto_partition": False, "default_partition": 0}))
    try:
        module: Any = make_model("gpt2")
        model: Any = smp.DistributedModel(module)
        if not automatic:
            smp.set_partition(module.transformer.h[2], 1)
        smp.set_activation_checkpointing(module.transformer)

        train_step(model, batches()[0])
        return ""
    except PartitionError as error:
        return str(error)
    finally:
        smp.state.reset()


@pytest.mark.parametrize("automatic", [True, False])
def test_what_lies_on_two_stages_is_not_checkpointed(world_pool: WorldPool, automatic: bool) -> None:
    """As SMP documents it: a line where stages are cut automatically, an error where the script has placed them."""
    for said in world_pool.run(2, _checkpointed_across, automatic):
        assert ("transformer lies on stages [0, 1]; checkpoint modules" in said) != automatic


def test_a_model_that_is_evaluated_first_drops_nothing() -> None:
    smp.init({})
    try:
        module: Any = make_model("gpt2")
        for inner in module.modules():
            if isinstance(inner, nn.Dropout):
                inner.p = 0.5
        module.eval()
        ids = batches()[0]
        expected = float(module(input_ids=ids, labels=ids).loss.detach())
        model: Any = smp.DistributedModel(module)
        with torch.no_grad():
            assert abs(float(model(input_ids=ids, labels=ids).loss) - expected) < 1e-12
    finally:
        smp.state.reset()
