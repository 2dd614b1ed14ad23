"""The coordinator's part in audits: whose work is looked into, and who is convicted."""
