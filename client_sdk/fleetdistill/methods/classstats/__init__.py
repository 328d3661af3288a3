"""Class statistics: configuration, mathematics (NumPy only) and the device half of both forms."""
