"""Tables of published measurements: reading them, checking them, and making a TrainingConfiguration of each row.

The schema is that of tests/data/perf-tables/SCHEMA.md. What no row may say (a text for a number, a negative degree, a
throughput above the accelerator's peak) is a TableError that names row and column; what a row merely does not say, and
no rule fills in, leaves it unmapped with a reason. Nothing here or in the cost models looks at a table's or source's
name; of a row's own words only those that name a setting or a network are read.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import TableError
from shardwise.planner.constants.hardware import ACCELERATORS, GIB, USABLE, Accelerator, find_accelerator
from shardwise.planner.constants.inventory import fabrics, link_of, presets, usual_network
from shardwise.planner.formulas.prediction import Cluster, ModelShape, Prediction, Stack, TrainingConfiguration
from shardwise.planner.published.unstated import with_checkpointing, with_microbatch
from shardwise.words import nearest_file

# Column -> the largest value that its unit allows.
NUMBERS = {
    "params_b": 1e5, "layers": 1e4, "hidden": 1e6, "heads": 1e4, "kv_heads": 1e4, "ffn": 1e7, "vocab": 1e7,
    "seq": 1e8, "gpu_mem_gb": 2e3, "n_gpus": 1e6, "gpus_per_node": 1024, "intra_GBps_per_gpu": 1e4,
    "inter_Gbps_per_node": 1e5, "dp": 1e6, "sdp": 1e6, "tp": 1e6, "pp": 1e6, "cp": 1e6, "vpp": 1e4, "ep": 1e6,
    "zero_stage": 3, "mbs": 1e6, "grad_accum": 1e6, "gbs": 1e8, "tflops_gpu": 1e5, "mfu_pct": 100, "hfu_pct": 110,
    "tok_s_gpu": 1e8, "step_s": 1e6, "mem_gb": 2e3,
}  # fmt: skip
COLUMNS = (
    *("row", "model", "mlp", "tied", "gpu", "stack", "sp", "precision", "act_ckpt", "flash", "metric", "fit_role"),
    *NUMBERS,
)
_ZERO_ALLOWED = ("zero_stage",)
# Words of act_ckpt in the order in which they are looked for -> kind and share of the blocks.
_CHECKPOINTING = (
    (r"^(none|no|off|false|0|disabled)?$", ("none", 0.0)),
    (r"selective.*\bop|op-level|\bsac\b|^op$", ("half", 1.0)),
    (r"selective-layer|every|layer", ("full", 0.5)),
    (r"^sel|attention|attn|granular", ("attention", 1.0)),
    (r"full|block|uniform|true|yes|on\b|^1$", ("full", 1.0)),
    (r"partial", ("full", 0.5)),
)
_UNSTATED = re.compile(r"-*|\?|n/?a|unknown|un(stated|specified)|not-(stated|specified|known|given)|default|auto")
_TRUE = ("1", "yes", "true", "on")
_EFA = re.compile(r"\bEFA\b|\bp[345]d?[en]?n?\b|SMDDP|amazon", re.IGNORECASE)
LAYER_METRIC = "layer"


class Unmapped(Exception):
    """A row from which no configuration can be made, and why."""


@dataclass(frozen=True)
class Row:
    """A row: its text by column, and its numbers where there are any."""

    text: Mapping[str, str]
    numbers: Mapping[str, float]

    @property
    def id(self) -> str:
        return self.text["row"]

    def number(self, column: str, otherwise: float | None = None) -> float:
        """The number of `column`. Raises Unmapped where there is neither it nor `otherwise`."""
        value = self.numbers.get(column, otherwise)
        if value is None:
            raise Unmapped(f"{column} is not stated")
        return value

    def whole(self, column: str, otherwise: float | None = None) -> int:
        return int(self.number(column, otherwise))


def read_table(path: Path) -> list[Row]:
    """The rows of a CSV file. Raises TableError."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise TableError(f"{path}: columns are missing: {', '.join(missing)}")
            rows = [_row(path, index, record) for index, record in enumerate(reader)]
    except FileNotFoundError:
        raise TableError(f"table {str(path)!r} does not exist.{nearest_file(path, '.csv')}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: {error}") from error
    if not rows:
        raise TableError(f"{path}: no rows")
    return rows


def _row(path: Path, index: int, record: dict[str, str]) -> Row:
    text = {column: (value or "").strip() for column, value in record.items() if isinstance(column, str)}
    where = f"{path.name}, row {text['row'] or index}"
    numbers = {}
    for column, most in NUMBERS.items():
        if not text[column]:
            continue
        try:
            value = float(text[column])
        except ValueError:
            raise TableError(f"{where}, column {column}: {text[column]!r} is not a number") from None
        low = value < 0 or (value == 0 and column not in _ZERO_ALLOWED)
        if low or not math.isfinite(value) or value > most:
            raise TableError(f"{where}, column {column}: {value:g} is impossible; it has to be in 0 to {most:g}")
        numbers[column] = value
    row = Row(text, numbers)
    _check(where, row)
    return row


def _check(where: str, row: Row) -> None:
    """Numbers that contradict each other, which is how mixed up units show."""
    has = row.numbers
    if {"hidden", "heads"} <= has.keys() and has["hidden"] % has["heads"]:
        raise TableError(f"{where}, column heads: {has['heads']:g} does not divide hidden={has['hidden']:g}")
    if {"params_b", "layers", "hidden"} <= has.keys():
        least = has["layers"] * 4 * has["hidden"] ** 2 / 1e9
        if not least / 3 < has["params_b"] < 1e3 * max(least, 0.01):
            raise TableError(f"{where}, column params_b: {has['params_b']:g} billion is not a model of this size")
    if "tflops_gpu" in has:
        peak = _accelerator(row, strict=False)
        if peak and has["tflops_gpu"] > 1.2 * (peak.peak(_precision(row)) or peak.fp32):
            raise TableError(f"{where}, column tflops_gpu: {has['tflops_gpu']:g} is above the peak of {peak.name}")


def configuration(row: Row) -> TrainingConfiguration:
    """Return what the row ran, without fitted constants (`Constants.applied` has them). Raises Unmapped."""
    tensor, pipeline, context = (row.whole(column, 1) for column in ("tp", "pp", "cp"))
    cluster = _cluster(row, tensor * pipeline * context)
    data = row.whole("dp", max(1, cluster.size // (tensor * pipeline * context)))
    if data == cluster.size // (tensor * pipeline) > cluster.size // (tensor * pipeline * context):
        data //= context  # ranks that share sequences are among them
    if data * tensor * pipeline * context != cluster.size:
        raise Unmapped(f"column n_gpus: dp x tp x pp x cp is not {cluster.size}")
    if row.numbers.get("ep", 1) > 1:
        raise Unmapped(f"column ep: {row.numbers['ep']:g} expert ranks; experts are not modelled")
    zero = row.whole("zero_stage", _sharding(row))
    shard = min(data, row.whole("sdp", data if zero else 1))
    batch = _batch(row, data, pipeline)
    checkpointing, share = _checkpointing(row)
    training = TrainingConfiguration(
        model=_model(row),
        cluster=cluster,
        stack=Stack(row.text["stack"]),
        sequence=row.whole("seq"),
        microbatch=batch.microbatch or 1,
        accumulation=batch.accumulation or 1,
        replica=max(1, data // shard),
        shard=shard,
        context=context,
        tensor=tensor,
        pipeline=pipeline,
        virtual=row.whole("vpp", 1),
        sequence_parallel=_is(row, "sp") and tensor > 1,
        zero=zero,
        placement="PDT",
        precision=_precision(row),
        reduction=_dtype(row.text.get("grad_reduce_dtype", ""), _precision(row)),
        checkpointing=checkpointing,
        checkpointed=share,
        offload_activations="act" in row.text.get("offload", ""),
        flash=row.text["flash"].lower() not in ("0", "no", "false", "off", "none"),
        compile=_is(row, "compile"),
        dropout=row.text["mlp"] == "gelu" and row.text["flash"] == "0",
        collectives="smddp" if "smddp" in row.text.get("collectives", "").lower() else "nccl",
        scattered_messages=True,
        async_tensor="asynctp" in row.text.get("strategy", "").lower().replace("-", ""),
    )
    if _UNSTATED.fullmatch(_word(row)):
        training = with_checkpointing(training)
    return training if batch.microbatch else with_microbatch(training, batch.sequences, batch.accumulation)


def _sharding(row: Row) -> int:
    """The ZeRO stage that a strategy's name means."""
    words = re.sub(r"[-_ ]", "", row.text.get("strategy", "").lower())
    stages = ((r"zero3|fsdp|hsdp|mics|shardeddp", 3), ("zero2", 2), (r"zero1|distributedoptimizer|optstate", 1))
    return next((stage for pattern, stage in stages if re.search(pattern, words)), 0)


def _is(row: Row, column: str) -> bool:
    return row.text.get(column, "").lower() in _TRUE


def _model(row: Row) -> ModelShape:
    known = {_plain(name): shape for name, shape in presets().items()}.get(_plain(row.text["model"]))
    if "layers" not in row.numbers and known:
        return known
    hidden = row.whole("hidden")
    wide = row.numbers.get("ffn", 0) >= 4 * hidden
    gated = "glu" in row.text["mlp"].lower() or not (row.text["mlp"] or wide)
    heads = row.whole("heads", max(1, hidden // 128))
    return ModelShape(
        name=row.text["model"],
        layers=row.whole("layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=row.whole("kv_heads", heads),
        intermediate=row.whole("ffn", 8 * hidden / 3 if gated else 4 * hidden),
        vocabulary=0 if row.text["metric"].startswith(LAYER_METRIC) else row.whole("vocab", 50304),
        gated=gated,
        tied=_is(row, "tied"),
    )


def _plain(name: str) -> str:
    """Llama-2 70B, llama2-70b and meta-llama/Llama-2-70b-hf are one name; Llama 3.1 has the shapes of Llama 3."""
    short = re.sub(r"-(hf|base|chat|instruct)$", "", name.lower().rpartition("/")[2])
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(llama-? ?3)\.1", r"\1", short))


class _Batch(NamedTuple):
    """Sequences of a microbatch and microbatches of a step, of one data rank, and their product; None: not stated."""

    microbatch: int | None
    accumulation: int | None
    sequences: int | None = None


def _batch(row: Row, data: int, pipeline: int) -> _Batch:
    """Return the batch; what is missing follows from the global batch.

    Where nothing is said of it, there are twice as many microbatches as stages, which fill any schedule.
    """
    total = row.numbers.get("gbs", math.nan) / data
    stated = row.whole("grad_accum") if "grad_accum" in row.numbers else None
    if "mbs" in row.numbers:
        microbatch = row.whole("mbs")
        if microbatch < 1:
            raise Unmapped(f"column mbs: {row.numbers['mbs']:g} is no whole sequence")
        derived = total / microbatch
        return _Batch(microbatch, stated or int(derived if derived >= 1 else 2 * pipeline if pipeline > 1 else 1))
    if total >= (stated or 1):
        return _Batch(int(total / stated), stated) if stated else _Batch(None, None, int(total))
    if not math.isnan(total) or "step_s" in row.numbers:
        raise Unmapped("neither mbs nor a gbs to derive it from is stated")
    return _Batch(None, stated)


def _word(row: Row) -> str:
    """Return what stands in act_ckpt, without its share."""
    return re.sub(r"[_ ()]+", "-", row.text["act_ckpt"].lower().partition(":")[0].strip()).strip("-")


def _checkpointing(row: Row) -> tuple[str, float]:
    """(kind, share of the blocks); a number behind a colon, or alone, is that share."""
    word, share = _word(row), row.text["act_ckpt"].partition(":")[2].strip()
    if _UNSTATED.fullmatch(word):
        return "none", 0.0
    if parts := re.fullmatch(r"(0?\.\d+|\d+(?=%))%?|(\d+)-?(?:/|of)-?(\d+)", word):
        alone = float(parts[1] or 0) / (100 if "%" in word else 1) if parts[1] else int(parts[2]) / int(parts[3])
        return "full", min(1.0, alone)
    for pattern, (policy, usual) in _CHECKPOINTING:
        if re.search(pattern, word):
            return policy, float(share) if re.fullmatch(r"0?\.\d+|1", share) else usual
    raise Unmapped(f"act_ckpt={word!r} is not known; none, full, selective, selective-op and selective-layer are")


def _precision(row: Row) -> str:
    return _dtype(row.text["precision"], "bf16")


def _dtype(text: str, otherwise: str) -> str:
    """The dtype that a word such as `float32`, `BF16` or `fp8-mixed` names."""
    for pattern, name in (
        (r"fp8|float8|f8", "fp8"),
        ("bf|bfloat", "bf16"),
        ("16", "fp16"),
        ("32", "fp32"),
        ("64", "fp64"),
    ):
        if re.search(pattern, text.lower()):
            return name
    return otherwise


def _cluster(row: Row, model_ranks: int) -> Cluster:
    device = _accelerator(row)
    assert device is not None
    per_node = row.whole("gpus_per_node", 8)
    ranks = row.whole("n_gpus", row.whole("dp", 1) * model_ranks)
    nodes = -(-ranks // per_node)
    while ranks % nodes:  # as many ranks on each node
        nodes += 1
    words = " ".join(row.text.get(column, "") for column in ("collectives", "assumed", "notes", "table", "url"))
    fabric = fabrics()["efa" if _EFA.search(words) else "rdma"]
    inter = row.number("inter_Gbps_per_node", usual_network(device)) / 8
    intra = row.number("intra_GBps_per_gpu", device.link)
    return Cluster(
        name=row.text["gpu"],
        accelerator=device,
        nodes=nodes,
        per_node=ranks // nodes,
        intra=intra,
        inter=inter,
        link=link_of(intra),
        fabric=fabric,
    )


def _accelerator(row: Row, strict: bool = True) -> Accelerator | None:
    """`A100-40`, `8x H100`, `H100-96-500W`: the part of nearest memory; a stated power limit slows it."""
    text = re.sub(r"(?i)^\d+ ?[x*] ?", "", row.text["gpu"]).replace("_", " ")
    sheet = find_accelerator(text)
    if sheet is None:
        if strict:
            raise Unmapped(f"gpu={row.text['gpu']!r} is not a known accelerator")
        return None
    words = [word.upper() for word in re.split(r"[- ]+", text)]
    alike = [part for part in ACCELERATORS if part.name.split()[0] == sheet.name.split()[0] and sheet.name[:3] != "RTX"]
    parts = alike or [sheet]
    sizes = {f"{part.memory_bytes / GIB / USABLE:.0f}": part.memory_bytes / GIB for part in parts}
    stated = next(
        (sizes[size] for word in words if (size := word.removesuffix("GB")) in sizes), parts[0].memory_bytes / GIB
    )
    memory = row.numbers.get("gpu_mem_gb", stated)
    special = {part: set(part.name.upper().split()) & {"PCIE", "NVL"} for part in parts}
    said = {"PCIE", "NVL"}.intersection(words)
    wanted = [part for part in parts if said and special[part] == said] or [part for part in parts if not special[part]]
    part = min(wanted or parts, key=lambda variant: abs(variant.memory_bytes / GIB - memory))
    watts = next((float(word[:-1]) for word in words if re.fullmatch(r"\d+W", word)), part.watts)
    size = int(row.numbers["gpu_mem_gb"] * GIB * USABLE) if "gpu_mem_gb" in row.numbers else part.memory_bytes
    return replace(part, memory_bytes=size, watts=watts, matmul=part.matmul * (watts / part.watts) ** POWER)


POWER = 0.4  # exponent of the rate of matrix products against the power limit


@dataclass(frozen=True)
class Measured:
    """The measurement of a row, in its own unit: step_s, tok_s_gpu, tflops_gpu in a FLOP convention, or mfu_pct."""

    unit: str
    value: float
    convention: str = ""


def measured(row: Row) -> Measured | None:
    """The row's measurement of time, None where it has none. Raises Unmapped for TFLOPs of an unknown convention."""
    for unit in ("step_s", "tok_s_gpu"):
        if unit in row.numbers:
            return Measured(unit, row.numbers[unit])
    if "tflops_gpu" in row.numbers:
        return Measured("tflops_gpu", row.numbers["tflops_gpu"], _convention(row.text.get("flops_convention", "")))
    if "mfu_pct" in row.numbers:
        return Measured("mfu_pct", row.numbers["mfu_pct"])
    return None


def _convention(text: str) -> str:
    words = text.lower()
    for pattern, name in (
        (r"8p|\(a\)", "8P"),
        (r"2021|96|\(b\)", "megatron-2021"),
        (r"2022|72|\(d\)", "megatron-2022"),
        (r"palm|6p|model|\(c\)|^$", "palm"),
    ):
        if re.search(pattern, words):
            return name
    raise Unmapped(f"flops_convention={text!r} is not known")


def predicted(row: Row, prediction: Prediction) -> float:
    """The prediction in the unit of the row's measurement; step seconds where it has none."""
    measurement = measured(row)
    if measurement is None or measurement.unit == "step_s":
        if row.text["metric"].startswith(LAYER_METRIC):
            return prediction.step_seconds - prediction.seconds["optimizer"]
        return prediction.step_seconds
    if measurement.unit == "tok_s_gpu":
        return prediction.tokens_per_second
    if measurement.unit == "mfu_pct":
        return 100 * prediction.mfu
    return prediction.tflops[measurement.convention]
