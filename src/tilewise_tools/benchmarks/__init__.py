"""Scripts for single measurements; the folder benchmarks/results has the results that documents cite."""
