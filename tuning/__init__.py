"""From a trace of real traffic to the memory, the disk and the times-to-live that the KV cache deserves."""
