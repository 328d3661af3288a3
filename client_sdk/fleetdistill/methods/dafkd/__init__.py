"""DaFKD: configuration, device half, and the training of generator and discriminator."""
