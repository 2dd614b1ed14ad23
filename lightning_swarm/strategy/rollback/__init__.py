"""A trainer's part in a rollback: the state of its loop beside the servers' snapshots, and a checkpoint of both.

A run that lost a stage goes on from the newest snapshot as from a `ckpt_path`: the Trainer's function is called again
in the same process. Beyond what such a file can do, the loop reads on in the middle of an epoch, with the same random
numbers.

`rollback.py` decides what a process does after an error, and where its loop goes on. Between two batches
`loop_transfer.py` records the loop's state (`loop_state.py`, `data_position.py`), and packs it for standby leads.

Of several trainers the lead decides, and brings the weights. Each rolls its own loop back, to before the first of its
batches that is in no record up to the snapshot. The lead asks which versions they could go on from, tells them the
version when it releases their servers, and begins the next run when they wait for it (`failover.py` of `peer`). A
trainer that died with the stage is not waited for.
"""
