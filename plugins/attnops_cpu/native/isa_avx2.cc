#define ATTNOPS_ISA avx2
#include "kernels.inc"
