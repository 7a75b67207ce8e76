"""Parts of `benchmarks/fidelity_local.py`: plans measured on CPU ranks, and their estimates."""
