"""Builds the embedded model Emoji Canvas from its sources: `python -m tools.emoji_canvas --help`."""
