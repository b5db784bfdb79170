"""The job that a user asks for: its schema, its keys, and the sources that it is read from."""
