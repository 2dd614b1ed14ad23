"""The coordinator's part in audits: chooses the work to compute again, and convicts servers of false work."""
