"""Ranks that share a graph compare what they are about to do, before any of them does it."""
