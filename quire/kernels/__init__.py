"""Implementations of ops for particular machines. Kernels know pointers and shapes, never models or requests."""
