"""The production path: which kernel, on which machine, and all that is done above a kernel."""
