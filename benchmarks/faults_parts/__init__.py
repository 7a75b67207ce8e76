"""Parts of `benchmarks/faults.py`: what goes on after a failure with fewer devices."""
