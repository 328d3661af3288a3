"""The state directory of a device, and files that survive a power cut. Imports `wire`."""
