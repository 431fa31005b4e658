// Computes the tile instructions of a program on a processor that has none: there each is an illegal instruction, whose
// signal is handled by the same plain C++ that the emulated kernels use. So the code that the compiler made for AMX runs,
// though slowly. Linked into a program; Linux on x86-64.
#include <signal.h>
#include <stdlib.h>
#include <sys/ucontext.h>

#define ATTNOPS_ISA traps
#define ATTNOPS_AMX_EMULATED
#include "tiles.h"

namespace {

using namespace attnops::traps;

constexpr int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// VEX.128.0F38.W0 with three bytes of prefix, an opcode, ModRM, and a SIB byte and an offset where it has them.
void compute(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const uint8_t* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || at[2] & 0x84) abort();  // another instruction
  const int extend_index = at[1] & 0x40 ? 0 : 8, extend_base = at[1] & 0x20 ? 0 : 8;
  const int prefix = at[2] & 3, third = ~at[2] >> 3 & 15, opcode = at[3];
  const int mode = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7;
  at += 5;
  char* address = nullptr;
  int64_t stride = 0;
  if (mode != 3) {
    int base = rm;
    if (rm == 4) {
      const int index = (*at >> 3 & 7) + extend_index;
      if (index != 4) stride = registers[REGISTERS[index]] << (*at >> 6);
      base = *at++ & 7;
    }
    int64_t offset = mode == 1 ? static_cast<int8_t>(*at) : 0;
    int32_t wide;
    memcpy(&wide, at, 4);
    const bool is_absent = mode == 0 && base == 5;  // the base; relative to the next instruction if there is no SIB byte
    if (mode == 2 || is_absent) offset = wide;
    at += mode == 1 ? 1 : mode == 2 || is_absent ? 4 : 0;
    const int64_t first = !is_absent ? registers[REGISTERS[base + extend_base]] : rm == 5 ? reinterpret_cast<int64_t>(at) : 0;
    address = reinterpret_cast<char*>(first + offset);
  }
  if (opcode == 0x4b && prefix == 3) tile_load(reg, address, stride);
  else if (opcode == 0x4b && prefix == 2) tile_store(reg, address, stride);
  else if (opcode == 0x5c && prefix == 2) tile_dot(reg, rm, third);
  else if (opcode == 0x49 && prefix == 3) tile_zero(reg);
  else if (opcode == 0x49 && prefix == 0 && address) tile_configure(*reinterpret_cast<const TileConfig*>(address));
  else if (opcode == 0x49 && prefix == 0) tile_release();
  else abort();
  registers[REG_RIP] = reinterpret_cast<greg_t>(at);
}

const int installed = [] {
  struct sigaction action = {};
  action.sa_sigaction = compute;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGILL, &action, nullptr);
}();

}  // namespace
