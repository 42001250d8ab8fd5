"""Kernels, one file each, all of the shape that :mod:`megamoe.kernels.base` gives."""
