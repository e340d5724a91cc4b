"""The dashboard: one page without scripts from elsewhere, served by the daemon's HTTP API."""
