"""The embedded default model: a GPT-NeoX of about 10 million parameters for whatever vocabulary the job has.

`shardwise train` without a model trains this one. It is meant to get visibly better within minutes on two CPU cores,
so it has few and wide layers: the same parameters in fewer, larger matrix products.
"""

from __future__ import annotations

from transformers import GPTNeoXConfig

from shardwise.job.schema import Job

TARGET_PARAMETERS = 10_000_000
LAYERS = 4
HEAD_SIZE = 64
MIN_POSITIONS = 1024  # rotary: positions cost no parameters, and the exported model may be read further than trained


def default_config(job: Job) -> GPTNeoXConfig:
    """Return the config of nearly the target size for `data.vocabulary_size`, without dropout or tied embeddings."""
    vocabulary = job.data.vocabulary_size
    width = min(
        range(HEAD_SIZE, 1025, HEAD_SIZE), key=lambda h: abs(parameter_count(vocabulary, h) - TARGET_PARAMETERS)
    )
    return GPTNeoXConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD_SIZE,
        max_position_embeddings=max(MIN_POSITIONS, job.data.sequence_length),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        # The tokenizer is trained with the corpus; its special tokens are not known here, and GPT-NeoX's are not its.
        bos_token_id=None,
        eos_token_id=None,
    )


def parameter_count(vocabulary: int, width: int) -> int:
    """Return the number of parameters: embedding and head; per layer 12 h² weights, 9 h biases, 4 h of two norms."""
    return 2 * vocabulary * width + LAYERS * (12 * width * width + 13 * width) + 2 * width
