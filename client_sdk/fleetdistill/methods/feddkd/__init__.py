"""FedDKD: configuration and device half."""
