"""`torch._six`, which torch has removed with version 2: what scripts take of it is Python's."""

import collections.abc as container_abcs
from math import inf, nan

__all__ = ["container_abcs", "inf", "int_classes", "nan", "string_classes"]

int_classes = int
string_classes = (str, bytes)
