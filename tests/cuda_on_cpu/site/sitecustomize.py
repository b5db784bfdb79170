"""Read by every Python process that has this directory on its path: the test's own, its fork server, their workers."""

import os
import sys

if library := os.environ.get("PLAYED_CUDA"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from stand_in import play

    del sys.path[0]
    play(library)
