"""Tables of published measurements: reading and checking them.

The schema is that of tests/data/perf-tables/SCHEMA.md. What no row may say (a text for a number, a negative degree, a
throughput above the accelerator's peak) is a TableError that names row and column. An empty cell states nothing; one
that ends in `?` is what the source suggests, and is taken as that (`mapping.py`).
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from shardwise.errors import TableError
from shardwise.planner.published.row import Row
from shardwise.planner.published.row_cluster import accelerator_of
from shardwise.planner.published.row_settings import precision
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
# Of mixtures of experts, at the end of newer tables.
OPTIONAL_NUMBERS = {
    "experts": 1e5, "topk": 1e4, "moe_ffn": 1e7, "shared_ffn": 1e7, "dense_layers": 1e4, "active_b": 1e5,
}  # fmt: skip
_FRACTIONS = (
    *("params_b", "gpu_mem_gb", "intra_GBps_per_gpu", "inter_Gbps_per_node", "mbs", "active_b"),
    *("tflops_gpu", "mfu_pct", "hfu_pct", "tok_s_gpu", "step_s", "mem_gb"),
)
_ZERO_ALLOWED = ("zero_stage", "shared_ffn", "dense_layers")
_FREE_TEXT = ("source", "url", "provenance", "table", "assumed", "notes")


def read_table(path: Path) -> list[Row]:
    """Return the rows of a CSV file. Raises TableError."""
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
    suggested = tuple(column for column, value in text.items() if value.endswith("?") and column not in _FREE_TEXT)
    text |= {column: text[column].rstrip("? ") for column in suggested}
    numbers = {}
    for column, most in {**NUMBERS, **OPTIONAL_NUMBERS}.items():
        if text.get(column):
            numbers[column] = _number(f"{where}, column {column}", text[column], column in _ZERO_ALLOWED, most)
            if column not in _FRACTIONS and numbers[column] % 1:
                raise TableError(f"{where}, column {column}: {text[column]} has to be a whole number")
    row = Row(text, numbers, tuple(column for column in suggested if text[column]))
    _check(where, row)
    return row


def _number(where: str, text: str, zero_allowed: bool, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise TableError(f"{where}: {text!r} is not a number") from None
    if value < 0 or (value == 0 and not zero_allowed) or not math.isfinite(value) or value > most:
        raise TableError(f"{where}: {value:g} is impossible; it has to be in 0 to {most:g}")
    return value


def _check(where: str, row: Row) -> None:
    """Raise TableError for numbers that contradict each other, which is how mixed up units show."""
    has = row.numbers
    if {"hidden", "heads"} <= has.keys() and has["hidden"] % has["heads"] and not row.text.get("attention"):
        raise TableError(f"{where}, column heads: {has['heads']:g} does not divide hidden={has['hidden']:g}")
    if {"params_b", "layers", "hidden"} <= has.keys():
        least = has["layers"] * 4 * has["hidden"] ** 2 / 1e9
        if not least / 3 < has["params_b"] < 1e3 * max(least, 0.01):
            raise TableError(f"{where}, column params_b: {has['params_b']:g} billion is not a model of this size")
    if "tflops_gpu" in has:
        part = accelerator_of(row)
        if part and has["tflops_gpu"] > 1.2 * part.product_peak(precision(row)):
            raise TableError(f"{where}, column tflops_gpu: {has['tflops_gpu']:g} is above the peak of {part.name}")
