"""Attacks: one file each. They look for a prompt that brings a forgotten concept back."""
