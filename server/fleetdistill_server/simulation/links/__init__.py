"""How a simulation runs its fleet: in memory or over gRPC."""
