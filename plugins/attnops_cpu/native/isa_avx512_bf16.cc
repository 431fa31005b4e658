#define ATTNOPS_ISA avx512_bf16
#include "kernels.inc"
