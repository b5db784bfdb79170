"""The search over legal layouts, and its explanation."""
