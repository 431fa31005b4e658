#define ATTNOPS_ISA neon
#include "kernels.inc"
