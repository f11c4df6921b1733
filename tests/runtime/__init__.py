"""What lies under the device: the client and the caches of compiled programs."""
