"""Prometheus metrics of a server: what each process measures, and the HTTP endpoint for them.

Two kinds of figures meet at the endpoint:

* **What the store knows** (devices, asks, rounds, scores) is read from the store at a scrape. It is exact after any
  crash, because it is not counted a second time.
* **What only a process knows** (uploads begun, latencies, event-loop lag, the engine's phase) is kept in files that
  the front and the engines map into memory: prometheus-client's multiprocess mode, with one change. A process names
  its files after its task instead of its process id. A restarted front therefore continues the counters of the killed
  one, a SIGKILL loses no increment, and the number of files does not grow with restarts.

The alternative, a text file that each process writes every few seconds, would lose the counts since its last write at
each SIGKILL, and would need its own merging. The files are empty again when `fleetdistill serve` starts; Prometheus
expects that counters start at 0 with their server.

A write to a mapped file whose blocks do not exist yet ends the process with SIGBUS if the disk is full. The files are
therefore written in full before they are mapped (`files.py`); a front that has no space for them works without.

Labels have a bounded number of values: never a device; a run only in figures of the newest runs (`runs.py`).
"""
