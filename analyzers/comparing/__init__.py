"""What changed between traces: deltas with uncertainty, what was different around them, a verdict, and rules."""
