"""Kernels for CPUs and GPUs: products, norms and attention over block tables. They know no caches and no models.

code            Code: functions that are being written: loops, memory, vector operations
vectors         the numbers of such code, one or 16 at a time
tiles           tiles of bfloat16 on CPUs with AMX
compiling       code turned into machine code, and calls of it by any number of threads
code_cache      machine code on disk, from one process to the next
teams           the threads that OpenMP keeps
products        a decoder's rows times its weights, fused with the operations behind them; `product_*` is their code
norms           rows over their root mean square
attention       attention of one step over block tables, on CPUs, and on GPUs in Triton

The CPU's kernels are compiled by LLVM (the extra `hf` installs llvmlite).
"""

# It lists the sources of this package, before any of them is imported.
from quire.kernels import code_cache as code_cache
