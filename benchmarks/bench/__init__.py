"""Cases, contenders, clocks and results of `python -m benchmarks.bench`."""
