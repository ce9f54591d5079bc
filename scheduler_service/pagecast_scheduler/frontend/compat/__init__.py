"""Other projects' services, spoken by thin adapters over this front end's own ones. The stubs here are generated from protos/compat."""
