"""What will run: the Draft of derived numbers, the legality table in rules/, and the Plan with the rule behind each
value."""
