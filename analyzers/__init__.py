"""Pure functions over the tables of a trace: no printing, no plotting, no device."""
