"""Where phaseprof touches an engine: one module an engine seam, each of which comes off completely."""
