"""Remove noise from photographs."""
