"""Peers far apart, whose computing takes a given time, over lines of limited bandwidth and some latency."""
