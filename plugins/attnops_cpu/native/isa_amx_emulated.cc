#define ATTNOPS_ISA amx_emulated
#define ATTNOPS_AMX
#define ATTNOPS_AMX_EMULATED
#if defined(__aarch64__)
#define ATTNOPS_OTHERS kernels_neon
#else
#define ATTNOPS_OTHERS kernels_baseline
#endif
#include "kernels.inc"
