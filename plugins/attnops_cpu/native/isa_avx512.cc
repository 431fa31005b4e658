#define ATTNOPS_ISA avx512
#include "kernels.inc"
