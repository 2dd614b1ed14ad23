"""Peers far apart, whose computing takes a given time, over links of limited bandwidth and some latency."""
