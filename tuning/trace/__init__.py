"""Traces of real traffic: read, checked, described, converted, and made up where there is none."""
