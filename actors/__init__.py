"""What owns a device: thin Serve deployments and the Worker actor each of them creates."""
