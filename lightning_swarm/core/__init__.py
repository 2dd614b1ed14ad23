"""Foundations of all other parts: errors, limits, clock, tasks, the event loop, process settings."""
