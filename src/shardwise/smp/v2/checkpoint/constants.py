"""Keys that SMP puts into state dicts."""

SMP_IS_PARTIAL_KEY = "_smp_is_partial"
SMP_IS_LOAD_INFO_KEY = "_smp_is_load_info"
