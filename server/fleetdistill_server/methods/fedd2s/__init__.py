"""Server half of FedD2S: `server` contains the rounds, `schedule` the schedule of distillation layers."""
