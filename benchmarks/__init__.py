"""What the figures are made with: one module for each, run as `python -m benchmarks.NAME`."""
