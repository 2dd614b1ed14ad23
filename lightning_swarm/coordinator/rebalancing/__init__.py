"""Moves servers to the stages that need them; `policy.py` chooses the servers and their new stages."""
