"""Description of a simulation: settings, plan, devices and attacks."""
