"""One step at the coordinator: its data order, leases, gradient sums, and replays of lost microbatches."""
