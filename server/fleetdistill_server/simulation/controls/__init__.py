"""What a fleet is compared with: devices that train alone, and FedAvg."""
