"""Benchmarks: each module prints a table of ratios from one run, and draws a picture. `make bench` runs them."""
