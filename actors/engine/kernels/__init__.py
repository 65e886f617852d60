"""Kernels of our own for CPUs, in C++: built once on a machine, and never needed (torch's operators do the same)."""
