"""Counters: what windows of samples say of each phase, and of the devices."""
