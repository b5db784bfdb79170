"""Types of values that sections of a Job share: bounded numbers, regular expressions, names of own objects."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

MOST = (1 << 63) - 1  # what torch, numpy and files take as a size
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
NonNegativeNumber = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _check_reference(name: str) -> str:
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise PydanticCustomError("reference", "package.module:name of your own")
    return name


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PydanticCustomError("pattern", "a regular expression ({reason})", {"reason": str(error)}) from None
    return pattern


OwnObject = Annotated[str, AfterValidator(_check_reference)]  # of the user's own code
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
Pattern = Annotated[str, AfterValidator(_check_pattern)]  # matched against whole names
