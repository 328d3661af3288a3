"""The links of a simulation: in-memory, or gRPC between separate processes."""
