"""Swarms without machines: `fluid.py` has them as rates, with the policies of the real ones."""
