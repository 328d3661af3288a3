"""Class statistics: configuration, mathematics (NumPy only) and the device half."""
