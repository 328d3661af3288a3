"""Commands that show runs, devices, methods and operators as tables, and control runs."""
