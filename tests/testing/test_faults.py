"""Planted faults without training: each is taken back again, and what it does is shown on small tensors.

That `verify` names them in jobs that train is shown by tests/parity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data import loader, prepare
from shardwise.data.batch import Batch
from shardwise.job.axes import Axis
from shardwise.kernels import dropout, linear, loss
from shardwise.kernels.attention import interface
from shardwise.kernels.dropout import DropoutScope
from shardwise.parallel import context, regions, routers
from shardwise.parallel import model as parallel_model
from shardwise.parallel.experts import SharedExperts
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.routers import ExpertRouters
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.parallel.transforms import sharding, tensor
from shardwise.testing.faults.patching import RANK
from shardwise.testing.faults.registry import FAULTS
from shardwise.training import init, session, setup, step
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.session import Session

Original = Callable[..., Any]


@contextmanager
def planted(fault: str, owner: Any, name: str, original: Original) -> Iterator[Callable[..., Any]]:
    """Plant a fault over `original` in the place of the engine's function, and hand out what is called then."""
    with mock.patch.object(owner, name, original):
        with FAULTS[fault]():
            assert getattr(owner, name) is not original
            yield getattr(owner, name)
        assert getattr(owner, name) is original


def on_rank(rank: int) -> Any:
    """Let this process be a rank."""
    return mock.patch.object(dist, "get_rank", lambda *_: rank)


def entry(name: str = "weight", shape: tuple[int, ...] = (2,), **changes: Any) -> ParameterEntry:
    """Return a parameter of ones with a gradient of twos."""
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.full(shape, 2.0)
    given: dict[str, Any] = {"aliases": (), "shape": shape, "regions": (), "replication": 2, "replica": 0}
    return ParameterEntry(name, parameter=parameter, **(given | changes))


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_is_taken_back(fault: str) -> None:
    """Whatever it replaces is other inside, and is itself again behind it."""
    places: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    real = mock.patch.object

    def noted(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        places.setdefault((id(owner), name), (owner, name, vars(owner)[name]))
        return real(owner, name, *args, **kwargs)

    with mock.patch.object(mock.patch, "object", noted), FAULTS[fault]():
        assert places
        assert all(vars(owner)[name] is not before for owner, name, before in places.values())
    assert all(vars(owner)[name] is before for owner, name, before in places.values())


# ----------------------------------------------------------------------------------------------------- faults of axes


def test_sums_over_tensor_ranks_are_left_out_or_done_twice() -> None:
    with planted("no_sum_at_region_entry", regions, "copy_to_region", Mock(side_effect=AssertionError)) as copy:
        values = torch.ones(2)
        assert torch.equal(copy(values, None), values)
    module = SimpleNamespace(bias=torch.ones(2), forward=lambda values: values)
    boundary = SimpleNamespace(group=SimpleNamespace(size=lambda: 4))
    with planted("bias_of_every_rank", tensor, "_sum_output", lambda *_: None) as sum_output:
        sum_output(module, None, boundary)
    assert module.forward(torch.zeros(2)).tolist() == [3.0, 3.0]  # beside the one that is added rightly


@pytest.mark.parametrize(
    ("fault", "kept"), [("unsummed_key_value_heads", ["norm"]), ("unsummed_norms", ["heads"])]
)  # fmt: skip
def test_partial_gradients_of_some_tensors_are_not_summed(fault: str, kept: list[str]) -> None:
    own = SimpleNamespace(
        partial=((["heads"], "group"), (["norm"], "group")),
        tensor_map={"heads": SimpleNamespace(split="columns"), "norm": SimpleNamespace(split=None)},
    )
    summed: list[str] = []
    original = lambda self: summed.extend(name for names, _ in self.partial for name in names)  # noqa: E731
    with planted(fault, ParallelModel, "sum_shared_gradients", original) as run:
        run(own)
    assert summed == kept
    assert len(own.partial) == 2


def test_label_smoothing_is_that_of_the_rank_s_own_columns() -> None:
    columns = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)]
    with planted("local_label_smoothing", loss, "_normaliser", lambda *_: [10.0, 11.0, 12.0, 13.0]) as normaliser:
        assert normaliser(None, columns, None) == [10.0, 11.0, *columns[1:]]


def test_routes_are_not_summed_over_ranks() -> None:
    index, weights = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    with planted("unreduced_routes", regions.RegionBoundary, "routes_input", Mock(side_effect=AssertionError)) as run:
        assert run(None, index, weights) == (index, weights)


def test_masks_of_dropout_are_those_of_the_first_columns() -> None:
    with planted("first_columns_of_mask", dropout, "dropout", lambda *args: args) as run:
        assert run("values", 0.1, "name", (4, 8)) == ("values", 0.1, "name", (0, 8))
        assert run("values", 0.1, "name")[-1] is None


def test_a_tie_is_broken_when_the_model_is_made() -> None:
    def tied(job: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    with planted("broken_tie", setup, "build_model", tied) as build:
        model = build(None)
    assert model[0].weight is not model[1].weight and model[0].weight.shape == model[1].weight.shape


@pytest.mark.parametrize(("rank", "expected"), [(RANK, 1.0), (0, 5.0)])
def test_a_tied_gradient_stays_one_rank_s_own(rank: int, expected: float) -> None:
    gradient = torch.ones(2)
    own = SimpleNamespace(tied=["head"], tensor_map=SimpleNamespace(gradients=lambda names: [gradient]))
    with (
        planted("gradient_copies_apart", ParallelModel, "sum_shared_gradients", lambda _: gradient.fill_(5.0)) as run,
        on_rank(rank),
    ):
        run(own)
    assert gradient.tolist() == [expected, expected]


def test_labels_come_in_the_other_order_of_microbatches() -> None:
    batches = [Batch({}, torch.full((1, 1), label), torch.tensor([label])) for label in range(3)]

    def run(self: Any, objective: Any, microbatches: Any) -> list[int]:
        return [int(LanguageModelling.loss(None, batch, None)) for batch in microbatches]  # type: ignore[arg-type]

    with (
        mock.patch.object(LanguageModelling, "loss", lambda self, batch, output: batch.labels),
        planted("other_microbatch_order", ParallelModel, "run", run) as planted_run,
    ):
        assert planted_run(None, None, batches) == [2, 1, 0]


def test_a_gradient_s_seed_is_divided_by_the_microbatches() -> None:
    with planted("mean_over_microbatches", ParallelModel, "run", lambda *args: args[-1]) as run:
        assert run(None, None, [1, 2], 0, torch.tensor(1.0)) == 0.5
        assert run(None, None, [1, 2], 0) is None


def test_a_weight_s_gradient_is_written_over() -> None:
    weight = nn.Parameter(torch.zeros(2))
    with planted("overwritten_weight_gradient", linear, "_add", linear._add) as add:
        add(weight, torch.ones(2))
        add(weight, torch.ones(2))
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]


def test_parts_of_contexts_have_wrong_labels_and_positions() -> None:
    ids = torch.arange(4, 8).unsqueeze(0)
    part = Batch({"input_ids": ids, "position_ids": ids}, ids, torch.tensor([0]))
    with planted("shifted_label_in_part", context.ContextParallel, "split", lambda *_: (part, "shard")) as split:
        shifted, shard = split(None, None)
    assert shifted.labels.tolist() == [[7, 4, 5, 6]] and shard == "shard"
    with planted("positions_of_part", context.ContextParallel, "split", lambda *_: (part, "shard")) as split:
        assert split(None, None)[0].inputs["position_ids"].tolist() == [[0, 1, 2, 3]]


def test_halves_of_a_part_see_documents_across() -> None:
    documents = torch.tensor([[0, 1, 2, 3]])
    apart = lambda documents, b, q, k: torch.zeros_like(q, dtype=torch.bool)  # noqa: E731
    with planted("isolated_inside_part", context, "same_document", apart) as same:
        q, k = torch.tensor([0, 0, 2]), torch.tensor([1, 3, 1])
        assert same(documents, torch.zeros(3, dtype=torch.long), q, k).tolist() == [False, True, True]


# -------------------------------------------------------------------------------------------------- faults of batches


def test_samples_come_late_or_again() -> None:
    with planted("shifted_samples", loader.Stream, "batches_from", lambda self, consumed: consumed) as batches:
        assert batches(None, 8) == 9
    with planted("repeated_sample", loader, "order", lambda seed, counter, size: counter) as order:
        assert [order(0, counter, 9) for counter in range(4)] == [0, 0, 1, 1]
    with planted("equal_rows", setup, "make_stream", lambda *_: SimpleNamespace(data_rank=3)) as make:
        assert make(None).data_rank == 0
    with planted("missing_document_ends", prepare, "_ended", lambda documents, end: end) as ended:
        assert ended([], 7) is None


def test_padding_counts() -> None:
    split = SimpleNamespace(batch=lambda samples, copies, seed: SimpleNamespace(labels=torch.tensor(samples)))
    stream = SimpleNamespace(microbatch=2, data_ranks=1, data_rank=0, seed=0, split=split)
    made = Batch({}, torch.tensor([4, -100]), torch.tensor([0, 0]), counted=torch.tensor([True, False]))
    with planted("counted_padding", loader.Stream, "_microbatch", lambda *_: made) as microbatch:
        batch = microbatch(stream, 0, 1, lambda place: (4 + place, 0))
    assert batch.counted.tolist() == [True, True] and batch.labels.tolist() == [4, 4]


def test_labels_are_late_and_documents_leak() -> None:
    batch = Batch({}, torch.tensor([[1, 2, 3]]), torch.tensor([0]))
    with planted("shifted_label", LanguageModelling, "loss", lambda self, batch, output: batch.labels) as loss_of:
        assert loss_of(None, batch, None).tolist() == [[3, 1, 2]]
    with planted("leaked_document", interface, "same_document", lambda ids, *_: ids) as same:
        assert same(torch.tensor([[0, 1]]), None).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("fault", "field", "value"),
    [("stale_dropout", "step", 0), ("dropout_by_stage", "seed", 13), ("dropout_by_local_row", "rows", [0, 1])],
)
def test_a_scope_of_dropout_is_another(fault: str, field: str, value: Any) -> None:
    own = SimpleNamespace(layout=SimpleNamespace(index=lambda axis: 3 if axis is Axis.PIPELINE else 0))

    @contextmanager
    def made(self: Any) -> Iterator[Any]:
        yield parallel_model.DropoutScope(seed=10, step=5, rows=torch.tensor([8, 9]))

    with planted(fault, ParallelModel, "scope", made) as scope_of, scope_of(own) as scope:
        changed = getattr(scope, field)
    assert (changed.tolist() if isinstance(changed, Tensor) else changed) == value
    with made(own) as scope:
        assert scope.step == 5 and scope.seed == 10


def test_masks_of_dropout_are_one_or_missing_or_of_another_seed() -> None:
    scope = SimpleNamespace(calls={"block": 2})
    with planted("one_dropout_mask", DropoutScope, "key", lambda self, name: (name, self.calls[name])) as key:
        assert key(scope, "block") == key(scope, "other") == ("one", 0)
    with planted("missing_attention_dropout", dropout, "dropout", lambda values, *_: values * 0) as drop:
        scores, hidden = torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2)
        assert drop(scores, 0.5).sum() == 4 and drop(hidden, 0.5).sum() == 0
    snapshot = lambda self: DropoutScope(seed=1, step=0, rows=torch.tensor([0]))  # noqa: E731
    with planted("other_recomputed_mask", DropoutScope, "snapshot", snapshot) as taken:
        assert taken(None).seed != 1


@pytest.mark.parametrize(("rate", "expected"), [(0.1, 0.5), (0.5, 0.9)])
def test_a_fused_kernel_has_another_rate(rate: float, expected: float) -> None:
    call = dataclasses.make_dataclass("Call", ["dropout"])(rate)
    with planted("fused_dropout_rate", interface, "run_attention", lambda call: call.dropout) as run:
        assert run(call) == pytest.approx(expected)


def test_weights_begin_otherwise() -> None:
    with planted("unequal_start", init, "seeded", lambda seed, name, device: seed) as seeded, on_rank(RANK):
        assert seeded(7, "lm_head", None) == 7 + RANK and seeded(7, "block.weight", None) == 7
    order: list[int] = []

    def draw() -> None:
        order.extend(vars(init).get("reversed", reversed)([1, 2]))

    with planted("child_initializer", init, "_draw", draw) as drawn:
        drawn()
    draw()
    assert order == [1, 2, 2, 1]  # parents first inside, children first again behind


def test_an_evaluation_lacks_a_rank_or_has_the_wrong_mode() -> None:
    with planted("wrong_evaluation", ParallelModel, "run", lambda *_: torch.ones(2)) as run, on_rank(RANK):
        assert run(None, None, [], 0).sum() == 0
        assert run(None, None, [], 0, torch.tensor(1.0)).sum() == 2  # a training step is left alone
    for fault, mode in (("trained_evaluation", True), ("left_in_evaluation", False)):
        with planted(fault, ParallelModel, "train", lambda self, mode: mode) as train:
            assert train(None, not mode) is mode and train(None) is mode


# ------------------------------------------------------------------------------------------------ faults of gradients


@pytest.mark.parametrize(
    ("fault", "rank", "factors"),
    [
        ("lost_rank", RANK, [0, 0, 0]),
        ("lost_rank", 0, [1, 1, 1]),
        ("doubled_rank", RANK, [2, 2, 2]),
        ("lost_microbatch", 0, [1, 0, 1]),
        ("doubled_microbatch", 0, [1, 2, 1]),
    ],
)
def test_gradients_of_microbatches_are_lost_or_doubled(fault: str, rank: int, factors: list[int]) -> None:
    own = SimpleNamespace(model=SimpleNamespace(plan=SimpleNamespace(accumulation=3)))
    with (
        planted(fault, LanguageModelling, "loss", lambda self, batch, output: (output * 3, 4)) as loss_of,
        on_rank(rank),
    ):
        for factor in factors:
            output = torch.ones((), requires_grad=True)
            total, count = loss_of(own, None, output)
            total.backward()
            assert output.grad == 3 * factor
            assert (total.item(), count) == (3.0, 4)  # the reported loss stays


def test_losses_are_divided_by_counts_of_the_rank() -> None:
    batches = [Batch({}, torch.zeros(1, count, dtype=torch.long), torch.tensor([0])) for count in (1, 3)]
    own = SimpleNamespace(is_reporting_rank=True, layout=SimpleNamespace(data_ranks=1))
    objective = SimpleNamespace(model=SimpleNamespace(plan=SimpleNamespace(accumulation=2)))

    def run(self: Any, objective: Any, microbatches: Any) -> list[float]:
        return [float(LanguageModelling.loss(objective, batch, torch.ones(()))[0]) for batch in microbatches]

    with (
        mock.patch.object(LanguageModelling, "loss", lambda self, batch, output: (output, 1)),
        mock.patch.object(dist, "all_reduce", lambda total: total.mul_(2)),  # another rank has as many labels
    ):
        with planted("mean_of_rank_means", ParallelModel, "run", run) as planted_run:
            assert planted_run(own, objective, batches) == [2.0, 2.0]
        with planted("mean_of_microbatch_means", ParallelModel, "run", run) as planted_run:
            assert planted_run(own, objective, batches) == pytest.approx([8 / 2, 8 / 6])


@pytest.mark.parametrize(("fault", "factors"), [("mean_for_sum", [4.0, 4.0]), ("divided_blocks", [1.0, 2.0])])
def test_reductions_are_means(fault: str, factors: list[float]) -> None:
    modules = [SimpleNamespace(factor=1.0) for _ in range(2)]
    for module in modules:
        module.set_gradient_divide_factor = lambda factor, module=module: setattr(module, "factor", factor)
    plan = SimpleNamespace(data_ranks=4, degrees={Axis.SHARD: 2})
    with planted(fault, sharding, "shard_model", lambda *_: modules) as shard:
        assert shard(None, None, plan) is modules
    assert [module.factor for module in modules] == factors


@pytest.mark.parametrize(("fault", "summed"), [("missing_replica_reduction", 1), ("missing_unit_reduction", 3)])
def test_sums_over_replicas_are_left_out(fault: str, summed: int) -> None:
    done: list[Any] = []

    def run(self: Any) -> None:
        for group in ("replicas", "replicas", "replicas", "others"):
            dist.all_reduce(torch.ones(()), group=group)

    replicas = "replicas"
    own = SimpleNamespace(layout=SimpleNamespace(group=lambda axis: {Axis.REPLICA: replicas}[axis]))
    with (
        mock.patch.object(dist, "all_reduce", lambda tensor, group: done.append(group)),
        planted(fault, ParallelModel, "run", run) as planted_run,
    ):
        planted_run(own)
    assert done == ["replicas"] * (summed - 1) + ["others"]


def test_replicas_are_summed_early_and_weights_stay_gathered() -> None:
    plan = SimpleNamespace(accumulation=2)
    last: list[bool] = []
    with planted(
        "early_replica_reduction", parallel_model, "begin_microbatch", lambda m, p, is_last: last.append(is_last)
    ) as begin:
        for number in range(4):
            begin([], plan, number % 2 == 1)
    assert last == [True, False, True, False]
    module = Mock()
    with planted("stale_weights", parallel_model, "begin_microbatch", lambda *_: None) as begin:
        begin([module], plan, True)
    module.set_reshard_after_backward.assert_called_once_with(False, recurse=False)


def test_gradients_are_changed_behind_backward() -> None:
    entries = [entry("layers.q_proj.weight", (2, 2)), entry("norm.weight"), entry("head.weight")]
    own = SimpleNamespace(tensor_map=entries)
    with planted("zero_query_key_gradients", ParallelModel, "run", lambda *_: "totals") as run:
        assert run(own) == "totals"
    assert [float(item.local_gradient.sum()) for item in entries] == [0.0, 4.0, 4.0]  # type: ignore[union-attr]
    with planted("zero_norm_gradients", ParallelModel, "run", lambda *_: None) as run:
        run(own)
    assert [float(item.local_gradient.sum()) for item in entries] == [0.0, 0.0, 0.0]  # type: ignore[union-attr]
    turned = [entry("first"), entry("last")]
    with planted("unknown_gradient", ParallelModel, "run", lambda *_: None) as run, on_rank(RANK):
        run(SimpleNamespace(tensor_map=turned))
    sums = [float(item.local_gradient.sum()) for item in turned]  # type: ignore[union-attr]
    assert sums[0] == pytest.approx(2 * float(torch.tensor(2.0).sin())) and sums[1] == 4.0


# ------------------------------------------------------------------------------------------------ faults of precision


def test_state_is_rounded_after_the_update() -> None:
    local, moment, step_counter = torch.tensor([1.001]), torch.tensor([1.001]), torch.tensor(1.001)
    inner = SimpleNamespace(state={"weight": {"exp_avg": moment, "step": step_counter}})
    own = SimpleNamespace(locals=[(SimpleNamespace(local=local), "parameter")], inner=inner)
    with planted("coarse_master_weights", ShardedOptimizer, "step", lambda self: None) as update:
        update(own)
    assert float(local) == 1.0 and float(moment) != 1.0
    with planted("coarse_moments", ShardedOptimizer, "step", lambda self: None) as update:
        update(own)
    assert float(moment) == 1.0 and float(step_counter) != 1.0


def test_losses_have_another_dtype_or_lack_a_term() -> None:
    with planted("coarse_loss", loss, "loss_dtype", lambda dtype: dtype) as dtype_of:
        assert dtype_of(torch.float32) is torch.bfloat16
    policy = lambda plan: sharding.MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # noqa: E731
    with planted("coarse_reduction", sharding, "_mixed_precision", policy) as made:
        assert made(None).reduce_dtype is torch.bfloat16
    with planted("wide_compute", sharding, "_mixed_precision", policy) as made:
        assert (made(None).param_dtype, made(None).reduce_dtype) == (torch.float32, torch.float32)
    terms = loss.LossTerms(z_loss=0.1, smoothing=0.2)
    own = SimpleNamespace()
    with planted(
        "missing_z_loss", LanguageModelling, "__init__", lambda self, _: setattr(self, "terms", terms)
    ) as begin:
        begin(own, None)
    assert own.terms == terms._replace(z_loss=0.0)


# -------------------------------------------------------------------------------------------------- faults of experts


def expert(name: str) -> ParameterEntry:
    split: Any = SimpleNamespace(axis=Axis.EXPERT)
    return entry(name, split=split)


@pytest.mark.parametrize(
    ("fault", "factor"), [("expert_gradients_by_degree", 4.0), ("expert_gradients_averaged", 0.25)]
)
def test_gradients_of_experts_are_multiplied(fault: str, factor: float) -> None:
    shared, other = expert("experts.weight"), entry("norm.weight")
    own = SimpleNamespace(tensor_map=[shared, other], plan=SimpleNamespace(degrees={Axis.EXPERT: 4}))
    with planted(fault, ParallelModel, "run", lambda self: "totals") as run:
        assert run(own) == "totals"
    assert shared.local_gradient is not None and shared.local_gradient.tolist() == [2 * factor] * 2
    assert other.local_gradient is not None and other.local_gradient.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("fault", "count"), [("experts_left_out_of_norm", 1), ("experts_twice_in_norm", 3)])
def test_a_norm_counts_experts_wrongly(fault: str, count: int) -> None:
    gradients = [(expert("experts.weight"), torch.ones(1)), (entry("norm.weight"), torch.ones(1))]
    with planted(fault, step, "squared_share", lambda gradients, device: len(gradients)) as share:
        assert share(iter(gradients), None) == count


@pytest.mark.parametrize(
    ("fault", "scale"),
    [("missing_balancing_loss", 0.0), ("balancing_loss_by_microbatch", 6.0), ("balancing_loss_averaged", 0.5)],
)
def test_the_balancing_loss_is_scaled(fault: str, scale: float) -> None:
    own = SimpleNamespace(plan=SimpleNamespace(accumulation=3, data_ranks=4))
    scales: list[float] = []
    with planted(fault, ParallelModel, "scale_router_losses", lambda self, scale: scales.append(scale)) as run:
        run(own, 2.0)
    assert scales == [scale]


def test_routers_count_wrongly() -> None:
    with planted("own_routes", routers, "dist", dist):
        assert routers.dist.all_reduce(torch.ones(())) is None  # without any group
    own = SimpleNamespace(counts_once=False)
    with planted(
        "routes_of_every_tensor_rank", ExpertRouters, "settle", lambda self: settled.append(self.counts_once)
    ) as settle:
        settled: list[bool] = []
        settle(own)
    assert settled == [True] and own.counts_once is False
    moves: list[int] = []
    with planted("fixed_router_bias", ParallelModel, "update_router_biases", lambda self: moves.append(1)) as update:
        update(None)
    assert not moves
    with planted(
        "router_bias_moved_twice", ParallelModel, "update_router_biases", lambda self: moves.append(1)
    ) as update:
        update(None)
    assert len(moves) == 2


@pytest.mark.parametrize(("rank", "lost"), [(RANK, 1), (0, 0)])
def test_a_row_of_experts_is_what_was_in_memory(rank: int, lost: int) -> None:
    with (
        planted("unwritten_rows", SharedExperts, "_compute_sorted", lambda self, rows, counts: rows) as compute,
        on_rank(rank),
    ):
        assert int(compute(None, torch.ones(3, 2), None).isnan().all(1).sum()) == lost
        assert compute(None, torch.ones(0, 2), None).shape == (0, 2)


# -------------------------------------------------------------------------------------------------- faults of updates


def test_norms_count_wrongly() -> None:
    tied, split = entry("head", aliases=("wte",)), entry("columns", split=Any)
    gradients = [(tied, torch.ones(1)), (split, torch.ones(1))]
    names = lambda gradients, device: [(item.name, item.replication) for item, _ in gradients]  # noqa: E731
    with planted("tie_twice_in_norm", step, "squared_share", names) as share:
        assert share(gradients, None) == [("head", 2), ("columns", 2), ("head", 2)]
    with planted("whole_tensors_by_rank_in_norm", step, "squared_share", names) as share:
        assert share(gradients, None) == [("head", 1), ("columns", 2)]
    with planted("rank_left_out_of_norm", step, "squared_share", lambda *_: torch.tensor(2.0)) as share:
        with on_rank(RANK):
            assert share(gradients, None) == 0.0
        with on_rank(0):
            assert share(gradients, None) == 2.0
    with planted("rounded_norm", step, "squared_share", lambda *_: torch.tensor(1.001, dtype=torch.float64)) as share:
        assert share(gradients, None) == 1.0


@pytest.mark.parametrize(
    ("fault", "calls"),
    [
        ("clip_skipped", [(6.0, 2.0, None)]),
        ("clip_twice", [(6.0, 2.0, 1.0), (6.0, 1.0, 1.0)]),
        ("clip_scaled", [(12.0, 2.0, 1.0)]),
        ("local_clip", [(2.5, 2.0, 1.0)]),
    ],
)
def test_clipping_goes_by_something_else(fault: str, calls: list[tuple[Any, ...]]) -> None:
    optimizer = SimpleNamespace(gradients=lambda: [(None, torch.tensor([3.0])), (None, torch.tensor([4.0]))])
    noted: list[tuple[Any, ...]] = []
    original = lambda optimizer, norm, scale, clip: noted.append((float(norm), scale, clip))  # noqa: E731
    with planted(fault, step, "_rescale", original) as rescale:
        rescale(optimizer, torch.tensor(6.0), 2.0, 1.0)
    assert noted == calls


def made_optimizer(fault: str) -> Any:
    """Return an optimizer of a matrix and a bias, in whose making a fault is planted."""
    matrix, bias = torch.ones(2, 2), torch.ones(2)

    def begin(self: Any, tensor_map: Any, settings: Any) -> None:
        self.locals = [(entry("embedding", (2, 2)), matrix), (entry("bias"), bias)]
        groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
        self.inner = torch.optim.AdamW(groups, eps=1e-8)

    own = SimpleNamespace()
    with planted(fault, ShardedOptimizer, "__init__", begin) as make:
        make(own, None, SimpleNamespace(weight_decay=0.1))
    return own


def test_an_optimizer_is_made_with_other_options() -> None:
    groups = made_optimizer("decay_on_bias").inner.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1]
    assert {group["eps"] for group in made_optimizer("wrong_eps").inner.param_groups} == {1e-6}
    late = made_optimizer("late_correction").inner.state.values()
    assert [float(state["step"]) for state in late] == [1.0, 1.0] and not any(state["exp_avg"].any() for state in late)
    groups = made_optimizer("no_decay").inner.param_groups
    decays = {len(parameter.shape): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decays == {2: 0.0, 1: 0.0}


def test_updates_are_left_out_or_changed() -> None:
    updates: list[int] = []
    for fault, rank, count in (("no_update", 0, 0), ("stale_shard", RANK, 0), ("stale_shard", 0, 1)):
        updates.clear()
        with planted(fault, ShardedOptimizer, "step", lambda self: updates.append(1)) as update, on_rank(rank):
            update(None)
        assert len(updates) == count, (fault, rank)
    moment, norm = torch.ones(1), entry("norm.weight").parameter
    inner = SimpleNamespace(state={norm: {"exp_avg": moment}})
    own = SimpleNamespace(inner=inner, locals=[(entry("norm.weight"), norm)])
    with planted("wrong_update", ShardedOptimizer, "step", lambda self: None) as update:
        update(own)
    assert float(moment) == pytest.approx(1.01)
    wide = norm.data = norm.data.double()
    with planted("replicas_apart", ShardedOptimizer, "step", lambda self: None) as update, on_rank(RANK):
        update(own)
    assert 0 < float(wide[0]) - 1 < 1e-8


def test_rates_are_those_of_something_else() -> None:
    with planted("wrong_learning_rate", ShardedOptimizer, "set_learning_rate", lambda self, rate: rate) as set_rate:
        assert set_rate(None, 0.1) == 0.2
    asked = lambda settings, step, steps, warmup: (step, steps)  # noqa: E731
    with planted("wrong_schedule", session, "learning_rate", asked) as rate:
        assert rate(None, 2, 10, 4) == (2, 5) and rate(None, 7, 10, 4) == (7, 8)
    with planted("late_warmup", session, "learning_rate", asked) as rate:
        assert rate(None, 2, 10, 4) == (1, 10) and rate(None, 5, 10, 4) == (5, 10)

    class Progress(SimpleNamespace):
        def model_copy(self, update: dict[str, int]) -> Progress:
            return Progress(**update)

    own = SimpleNamespace(progress=Progress(step=3))
    with planted("late_rate", Session, "scheduled_rate", lambda self: self.progress.step) as rate:
        assert rate(own) == 2
    assert own.progress.step == 3
