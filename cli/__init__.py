"""The `phaseprof` command: one module a subcommand, declarations only."""
