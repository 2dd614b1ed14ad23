"""The coordinator: grants batches, closes steps, has records decided, and manages membership and load balance.

`coordinator.py` has the role, which outlives run generations. `context.py` has the state that its parts share in one.
`trainer_handlers.py` answers trainers, and `long_poll.py` holds their requests for a record. `lead_liveness.py` watches
the lead, and `event_deltas.py` chooses the event counts to send to it. `step/` has the open step, the data order,
leases, and the replays of lost microbatches. `commit.py` ends a step, and `consensus.py` has its record decided.
`membership/` decides which servers and trainers belong to the run, and `rebalancing/` which servers move. `audit/`
examines the servers' work in runs with strangers, behind the interface in `step/oversight.py`.
"""
