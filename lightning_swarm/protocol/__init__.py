"""The protocol between peers: messages, codecs, and the rules that all peers apply."""
