"""The CPU kernels: the model's arithmetic, compiled by Numba on the user's machine, each beside its definition."""
