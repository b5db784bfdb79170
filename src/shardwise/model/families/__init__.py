"""One file a model family: its record, `FAMILY`, and the classes and functions that the record names.

`shardwise.model.registry` finds the files by looking into this package, so that a new family is a new file.
"""
