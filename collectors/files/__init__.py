"""Files that other profilers wrote, read as streams: what they hold, and what of it is damaged."""
