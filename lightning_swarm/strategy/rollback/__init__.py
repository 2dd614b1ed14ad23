"""A trainer's part in a rollback: it keeps states of its loop for the servers' snapshots, and resumes from a state.

A run that lost a stage resumes from the newest snapshot as from a `ckpt_path`: the Trainer's function is called again
in the same process, with a checkpoint of the snapshot and the loop's state. Unlike with an ordinary checkpoint file,
the loop also resumes in the middle of an epoch, with the same random numbers.

`rollback.py` decides how a process continues after an error, and where its loop resumes. Between two batches
`loop_transfer.py` records the loop's state (`loop_state.py`, `data_position.py`), and packs it for standbys.

With several trainers, the lead chooses the snapshot and loads its weights. Each trainer rolls its own loop back, to
before its first batch that no record up to the snapshot counts. The lead asks the trainers which versions they could
resume from, and sends them the chosen version when it releases their servers. It begins the next run when all of them
wait for it (`peer/failover.py`), except a trainer that died with the stage.
"""
