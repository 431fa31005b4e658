#define ATTNOPS_ISA amx
#define ATTNOPS_AMX
#define ATTNOPS_OTHERS kernels_avx512_bf16
#include "kernels.inc"
