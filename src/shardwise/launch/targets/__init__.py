"""Places where a job can be started: one file a target; `shardwise.launch.launcher` holds their table."""
