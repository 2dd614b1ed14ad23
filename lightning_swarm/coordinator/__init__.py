"""The coordinator: grants batches, closes steps, has records decided, and keeps membership and balance."""
