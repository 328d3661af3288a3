"""Server half of FedD2S: the rounds in `server`, the schedule of distillation layers in `schedule`."""
