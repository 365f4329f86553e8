"""The work model: FLOPs and bytes of a pass in closed form."""
