"""FedAvg: configuration and device half."""
