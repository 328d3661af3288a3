"""The state directory of a device, and durable files. Imports `wire`."""
