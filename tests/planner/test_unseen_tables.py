"""Tables that nobody saw before: other software, accelerators and words, empty cells, and what stays unmapped."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.planner.formulas.compute import expert_rows, rates
from shardwise.planner.formulas.layer import block_time
from shardwise.planner.formulas.predict import predict
from shardwise.planner.published.evaluate import error_summary, evaluate_rows
from shardwise.planner.published.mapping import configuration, mapped
from shardwise.planner.published.measurement import measured
from shardwise.planner.published.tables import COLUMNS, read_table
from shardwise.planner.published.unstated import MICROBATCHES, fits, with_checkpointing

EIGHT_B = {
    "model": "an 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "mlp": "swiglu",
    "vocab": 128256, "seq": 4096, "gpus_per_node": 8, "zero_stage": 3, "mbs": 1, "act_ckpt": "full", "flash": 1,
    "metric": "tokens/s/GPU", "tok_s_gpu": 5000, "fit_role": "test", "stack": "somebody's own trainer",
}  # fmt: skip


def written(folder: Path, *rows: dict[str, object]) -> Path:
    """A table of rows that differ from one usual run; what none says is empty."""
    path = folder / "unseen.csv"
    with path.open("w", newline="") as file:
        named = dict.fromkeys(key for row in rows for key in row if key not in COLUMNS)
        writer = csv.DictWriter(file, [*COLUMNS, *({"strategy": 0, "compile": 0} | named)])
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow({"row": number, **EIGHT_B, "gpu": "H100", "n_gpus": 16, "dp": 16, **row})
    return path


# What a table calls it -> what it is called here, and its memory in GiB, as it is labelled.
PARTS = {
    "8x H100": ("H100 SXM", 80),
    "NVIDIA H100 80GB HBM3": ("H100 SXM", 80),
    "H100-PCIe": ("H100 PCIe", 80),
    "H800": ("H800 SXM", 80),
    "A800-80GB": ("A800 80GB", 80),
    "A100-PCIE-40GB": ("A100 40GB", 40),
    "V100-SXM2-16GB": ("V100 SXM", 16),
    "AMD Instinct MI300X": ("MI300X", 192),
    "B200": ("B200", 180),
    "L40S": ("L40S", 48),
}


@pytest.mark.parametrize("words", PARTS)
def test_accelerators_by_other_names(words: str, tmp_path: Path) -> None:
    found = configuration(read_table(written(tmp_path, {"gpu": words}))[0]).cluster.accelerator
    assert (found.name, round(found.memory_bytes / 2**30 / 0.99)) == PARTS[words]


CHECKPOINTED = {
    "Full recompute": ("full", 1.0),
    "selective (op)": ("half", 1.0),
    "core_attn": ("attention", 1.0),
    "every 2nd layer": ("full", 0.5),
    "every layer": ("full", 1.0),
    "All blocks": ("full", 1.0),
    "full granularity": ("full", 1.0),
    "selective granularity": ("attention", 1.0),
    "8 of 32": ("full", 0.25),
    "25%": ("full", 0.25),
    "disabled": ("none", 0.0),
}


@pytest.mark.parametrize("words", CHECKPOINTED)
def test_checkpointing_in_other_words(words: str, tmp_path: Path) -> None:
    found = configuration(read_table(written(tmp_path, {"act_ckpt": words}))[0])
    assert (found.checkpointing, found.checkpointed) == CHECKPOINTED[words]


@pytest.mark.parametrize(
    ("words", "convention"),
    [("PaLM (2022)", "palm"), ("Megatron, 2022", "megatron-2022"), ("8P", "8P"), ("model FLOPs", "palm")],
)
def test_conventions_of_flops_in_other_words(words: str, convention: str, tmp_path: Path) -> None:
    changes: dict[str, object] = {"step_s": "", "tok_s_gpu": "", "tflops_gpu": 400, "flops_convention": words}
    measurement = measured(read_table(written(tmp_path, changes))[0])
    assert measurement is not None and (measurement.unit, measurement.convention) == ("tflops_gpu", convention)


def test_a_stack_of_odd_tables_is_mapped_but_for_what_is_not_modelled(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"gpu": "H200", "precision": "FP8-hybrid", "compile": "yes"},
        {"gpu": "MI300X", "n_gpus": 12, "dp": 12},
        {"model": "Llama-2-70B", "layers": "", "hidden": "", "n_gpus": 64, "dp": 64},
        {"zero_stage": "", "strategy": "HSDP", "dp": ""},
        {"mbs": "", "act_ckpt": "n/a", "remarks of the author": "fast"},
        {"mbs": "", "tok_s_gpu": "", "step_s": 2.0},
        {"ep": 8},
        {"gpu": "TPU v5p"},
    ]
    found = evaluate_rows(read_table(written(tmp_path, *rows)))
    assert all(result.predicted and result.predicted > 0 for result in found[:5])
    reasons = [result.unmapped or "" for result in found[5:]]
    assert "neither mbs nor a gbs" in reasons[0] and "experts" in reasons[1] and "TPU v5p" in reasons[2]
    assert error_summary(found)["mapped_percent"] == 62.5


def test_a_strategys_name_says_what_is_sharded(tmp_path: Path) -> None:
    names = {"FSDP2": 3, "MiCS": 3, "ZeRO-2": 2, "ZeRO 1": 1, "distributed optimizer": 1, "DDP": 0}
    rows = read_table(written(tmp_path, *({"zero_stage": "", "strategy": name} for name in names)))
    assert [configuration(row).zero for row in rows] == list(names.values())


def test_a_microbatch_nobody_states_is_the_quickest_that_fits(tmp_path: Path) -> None:
    stated, without, of_batch = (
        configuration(row) for row in read_table(written(tmp_path, {}, {"mbs": ""}, {"mbs": "", "gbs": 16 * 12}))
    )
    ways = [replace(stated, microbatch=size) for size in MICROBATCHES]
    fitting = [way for way in ways if fits(way)]
    assert 1 < len(fitting) < len(ways)
    assert without.microbatch == max(fitting, key=lambda way: predict(way).tokens_per_second).microbatch
    assert of_batch.microbatch * of_batch.accumulation == 12 and fits(of_batch)


def test_checkpointing_nobody_states_is_what_it_takes_to_fit(tmp_path: Path) -> None:
    small, large = (
        configuration(row) for row in read_table(written(tmp_path, *({"act_ckpt": "", "mbs": size} for size in (1, 8))))
    )
    assert small.checkpointing == "none" and large.checkpointing != "none"
    assert fits(large) and with_checkpointing(large) == large


def test_open_cells_are_said_and_suggestions_are_taken(tmp_path: Path) -> None:
    rows = [
        {"act_ckpt": "none?", "mbs": "1?", "compile": "0"},
        {"mbs": "", "gbs": 64, "n_gpus": 32, "dp": 4, "pp": 8, "compile": "?"},
    ]
    suggested, pipelined = (mapped(row) for row in read_table(written(tmp_path, *rows)))
    assert (suggested.configuration.checkpointing, suggested.configuration.microbatch) == ("none", 1)
    assert set(suggested.taken) == {"act_ckpt none as suggested", "mbs 1 as suggested"}
    assert (pipelined.configuration.microbatch, pipelined.configuration.accumulation) == (1, 16)
    assert pipelined.taken == ("mbs 1 and grad_accum 16",)


def test_weights_under_adapters_are_frozen_and_those_of_sft_are_not(tmp_path: Path) -> None:
    """Two thirds of the products and no state of the frozen weights."""
    rows = ({"strategy": words, "gpu": "H200"} for words in ("LoRA", "SFT"))
    adapted, tuned = (configuration(row) for row in read_table(written(tmp_path, *rows)))
    assert 0 < adapted.trained < 0.02 and tuned.trained == 1
    assert predict(adapted).seconds["matmul"] == pytest.approx(2 / 3 * predict(tuned).seconds["matmul"], rel=0.02)
    assert predict(adapted).memory["optimizer"] < 0.02 * predict(tuned).memory["optimizer"]


LOW_BITS = {"fp8": "fp8", "fp8-fine": "fp8-block", "MXFP8": "mxfp8", "nvfp4": "nvfp4", "float8 rowwise": "fp8-row"}


@pytest.mark.parametrize("words", LOW_BITS)
def test_numbers_of_few_bits_are_quicker_than_16(words: str, tmp_path: Path) -> None:
    low, wide = (
        configuration(row)
        for row in read_table(written(tmp_path, *({"gpu": "B200", "precision": words} for words in (words, "bf16"))))
    )
    assert low.precision == LOW_BITS[words]
    assert predict(low).step_seconds < predict(wide).step_seconds
    assert predict(low).peak_tflops == predict(wide).peak_tflops == 2250


EXPERTS = {
    "experts": 64, "topk": 8, "moe_ffn": 2048, "shared_ffn": 2048, "dense_layers": 2, "gpu": "GB300", "ep": 16,
    "attention": "MLA q1536 kv512 nope128 rope64 v128", "zero_stage": 1, "heads": 128, "kv_heads": 128,
}  # fmt: skip


def test_experts_latent_attention_and_graphs_are_read(tmp_path: Path) -> None:
    plain, graphs = read_table(written(tmp_path, EXPERTS, EXPERTS | {"cuda_graph": "local:full_iteration"}))
    model = configuration(plain).model
    assert (model.experts, model.experts_of_token, model.head_size) == (64, 8, 160)
    assert model.expert_layers == pytest.approx(30 / 32) and model.stacked == 3 * 4096 * 2048 * 64 * 30 // 32
    assert model.attention_products(4)[1] == (1536, 32 * 192)
    assert configuration(plain).expert == 16 and configuration(plain).imbalance == 1
    assert predict(configuration(graphs)).seconds["launch"] < predict(configuration(plain)).seconds["launch"]


def test_windows_cost_what_they_look_at(tmp_path: Path) -> None:
    whole, half = (
        configuration(row) for row in read_table(written(tmp_path, {}, {"attention": "window 128 on alternate layers"}))
    )
    assert half.model.attended(4096) == (4096 + 128 * (2 - 128 / 4096)) / 2
    assert predict(half).seconds["attention"] < 0.6 * predict(whole).seconds["attention"]


def test_what_says_nothing_of_compilation_has_fused_kernels(tmp_path: Path) -> None:
    rows = ({"compile": words, "tp": 8, "dp": 2, "sp": 1} for words in ("", "0", "1"))
    fused, eager, compiled = (configuration(row) for row in read_table(written(tmp_path, *rows)))
    assert (fused.fused, eager.fused, compiled.fused) == (True, False, False)
    seconds = [predict(each).seconds for each in (fused, eager, compiled)]
    assert 0 < seconds[0]["tensor"] < 0.6 * seconds[1]["tensor"], "hidden as far as products last"
    assert seconds[1]["tensor"] == seconds[2]["tensor"]
    assert seconds[0]["memory_bound"] == seconds[2]["memory_bound"] < seconds[1]["memory_bound"]
    assert seconds[0]["attention"] < seconds[1]["attention"] == seconds[2]["attention"]


def test_zero3_of_its_first_years_gathers_by_each_ranks_own_network(tmp_path: Path) -> None:
    rows = ({"gpu": "A100-80", "strategy": words, "flash": flash} for words, flash in (("ZeRO-3", 0), ("ZeRO-3", 1)))
    first, later = (configuration(row) for row in read_table(written(tmp_path, *rows)))
    assert (first.collectives, later.collectives) == ("flat", "nccl")
    assert predict(first).seconds["shard"] > 3 * predict(later).seconds["shard"]


def test_a_pipeline_gathers_its_parameters_once_a_step(tmp_path: Path) -> None:
    row = read_table(written(tmp_path, {"pp": 2, "dp": 8, "gbs": 64, "strategy": "FSDP2"}))[0]
    whole = configuration(row)
    assert whole.whole_in_step and whole.accumulation == 8
    freed = replace(whole, whole_in_step=False)
    assert predict(whole).seconds["shard"] < predict(freed).seconds["shard"]
    assert predict(whole).memory["gathered"] > predict(freed).memory["gathered"]


def test_messages_hide_where_a_rank_has_several_stages(tmp_path: Path) -> None:
    one, four = (
        configuration(row)
        for row in read_table(written(tmp_path, *({"pp": 4, "dp": 4, "gbs": 64, "vpp": stages} for stages in (1, 4))))
    )
    assert predict(four).seconds["pipeline"] < predict(one).seconds["pipeline"]


def test_a_capacity_means_shapes_that_never_change(tmp_path: Path) -> None:
    """So nobody waits for numbers of rows, and graphs make all launches, unless a row says that they make none."""
    words = ({"notes": "dropless, or token dropless"}, {"notes": "token drop (capacity), not dropless"})
    none = {"cuda_graph": "none:"}
    rows = read_table(written(tmp_path, *(EXPERTS | none | word for word in words), EXPERTS | words[1]))
    waits, drops, graphs = (configuration(row) for row in rows)
    assert [each.drops_rows for each in (waits, drops, graphs)] == [False, True, True]
    assert (drops.captured, graphs.captured) == (0.0, 1.0)
    launches = [predict(each).seconds["launch"] for each in (waits, drops, graphs)]
    assert launches[0] > launches[1] > launches[2]


def test_an_exchange_that_nobody_names(tmp_path: Path) -> None:
    """Kernels of its own where links go on beyond a node and nothing is dropped; else each copy of a row goes alone.
    Over a network it runs beside another microbatch, where stages interleave."""
    wide, piped = {"gpus_per_node": 72, "tp": 1}, {"pp": 2, "dp": 16, "n_gpus": 32, "gbs": 64}
    changes = ({}, wide, wide | {"notes": "token drop"}, {"dispatcher": "deepep"}, piped | {"vpp": 2}, piped)
    rows = read_table(written(tmp_path, *(EXPERTS | change for change in changes)))
    found = [configuration(row) for row in rows]
    assert [each.copies_on_nodes for each in found] == [False, True, False, True, False, False]
    assert [each.sorts_rows for each in found] == [each.copies_on_nodes for each in found]
    assert [each.hides_exchange for each in found] == [False, False, False, False, True, False]
    assert 0 < predict(found[4]).seconds["expert"] < predict(replace(found[4], hides_exchange=False)).seconds["expert"]
    assert predict(found[1]).seconds["memory_bound"] < predict(found[0]).seconds["memory_bound"]


def test_groups_of_experts_are_read(tmp_path: Path) -> None:
    limited, free = read_table(written(tmp_path, EXPERTS | {"router": "sigmoid, 8 groups top 4"}, EXPERTS))
    shapes = [configuration(row).model for row in (limited, free)]
    assert [(shape.expert_groups, shape.groups_of_token) for shape in shapes] == [(8, 4), (1, 1)]


def test_biases_of_experts_are_read_and_those_of_routers_are_not(tmp_path: Path) -> None:
    changes = ({"router": "softmax after top-k, biases"}, {"router": "sigmoid, score bias"}, {})
    biased, routed, plain = (
        configuration(row) for row in read_table(written(tmp_path, *(EXPERTS | c for c in changes)))
    )
    assert (biased.model.expert_biases, routed.model.expert_biases) == (True, False)
    none = predict(plain).seconds
    assert predict(routed).seconds == none
    added = predict(biased).seconds["memory_bound"] - none["memory_bound"]
    moved = biased.accumulation * biased.model.layers * biased.model.expert_layers * expert_rows(biased)
    speed = rates(biased.cluster.accelerator, biased.stack, biased.precision)
    # Forward 28 bytes a number of the last bias in fp32, and 40 backward; 18 passes of 2 bytes over clamped halves.
    assert added * speed.bandwidth == pytest.approx(moved * (68 * 4096 + 36 * 2048))


def test_a_host_waits_for_numbers_of_rows_in_forward_alone(tmp_path: Path) -> None:
    """With plain all-to-alls, where exchanges with kernels of their own let it run ahead."""
    small = EXPERTS | {"moe_ffn": 256, "shared_ffn": 256, "act_ckpt": "none"}
    plain, own = (configuration(row) for row in read_table(written(tmp_path, small, small | {"dispatcher": "deepep"})))
    assert (plain.sorts_rows, own.sorts_rows) == (False, True)
    waits, ahead = (predict(replace(plain, sorts_rows=sorts)).seconds["launch"] for sorts in (False, True))
    forward = block_time(plain).forward
    assert 0 < waits - ahead < plain.model.layers * min(forward.host, forward.device)


def test_a_selective_checkpoint_launches_no_expert_again(tmp_path: Path) -> None:
    policies = ("none", "selective", "selective-op", "full")
    given = [
        configuration(row) for row in read_table(written(tmp_path, *(EXPERTS | {"act_ckpt": p} for p in policies)))
    ]
    none, attention, half, full = (block_time(each).again.host for each in given)
    dense = block_time(replace(given[1], model=replace(given[1].model, stacked=0))).again.host
    assert none == 0 < attention == dense and 20 * attention < half == full
