"""The stage side: RPC handlers, the compute thread, the ledger of receipts."""
