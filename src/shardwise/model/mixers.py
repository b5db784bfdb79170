"""Finds the mixers of states that tensor ranks can share: Mamba's by channels, Mamba 2's by heads.

A channel of Mamba's (arXiv 2312.00752) goes through convolution and scan by itself; what the scan is steered by is made
of all channels, a sum inside of the region. A head of Mamba 2's (arXiv 2405.21060, section 8) has a part of each of the
fused projections: gate, values, and the size of its step; what writes and reads its state is one for all heads of a
group, and so is the norm of what they make.

Names of parameters say what may be one, and a trial whether its parts make the whole (`mixer_trial`). What is none is
split by the outputs of its layers, where nothing else is cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.model.mixer_trial import parts_make_the_whole
from shardwise.model.split_rules import COLUMN, ROW
from shardwise.model.tensor_split import TensorSplit

CHANNELS = TensorSplit("channels")
PARTIAL = TensorSplit("partial")
# What each kind of mixer holds: modules with parameters of their own, and parameters.
OF_CHANNELS = {"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "A_log", "D"}
STEERING = {"dt_layernorm", "b_layernorm", "c_layernorm"}  # norms of what steers the scan, the same on all ranks
OF_CHANNELS_BY_HEAD = {
    *("in_proj", "conv1d", "out_proj", "A_log", "D"),
    *("x_proj_weight", "dt_proj_weight", "dt_proj_bias"),  # one for each head
}
OF_HEADS = {"in_proj", "conv1d", "dt_bias", "out_proj", "A_log", "D"}
MOST_TRIED = 64  # parts of a trial


def mixer_splits(model: nn.Module) -> dict[str, dict[str, TensorSplit]]:
    """Return the splits of each mixer that ranks can share, and of the modules in it, by the mixer's name."""
    tried: dict[Any, bool] = {}
    mixers: dict[str, dict[str, TensorSplit]] = {}
    for name, module in model.named_modules():
        splits = _splits(module)
        if not splits:
            continue
        shapes = tuple((leaf, tuple(parameter.shape)) for leaf, parameter in module.named_parameters())
        key = type(module), shapes, tuple(splits.items())
        if key not in tried:
            degrees = _degrees(splits[""])
            tried[key] = bool(degrees) and all(parts_make_the_whole(module, splits, degree) for degree in degrees)
        if tried[key]:
            mixers[name] = {f"{name}.{part}".rstrip("."): split for part, split in splits.items()}
    return mixers


def _degrees(mixer: TensorSplit) -> list[int]:
    """Return degrees to try: one whose ranks have whole groups, one whose ranks share them, where there are any."""
    legal = [degree for degree in range(2, MOST_TRIED) if mixer.heads >= degree and mixer.shares_heads(degree)]
    whole, sharing = ([n for n in legal if bool(mixer.groups % n) is is_shared] for is_shared in (False, True))
    return whole[:1] + sharing[:1]


def _splits(mixer: Any) -> dict[str, TensorSplit]:
    """Return the splits of a mixer's modules by the names in it, its own by ""; none of what holds anything else."""
    names = {child for child, module in mixer.named_children() if next(module.parameters(), None) is not None}
    names |= {leaf for leaf, _ in mixer.named_parameters(recurse=False)}
    if not {"in_proj", "conv1d", "out_proj", "A_log"} <= names:
        return {}
    if type(mixer.in_proj) is not nn.Linear or type(mixer.out_proj) is not nn.Linear:
        return {}
    around = {"in_proj": COLUMN, "conv1d": CHANNELS, "out_proj": _row()}
    if OF_CHANNELS <= names <= OF_CHANNELS | STEERING:
        steering = dict.fromkeys(sorted(names & STEERING), PARTIAL)
        own = {"": _mixer(len(mixer.A_log)), "dt_proj": CHANNELS, "x_proj": _row(inside=True)}
        return {**own, **around, **steering, "in_proj": TensorSplit("column", sections=2)}
    if names == OF_CHANNELS_BY_HEAD:
        return {"": _mixer(len(mixer.A_log)), **around}
    if OF_HEADS <= names <= OF_HEADS | {"norm"}:
        return _splits_by_heads(mixer, "norm" in names)
    return {}


def _splits_by_heads(mixer: Any, has_norm: bool) -> dict[str, TensorSplit]:
    heads, groups, states = (getattr(mixer, name, 0) for name in ("num_heads", "n_groups", "ssm_state_size"))
    inner, of_groups = mixer.out_proj.in_features, groups * states
    fused = (inner, inner, of_groups, of_groups, heads)
    if sum(fused) != mixer.in_proj.out_features or heads != len(mixer.A_log) or not of_groups:
        return {}
    sharing = TensorSplit("", shared=states, groups=groups)
    splits = {
        "": replace(sharing, kind="mixer", heads=heads),
        "in_proj": replace(sharing, kind="column", sizes=fused, behind=1),
        "conv1d": replace(sharing, kind="channels", sizes=fused[1:4]),
        "out_proj": _row(),
    }
    return splits | ({"norm": CHANNELS} if has_norm else {})


def _mixer(heads: int) -> TensorSplit:
    """Return the split of a mixer whose heads share nothing: its groups are as many, whatever the degree."""
    return TensorSplit("mixer", heads=heads, groups=heads)


def _row(inside: bool = False) -> TensorSplit:
    return TensorSplit(ROW.kind, dim=1, inside=inside)
