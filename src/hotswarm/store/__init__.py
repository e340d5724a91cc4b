"""Where snapshots live: files on disk, and the shared-memory arena in which they are captured."""
