"""The ground that every other part stands on: errors, limits, clock, tasks, the event loop, process settings."""
