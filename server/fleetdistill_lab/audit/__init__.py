"""`fleetdistill audit`: what a curious server can infer from a method's messages, measured on public data."""
