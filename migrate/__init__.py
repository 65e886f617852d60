"""Load, dispatch and placement: who runs what, and where a request goes."""
