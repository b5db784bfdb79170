"""What the user asks for: the Job's schema, its keys, and the sources that it is read from."""
