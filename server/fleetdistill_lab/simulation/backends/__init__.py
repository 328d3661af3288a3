"""Where a simulation computes its devices' work: in worker processes, or on a Ray cluster."""
