"""Peers move to the stages where they are needed: `policy.py` says which ones, and where to."""
