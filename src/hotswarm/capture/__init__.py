"""How the state of a torch trainer gets into a snapshot and back. torch lives here; the daemon never imports it."""
