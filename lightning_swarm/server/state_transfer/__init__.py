"""Moves a stage's state between servers: snapshots, downloads for joiners, loading and saving."""
