"""Renderers: they lay out a finished report and never compute a figure."""
