"""Scripts that measure single questions; results that count are kept in the folder benchmarks/results."""
