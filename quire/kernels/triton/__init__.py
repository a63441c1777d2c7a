"""Triton kernels, one family per file; each also runs in Triton's interpreter on a CPU."""
