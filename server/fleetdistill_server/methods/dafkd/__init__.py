"""Server half of DaFKD: the rounds in `server`, the ensemble of teachers in `ensemble`."""
