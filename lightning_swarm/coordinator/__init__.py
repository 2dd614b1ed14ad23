"""The coordinator: grants batches, closes steps, has records decided, and keeps membership and balance.

`coordinator.py` is the role, from one run generation to the next; `context.py` has what its parts share in one of them.
`trainer_handlers.py` answers trainers, and `long_poll.py` those that wait for a record. `step/` has the open step, the
data order, leases, and the replays of lost microbatches; `commit.py` ends a step, and `consensus.py` has its record
decided. `membership/` decides which servers and trainers are in, and `rebalancing/` which servers move.
"""
