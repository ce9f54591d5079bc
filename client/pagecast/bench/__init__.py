"""The measuring bench behind `pagecast bench`: workloads, peers, results. It measures from outside, through the public API."""
