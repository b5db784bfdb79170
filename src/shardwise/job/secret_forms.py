"""Secrets are told by a name or by a form, in a job, in a recipe and in a request alike. They are shown nowhere."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

SECRET_WORDS = frozenset(["token", "secret", "password", "passwd", "credential", "credentials", "apikey"])
SECRET_PAIRS = frozenset([("api", "key"), ("access", "key"), ("private", "key"), ("auth", "key")])
# Tokens of Hugging Face, AWS, GitHub, OpenAI's kind, Slack; then a key in a file.
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|(AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|"
    r"xox[abpr]-[\w-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
REFERENCE = re.compile(r"arn:aws[\w-]*:(secretsmanager|ssm):|\{\{resolve:|ssm://|secretsmanager://|/opt/ml/|s3://|/")


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value is a secret, as far as its name or its form tells. References to secrets are none."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if SECRET_VALUE.search(text):
        return True
    looks_like_one = isinstance(value, str) and re.fullmatch(r"\S{8,}", text) and not text.startswith("<")
    return bool(looks_like_one) and names_secret(name) and not REFERENCE.match(text)


def names_secret(name: str) -> bool:
    """Return whether a name speaks of a secret: hf_token, accessKey."""
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])", name) if word]
    return bool(SECRET_WORDS & set(words)) or any(pair in SECRET_PAIRS for pair in pairwise(words))
