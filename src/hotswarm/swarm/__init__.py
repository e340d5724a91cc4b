"""How nodes find, serve and fetch from each other, and the daemon that does it beside a trainer."""
