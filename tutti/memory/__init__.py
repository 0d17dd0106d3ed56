"""Memory that transfers read and write: on the host and on a GPU."""
