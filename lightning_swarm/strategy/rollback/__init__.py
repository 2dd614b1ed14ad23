"""A trainer's part in a rollback: the state of its loop beside the servers' snapshots, and a checkpoint of both.

A stage whose servers all died is gone. The run then rolls back, all stages together, to the newest snapshot, as a run
that is resumed with `ckpt_path`: the Trainer's function is called again in the same process. Beyond what a file can do
it reads on in the middle of an epoch where it was, with the random numbers that it had there.

`rollback.py` decides what a process does after an error, and where its loop goes on. Between two batches
`loop_transfer.py` records the loop's state (`loop_state.py`, `data_position.py`), and packs it for standby leads.

Of several trainers the lead decides, and brings the weights. Each keeps states of its own loop and rolls back itself:
to before the first of its batches that no record counts which the snapshot is the outcome of (`loop_state.py`). The
lead asks which versions they could go on from, tells them the version when it releases their servers, and begins the
next run when they wait for it (`failover.py` of `peer`). A trainer that died with the stage is not waited for. The loop
then finds at its first batch that records came, as a loop does that waited for a grant: it counts them, and shares what
was logged in them, as if the run had gone on.
"""
