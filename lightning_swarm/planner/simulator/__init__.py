"""Simulates swarms: `fluid.py` as rates, with the real rebalancing policy; `microbatches.py` with all real code."""
