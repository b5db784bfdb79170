"""`smp.patches`: functions in the place of torch's own."""
