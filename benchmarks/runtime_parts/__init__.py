"""Parts of `benchmarks/runtime.py`: the model, both sides, and the ranks that run them."""
