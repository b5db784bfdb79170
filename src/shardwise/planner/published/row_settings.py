"""The words of a row that name settings: activation checkpointing, numbers, sharding and what is trained."""

from __future__ import annotations

import re

from shardwise.planner.published.row import Row, Unmapped

# Words of act_ckpt in the order in which they are looked for -> kind and share of the blocks.
_CHECKPOINTING = (
    (r"^(none|no|off|false|0|disabled)$", ("none", 0.0)),
    (r"selective.*\bop|op-level|\bsac\b|^op$", ("half", 1.0)),
    (r"^full|^(every|all|each).?(transformer.?)?(layer|block)s?$", ("full", 1.0)),
    (r"selective-layer|every|layer", ("full", 0.5)),
    (r"^sel|attention|attn|granular", ("attention", 1.0)),
    (r"full|block|uniform|true|yes|on\b|^1$", ("full", 1.0)),
    (r"partial", ("full", 0.5)),
)
_DTYPES = (
    (r"(nv|mx)?fp4|float4", "nvfp4"),
    (r"mx.?fp8|mx.?float8", "mxfp8"),
    (r"(fp8|float8|f8).*(fine|block|sub.?channel|1x128)", "fp8-block"),
    (r"(fp8|float8|f8).*row", "fp8-row"),
    (r"fp8|float8|f8", "fp8"),
    ("bf|bfloat", "bf16"),
    ("16", "fp16"),
    ("32", "fp32"),
    ("64", "fp64"),
)
# Share of a block's launches by the module that a graph captures; norms go with attention and MLP.
_LAUNCHES = {"attn": 0.45, "mlp": 0.3, "moe_router": 0.15, "moe_preprocess": 0.1}
_ADAPTED = re.compile(r"lora|dora|peft|adapter")


def checkpointing(row: Row) -> tuple[str, float]:
    """Return (kind, share of the blocks); a number behind a colon, or alone, is that share. Raises Unmapped."""
    word, share = row.word("act_ckpt"), row.text["act_ckpt"].partition(":")[2].strip()
    if parts := re.fullmatch(r"(0?\.\d+|\d+(?=%))%?|(\d+)-?(?:/|of)-?(\d+)", word):
        alone = float(parts[1] or 0) / (100 if "%" in word else 1) if parts[1] else int(parts[2]) / int(parts[3])
        return "full", min(1.0, alone)
    for pattern, (policy, usual) in _CHECKPOINTING:
        if re.search(pattern, word):
            return policy, float(share) if re.fullmatch(r"0?\.\d+|1", share) else usual
    raise Unmapped(f"act_ckpt={word!r} is not known; none, full, selective, selective-op and selective-layer are")


def precision(row: Row) -> str:
    """Return the numbers of matrix products. How float8 is scaled may stand in a row's notes."""
    dtype = dtype_of(row.text["precision"], "bf16")
    return dtype_of(f"{dtype} {row.text.get('notes', '')}", dtype) if dtype == "fp8" else dtype


def dtype_of(text: str, otherwise: str) -> str:
    """Return the dtype that a word such as `float32`, `BF16` or `fp8-mixed` names."""
    return next((name for pattern, name in _DTYPES if re.search(pattern, text.lower())), otherwise)


def reduction(row: Row) -> str:
    """Return the numbers in which gradients are reduced: those stated, or 16 bits where products have fewer."""
    low = "fp16" if precision(row) == "fp16" else "bf16"
    return dtype_of(row.text.get("grad_reduce_dtype", ""), precision(row) if "fp32" in precision(row) else low)


def sharding(row: Row) -> int:
    """Return the ZeRO stage that a strategy's name means."""
    words = re.sub(r"[-_ ]", "", row.text.get("strategy", "").lower())
    stages = (
        (r"zero3|fsdp|hsdp|mics|shardeddp", 3),
        ("zero2", 2),
        (r"zero1|distributedoptimizer|distopt|optstate", 1),
    )
    return next((stage for pattern, stage in stages if re.search(pattern, words)), 0)


def collectives(row: Row) -> str:
    """Return how parameters are gathered; ZeRO-3 of the years before flash attention did so parameter by parameter."""
    if "smddp" in row.text.get("collectives", "").lower():
        return "smddp"
    strategy = re.sub(r"[-_ ]", "", row.text.get("strategy", "").lower())
    first_generation = "zero3" in strategy and "mics" not in strategy and "fsdp" not in strategy
    return "flat" if first_generation and not fused_attention(row) else "nccl"


def fused_attention(row: Row) -> bool:
    """Return whether attention is a fused kernel, which a cell that says nothing is taken to mean."""
    return row.text["flash"].lower() not in ("0", "no", "false", "off", "none")


def has_adapters(row: Row) -> bool:
    """Return whether a strategy says that weights are frozen under adapters; SFT alone trains all of them."""
    return _ADAPTED.search(row.text.get("strategy", "").lower()) is not None


def captured_launches(row: Row) -> float:
    """Return the share of launches that CUDA graphs make: all of an iteration's, or those of the modules named.

    Who gives experts a capacity does it for shapes that never change, as graphs of an iteration need them; so where
    nothing is said such a run has one.
    """
    scope = row.text.get("cuda_graph", "").lower()
    if "full_iteration" in scope or (not row.says("cuda_graph") and drops_rows(row)):
        return 1.0
    return min(1.0, sum(share for module, share in _LAUNCHES.items() if module in scope))


def copies_on_nodes(row: Row) -> bool:
    """Return whether the exchange named sends a row once to each node: DeepEP's and HybridEP's, which Megatron's flex
    stands for."""
    return re.search(r"deepep|hybridep|flex|uccl", row.word("dispatcher")) is not None


def drops_rows(row: Row) -> bool:
    """Return whether a row's words say that experts have a capacity, beyond which they drop what comes."""
    words = " ".join(row.text.get(column, "").lower() for column in ("router", "table", "notes"))
    return re.search(r"(?<!no )(?<!without )(token.?drop(?!less)|drop.?and.?pad|capacity factor)", words) is not None
