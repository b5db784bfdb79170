"""A model becomes one rank's part of it: tensor map, sharding, parallelize() and ParallelModel.run."""
