"""FedD2S: configuration and device half."""
