"""`swarm-node demo`: three real DiLoCo trainers lose a process, a machine and a donor, and every claim is checked.

`trainer` is the training program; `cluster` starts and kills processes; `scenario` is the play, act by act; what
happened is a `record` of log lines; `claims`, `timeline` and `plot` are pure readers of that record.
"""
