"""The model runner: plain torch, importable without Ray."""
