#define ATTNOPS_ISA neon_bf16
#include "kernels.inc"
