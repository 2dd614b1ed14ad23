"""Simulates swarms: `fluid.py` as rates with the policies of real swarms, `microbatches.py` with all of their code."""
