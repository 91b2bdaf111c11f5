"""Benchmarks: one module per operator, `python -m perf.bench_<operator> --cases <case> …`."""
