// Random calls of the kernels of one instruction set. Built with the address sanitizer, so that a read outside of an array
// ends the program: each array has an allocation of its own, of exactly its size. Arguments: flash, decode or linear, the number of
// calls, a seed, `one_in`, and, to see that a wrong result is found, any fifth one: the plain computation then hides the
// newest key.
#if defined(ATTNOPS_AMX)
#include "isa.h"
static const attnops::Kernels others{};  // of other calls, which are left out
#define ATTNOPS_OTHERS others
#endif
#if defined(ATTNOPS_LINEAR_ALONE)  // for test_mutants.py, which compiles it often
#include "exp.h"
#include "isa.h"
#include "product.inc"
#include "score.inc"

#include "linear_gates.inc"

#include "linear.inc"
#else
#include "kernels.inc"
#endif

#include <math.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "draws.h"

namespace {

using namespace attnops;
using namespace attnops::ATTNOPS_ISA;

bool hides_newest = false;

#include "numbers.inc"

#if !defined(ATTNOPS_LINEAR_ALONE)
#include "flash_fuzz.inc"

#include "decode_fuzz.inc"
#endif

#if !defined(ATTNOPS_AMX)  // which has no kernel of its own
#include "linear_fuzz.inc"
#endif

template <class Fuzz>
int run(int calls, unsigned seed) {
  for (int i = 0; i < calls; ++i) {
    Fuzz fuzz(seed * 1000003u + static_cast<unsigned>(i));
    if (!fuzz.call()) {
      std::printf("call %d of seed %u is wrong\n", i, seed);
      return 1;
    }
  }
  std::printf("%d calls are right\n", calls);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  const int calls = std::atoi(arguments[2]);
  const unsigned seed = static_cast<unsigned>(std::atoi(arguments[3]));
  one_in = count > 4 ? static_cast<unsigned>(std::atoi(arguments[4])) : 1;
  hides_newest = count > 5;
#if !defined(ATTNOPS_AMX)
  if (!std::strcmp(arguments[1], "linear")) return run<of_linear::Fuzz>(calls, seed);
#endif
#if !defined(ATTNOPS_LINEAR_ALONE)
  return std::strcmp(arguments[1], "decode") ? run<of_flash::Fuzz>(calls, seed) : run<of_decode::Fuzz>(calls, seed);
#else
  return 2;
#endif
}
