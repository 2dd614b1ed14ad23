"""A served model: its servers, clients, tuning, and the HTTP server."""
