"""A fleet on one machine: the real engine, store, messages and device halves, with controls and a report."""
