"""What the store and its users tell Prometheus, by way of Ray."""
