#define ATTNOPS_ISA amx_emulated
#define ATTNOPS_AMX
#define ATTNOPS_AMX_EMULATED
#define ATTNOPS_OTHERS kernels_baseline
#include "kernels.inc"
