"""Attention caches and adapters of generation."""
