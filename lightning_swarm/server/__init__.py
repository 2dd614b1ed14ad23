"""The stage side: RPC handlers, the compute thread, the ledger of receipts."""

ADMIT = "server.admit"
LOAD = "server.load"
LEAVE = "server.leave"
FORWARD = "stage.forward"
BACKWARD = "stage.backward"
CANCEL = "stage.cancel"
STATE = "stage.state"
