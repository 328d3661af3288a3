"""Server half of DaFKD: `server` contains the rounds, `ensemble` the ensemble of teachers."""
