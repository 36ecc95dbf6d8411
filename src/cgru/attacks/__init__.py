"""Attacks that search for prompts which bring a forgotten concept back; one file each."""
