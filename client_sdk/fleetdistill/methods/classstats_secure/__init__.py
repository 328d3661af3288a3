"""Class statistics by secure sums: configuration, both halves' messages, and the encoding of statistics as integers."""
