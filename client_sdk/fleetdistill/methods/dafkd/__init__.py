"""DaFKD: its configuration, the device half, and the training of generator and discriminator."""
