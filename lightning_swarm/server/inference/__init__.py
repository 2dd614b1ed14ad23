"""The server's side of text generation: sessions, batched steps and adapters."""
