"""A trainer's part in a rollback: the state of its loop beside the servers' snapshots, and a checkpoint of both.

A run that lost a stage resumes from the newest snapshot as from a `ckpt_path`: the Trainer's function is called again
in the same process. Unlike with a checkpoint file, the loop also resumes in the middle of an epoch, with the same
random numbers.

`rollback.py` decides how a process continues after an error, and where its loop resumes. Between two batches
`loop_transfer.py` records the loop's state (`loop_state.py`, `data_position.py`), and packs it for standbys.

With several trainers, the lead decides and brings the weights. Each trainer rolls its own loop back, to before its
first batch that no record up to the snapshot counts. The lead asks them which versions they could resume from, and
sends them the chosen version when it releases their servers. It begins the next run when they wait for it
(`peer/failover.py`). It does not wait for a trainer that died with the stage.
"""
