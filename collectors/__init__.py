"""Evidence sources, one module each. Collectors measure; they never interpret."""
