"""Models with attention of their own, or that are not followed, which keep documents of a sequence apart by its mask.

`shardwise.model.isolation` says what for, and has the test.
"""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(
    (
        "axk2", "deepseek_v32", "doge", "dots3_note", "dots3_note_text", "git", "glm_moe_dsa", "got_ocr2",
        "gpt_neox_japanese", "hrm_text", "hy_v4", "ibert", "jetmoe", "longcat_flash", "luke", "megatron-bert", "mpnet",
        "mpt", "mvp", "phi4_multimodal", "phimoe", "rembert", "roformer", "squeezebert", "tapas", "trocr", "xmod",
    ),
    keeps_documents_apart=True,
)  # fmt: skip
