"""The command line. Each command is a module with `add_arguments(parser)` and `run(args) -> exit code`, loaded only when asked for."""
