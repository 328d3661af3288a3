"""Private class statistics: configuration, noisy sums and their merge (NumPy only), and public features."""
