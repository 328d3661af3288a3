"""Server half of class statistics by secure sums, with noise and without."""
