"""What pages, live views and timelines show beside the figures of a report."""
