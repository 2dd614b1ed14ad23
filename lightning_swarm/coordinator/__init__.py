"""The coordinator: grants batches, closes steps, has records decided, and keeps membership and balance.

`coordinator.py` is the role as a whole, `context.py` what its parts share. `trainer_handlers.py` answers trainers;
`step/` has the state of the open step, the data order, leases, and the replays of lost microbatches; `commit.py` ends a
step, and `consensus.py` has its record decided. `long_poll.py` holds calls until something happens. `membership/`
decides which servers and trainers are in.
"""
