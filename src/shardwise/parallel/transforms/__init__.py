"""The steps of parallelize(), one file each, in the order that parallel/apply.py recites."""
