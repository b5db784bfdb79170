"""HyperPod's recipes as jobs: what they are, what each of their keys becomes, and what of them has no place here."""
