"""The conformance suite: what `pagecast.v1` promises, as data files and the checks that read them, against any endpoint."""
