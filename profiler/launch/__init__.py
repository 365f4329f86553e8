"""How a wrapped command's Python processes start recording by themselves."""
