"""Benchmarks and judges: jobs -> images -> predictions -> scores."""
