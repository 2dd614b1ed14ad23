"""Checks of the text in code: how it reads, and that a change of text changes nothing else."""
