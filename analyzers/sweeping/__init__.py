"""Sweeps over sizes: the cells, the knee, what follows."""
