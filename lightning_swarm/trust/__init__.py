"""Access to a run: the owner's key, invitations, and certificates that anybody verifies offline."""
