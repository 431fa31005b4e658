#include "isa.h"

#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define ATTNOPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace attnops {
namespace {

struct Choice {
  const Kernels* kernels;
  bool available;
};

#if defined(__x86_64__)
enum Register { EAX, EBX, ECX, EDX };

// A bit that CPUID returns. Not __builtin_cpu_supports, which is always false where zig compiles it.
bool cpuid(unsigned leaf, unsigned subleaf, Register in, int bit) {
  unsigned words[4] = {};
  return __get_cpuid_count(leaf, subleaf, words, words + 1, words + 2, words + 3) && words[in] >> bit & 1;
}

// Whether the system saves the registers that these bits of XCR0 name.
bool saves(unsigned bits) {
  if (!cpuid(1, 0, ECX, 27)) return false;  // OSXSAVE
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & bits) == bits;
}

// Whether this process may use tile registers: Linux must be asked once, and then saves them with a thread.
bool may_use_tiles() {
#if defined(__linux__)
  if (!cpuid(7, 0, EDX, 24) || !cpuid(7, 0, EDX, 22)) return false;  // AMX_TILE, AMX_BF16
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return may;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
bool has_bf16() {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) >> 14 & 1;  // HWCAP2_BF16
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found;
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
  // AVX2, FMA, F16C and BMI2; AVX-512 F, BW, DQ and VL.
  const bool avx2 = saves(0x6) && cpuid(7, 0, EBX, 5) && cpuid(1, 0, ECX, 12) && cpuid(1, 0, ECX, 29) && cpuid(7, 0, EBX, 8);
  const bool avx512 = avx2 && saves(0xe6) && cpuid(7, 0, EBX, 16) && cpuid(7, 0, EBX, 30) && cpuid(7, 0, EBX, 17) && cpuid(7, 0, EBX, 31);
  const bool bf16 = avx512 && cpuid(7, 1, EAX, 5) && cpuid(7, 0, ECX, 11);  // and VNNI
  out[n++] = {&kernels_amx, bf16 && may_use_tiles()};
  out[n++] = {&kernels_avx512_bf16, bf16};
  out[n++] = {&kernels_avx512, avx512};
  out[n++] = {&kernels_avx2, avx2};
#endif
#if defined(__aarch64__)
  out[n++] = {&kernels_neon_bf16, has_bf16()};
  out[n++] = {&kernels_neon, true};
#else
  out[n++] = {&kernels_baseline, true};
#endif
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
  const attnops::Kernels* kernels = attnops::kernels();
  return kernels ? kernels->name : "";
}

// All that this processor has, the fastest first, by index; null beyond the last.
ATTNOPS_EXPORT const char* attnops_cpu_available(int index) {
  attnops::Choice all[attnops::MOST];
  const int n = attnops::choices(all);
  for (int i = 0; i < n; ++i)
    if (all[i].available && index-- == 0) return all[i].kernels->name;
  return nullptr;
}
