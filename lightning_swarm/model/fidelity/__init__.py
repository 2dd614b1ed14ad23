"""Whether a stage computes what the whole module would: values left on modules, code that reads them, state."""
