"""Run these from the repository's root, such as ``python -m examples.digits.train``."""
