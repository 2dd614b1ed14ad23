"""A trainer's part when a run goes back: its loop's state beside the servers' snapshots, and a checkpoint of both.

A stage whose servers all died is gone. The run then goes back, all stages together, to the newest snapshot, as one that
is resumed with `ckpt_path`: the Trainer's function is called again in the same process. Beyond what a file can do it
reads on in the middle of an epoch where it was, with the random numbers that it had there.

Of several trainers the lead decides, and brings the weights. Each keeps states of its own loop and goes back itself:
to before the first of its batches that no record counts which the snapshot is the outcome of (`loop_state.py`). The
lead asks which versions they could go on from, says which it is when it releases their servers, and begins the next
run when they wait for it (`failover.py` of `peer`). Whoever died with the stage is not waited for. The loop then
finds at its first batch that records came, as one does that waited for a place: it counts them, and shares what was
logged in them, as if the run had gone on.
"""
