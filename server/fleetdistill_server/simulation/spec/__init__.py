"""What is simulated: settings, devices, attacks."""
