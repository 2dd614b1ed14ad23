"""A server's part in audits: it keeps its work until a step is decided, and recomputes other servers' work."""
