"""SVG, HTML and pictures that the pages are made of."""
