"""Steps: each granted sample in exactly one decided record.

``grant -> microbatches, receipts -> close -> average -> record decided -> apply``; where the user changed what trains,
``select -> settle`` come first. `policy.py` counts what the open step was granted, `books.py` is all that who
coordinates knows; `trainers.py` answers trainers by it, `places.py` says who gets a place, `windows.py` which batches a
step takes, `ends.py` what is told of a step's end, `coordinator.py` is the role as a whole. `closing.py` ends steps,
`sums.py` brings the servers' sums to what a step counts, `ledgers.py` reads what they hold, `planning.py` says how,
`replays.py` has computed again what is missing, and `attendance.py` knows who takes part; `voting.py` is how records
are decided, `proposer.py` decides them, `told.py` knows of which events the lead was told. `gate.py` hears which
servers join and leave, `enrolment.py` which trainers; `rosters.py` says who is in then. At a trainer, `client.py` asks
for places and records, `enlisting.py` for a part in the run; `coordinator_calls.py` finds who answers.
"""

ADMIT = "server.admit"
LOAD = "server.load"
RESTART = "server.restart"
RELEASE = "server.release"
FORWARD = "stage.forward"
BACKWARD = "stage.backward"
CANCEL = "stage.cancel"
STATE = "stage.state"
WRITE = "stage.write"
FOLLOW = "stage.follow"
PIECE = "stage.piece"
NEXT = "stage.next"
LEND = "stage.lend"
KEEP = "snapshot.keep"
KEEP_LOOP = "snapshot.keep_loop"
SNAPSHOT = "snapshot.read"


SELECT = "step.select"
SETTLE = "step.settle"
GRANT = "step.grant"
PLAN = "step.plan"
TAKE_PLAN = "step.take_plan"
METRICS = "step.metrics"
ARMED = "step.armed"
BEGIN = "step.begin"
DONE = "step.done"
REGISTER = "step.register"
RECORD = "step.record"
TAKE_METRICS = "step.take_metrics"
RENEW = "step.renew"
QUIT = "step.quit"
ENLIST = "run.enlist"
RETIRE = "run.retire"
RECEIPTS = "step.receipts"
FREEZE = "step.freeze"
FENCE = "step.fence"
AVERAGE = "step.average"
APPLY = "step.apply"
REPLAY = "trainer.replay"
REPORT = "trainer.report"
REPORT_METRICS = "trainer.report_metrics"
PREPARE = "step.prepare"
PROPOSE = "step.propose"
VIEW = "run.view"
LEAD = "run.lead"
WATCH = "run.watch"
PULL = "run.pull"
TAKE_OVER = "run.take_over"
JOIN = "run.join"
MEET = "run.meet"
READY = "run.ready"
LISTEN = "run.listen"
DRAIN = "run.drain"
LEAVE = "run.leave"
BREAK_OFF = "run.break_off"
HELD = "snapshot.held"
INHERIT = "run.inherit"

ROLE_CALLS = (
    *(SELECT, PLAN, TAKE_PLAN, GRANT, BEGIN, ARMED, DONE, RECORD, RENEW, REGISTER, QUIT),
    *(JOIN, READY, DRAIN, ENLIST, RETIRE),
)
"""What only the coordinator answers."""
