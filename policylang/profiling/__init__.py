"""Profiling: from the machine it runs on to a device profile. Knows no graphs."""
