"""Kernels: what each is by its name, and where the busy time of a phase goes."""
