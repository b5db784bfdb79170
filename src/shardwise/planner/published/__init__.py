"""Tables of published runs: reading, evaluation and calibration against them."""
