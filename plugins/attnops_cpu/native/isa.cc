#include "isa.h"

#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define ATTNOPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace attnops {
namespace {

struct Choice {
  const Kernels* kernels;
  bool available;
};

#if defined(__x86_64__)
// Whether this process may use tile registers: Linux must be asked once, and then saves them with a thread.
bool may_use_tiles() {
#if defined(__linux__)
  unsigned a, b, c, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & bit_AMX_TILE) || !(d & bit_AMX_BF16)) return false;
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return may;
#else
  return false;
#endif
}
#endif

constexpr int MOST = 6;

// The fastest first.
int choices(Choice* out) {
  int n = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  out[n++] = {&kernels_amx, bf16 && may_use_tiles()};
  out[n++] = {&kernels_avx512_bf16, bf16};
  out[n++] = {&kernels_avx512, avx512};
  out[n++] = {&kernels_avx2, avx2};
#endif
  out[n++] = {&kernels_baseline, true};
#if defined(ATTNOPS_CPU_AMX_EMULATED)
  out[n++] = {&kernels_amx_emulated, true};
#endif
  return n;
}

const Kernels* choose() {
  Choice all[MOST];
  const int n = choices(all);
  const char* forced = std::getenv("ATTNOPS_CPU_ISA");
  for (int i = 0; i < n; ++i) {
    if (!all[i].available) continue;
    if (!forced || !*forced || !std::strcmp(forced, all[i].kernels->name)) return all[i].kernels;
  }
  return nullptr;
}

}  // namespace

const Kernels* kernels() {
  static const Kernels* const chosen = choose();
  return chosen;
}

}  // namespace attnops

// The instruction set that serves calls; empty if ATTNOPS_CPU_ISA names one that this processor does not have.
ATTNOPS_EXPORT const char* attnops_cpu_isa() {
  const attnops::Kernels* found = attnops::kernels();
  return found ? found->name : "";
}

// All that this processor has, the fastest first, by index; null beyond the last.
ATTNOPS_EXPORT const char* attnops_cpu_available(int index) {
  attnops::Choice all[attnops::MOST];
  const int n = attnops::choices(all);
  for (int i = 0; i < n; ++i)
    if (all[i].available && index-- == 0) return all[i].kernels->name;
  return nullptr;
}
