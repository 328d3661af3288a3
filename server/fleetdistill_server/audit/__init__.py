"""`fleetdistill audit`: what a curious server can infer from a method's messages, measured by attacks on public data."""
