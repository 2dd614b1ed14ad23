"""Steps: each granted sample in exactly one decided record.

``grant -> microbatches, receipts -> close -> average -> record decided -> apply``. `policy.py` keeps the books of
the open step, `coordinator.py` acts on them, `voting.py` decides records.
"""

GRANT = "step.grant"
DONE = "step.done"
RECORD = "step.record"
FREEZE = "step.freeze"
AVERAGE = "step.average"
APPLY = "step.apply"
PROPOSE = "step.propose"
