"""What a snapshot is: trees, sections, chunks, manifests. Pure: no I/O, no clock, no torch."""
