"""Everything that a run shows and records: display, metrics, trackers, memory, profiles and the report."""
