"""The plan of a run: derived numbers (Draft), the legality table (rules/), and the Plan with its rules."""
