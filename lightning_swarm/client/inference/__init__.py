"""The client's side of text generation: sessions, routes, forwards and adapters."""
