"""FedDKC: configuration and device half."""
