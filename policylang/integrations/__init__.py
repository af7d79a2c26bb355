"""Policies inside other trainers, through the hooks that these offer."""
