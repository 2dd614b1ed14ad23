"""The lead's part when a run goes back: its loop's state beside the servers' snapshots, and a checkpoint of both.

A stage whose servers all died is gone. The run then goes back, all stages together, to the newest snapshot, as one that
is resumed with `ckpt_path`: the Trainer's function is called again in the same process. Beyond what a file can do it
reads on in the middle of an epoch where it was, with the random numbers that it had there.
"""
