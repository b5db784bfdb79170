"""Things that the planner knows by name: accelerators, clusters, models; data files beside."""
