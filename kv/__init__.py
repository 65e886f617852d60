"""What a KV block is (key, layout, part) and the global store that shares blocks among workers."""
