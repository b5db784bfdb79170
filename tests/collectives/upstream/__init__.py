"""torch's own tests of distributed programs on the engine and on Gloo: what passes on one passes on the other."""
