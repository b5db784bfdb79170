"""Jobs of any size traced on this machine, one rank of every kind, without allocating or computing anything.

`job.py` begins: it chooses the ranks (`kinds.py`), traces each (`rank.py`, with what `recorder.py` sees) and checks
that their collectives meet (`agreement.py`).
"""
