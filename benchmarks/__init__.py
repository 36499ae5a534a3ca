"""Benchmarks: each module compares models in one run, and prints ratios next to the limits of the machine."""
