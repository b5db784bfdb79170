"""The model of a row: its shapes, where a preset does not have them, with experts and kinds of attention."""

from __future__ import annotations

import re
from typing import Any

from shardwise.model.facts import LatentAttention, Reach
from shardwise.planner.constants.inventory import presets
from shardwise.planner.formulas.prediction import ModelShape
from shardwise.planner.published.row import LAYER_METRIC, Row

_LATENT = re.compile(r"mla q(?P<query>\d+) kv(?P<key_value>\d+) nope(?P<plain>\d+) rope(?P<rotary>\d+) v(?P<value>\d+)")


def model_of(row: Row) -> ModelShape:
    """Return the shapes of the model that `row` trained. Raises Unmapped where they are not stated."""
    known = {model_key(name): shape for name, shape in presets().items()}.get(model_key(row.text["model"]))
    if "layers" not in row.numbers and known:
        return known
    hidden = row.whole("hidden")
    wide = row.numbers.get("ffn", 0) >= 4 * hidden
    gated = "glu" in row.text["mlp"].lower() or not (row.text["mlp"] or wide)
    heads = row.whole("heads", max(1, hidden // 128))
    width = row.whole("ffn", 8 * hidden / 3 if gated else 4 * hidden)
    settings: dict[str, Any] = {"intermediate": width} | _attention(row)
    return ModelShape(
        name=row.text["model"],
        layers=row.whole("layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=row.whole("kv_heads", heads),
        vocabulary=0 if row.text["metric"].startswith(LAYER_METRIC) else row.whole("vocab", 50304),
        gated=gated,
        tied=row.is_true("tied"),
        **settings | (_experts(row, width, gated) if row.has_experts else {}),
    )


def model_key(name: str) -> str:
    """Llama-2 70B, llama2-70b and meta-llama/Llama-2-70b-hf are one name; Llama 3.1 has the shapes of Llama 3."""
    short = re.sub(r"-(hf|base|chat|instruct)$", "", name.lower().rpartition("/")[2])
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(llama-? ?3)\.1", r"\1", short))


def _experts(row: Row, width: int, gated: bool) -> dict[str, Any]:
    """Return what a shape says of experts. `width`: of the MLP of blocks without; the others may share some."""
    layers, experts, chosen = row.whole("layers"), row.whole("experts"), row.whole("topk")
    inner = row.whole("moe_ffn", width)
    sparse = layers - row.whole("dense_layers", 0)
    through = chosen * inner + row.whole("shared_ffn", 0)
    one = (3 if gated else 2) * row.whole("hidden") * inner
    return {
        "intermediate": ((layers - sparse) * width + sparse * through) // layers,
        "idle": one * (experts - chosen) * sparse // layers,
        "experts": experts,
        "experts_of_token": chosen,
        "expert_width": inner,
        "stacked": one * experts * sparse // layers,
        "expert_biases": re.search(r"\bbiases\b", row.text.get("router", "").lower()) is not None,
        **_groups(row),
    }


def _groups(row: Row) -> dict[str, int]:
    """Return the groups that a token's experts are limited to, and of how many, where the router's words say so."""
    limited = re.search(r"(\d+) groups,? top (\d+)", row.text.get("router", "").lower())
    return {"expert_groups": int(limited[1]), "groups_of_token": int(limited[2])} if limited else {}


def _attention(row: Row) -> dict[str, Any]:
    """Return what the words of a row say of heads, latent attention and windows."""
    words = row.text.get("attention", "").lower()
    if parts := _LATENT.search(words):
        latent = LatentAttention(**{name: int(size) for name, size in parts.groupdict().items()})
        return {"latent": latent, "head_size": latent.head_size}
    said: dict[str, Any] = {}
    if size := re.search(r"head (\d+)", words):
        said["head_size"] = int(size[1])
    if window := re.search(r"window (\d+)", words):
        share = 0.5 if "alternat" in words else 1.0
        said["reaches"] = (Reach(1 - share), Reach(share, int(window[1])))
    return said
