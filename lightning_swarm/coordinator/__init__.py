"""The coordinator: grants batches, closes steps, has records decided, and keeps membership and balance.

`coordinator.py` is the role as a whole. `trainer_handlers.py` answers trainers; `step/` has the books of the open step,
the data order, leases, and the replays of lost microbatches; `commit.py` ends a step, and `consensus.py` has its record
decided. `long_poll.py` holds calls until something happens. `membership/` says which servers and trainers are in.
"""
