"""From files of other profilers to a trace: steps found, kernels joined to them, tables written."""
