"""CPU kernels in C++ with a plain C interface, and the loader that builds and binds them."""
