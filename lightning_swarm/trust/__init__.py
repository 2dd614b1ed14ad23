"""Access to a run: the owner's key, invitations, and certificates that any peer can verify offline."""
