"""Class statistics: configuration, mathematics (numpy alone) and the device half of both forms."""
