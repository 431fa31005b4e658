#define ATTNOPS_ISA baseline
#include "kernels.inc"
