// Large sums of one host as a chain: rank 0 puts a block into a shared area, each further rank adds its own to it in place,
// and after the last one it is the sum, in the order of the ranks. In every round each rank has another block, so all work
// at once; n blocks are under way, one a rank. Beside staging every input and adding them then, a rank makes one pass over
// its input instead of two, and half as much memory is written before it is read.
#include "group.h"

namespace shardwise {
namespace {

constexpr int kRanks = 3;         // two ranks stage one half each, and add the other half directly: less than a chain
constexpr uint64_t kBlocks = 8;   // for each rank, from which on filling and emptying the chain costs little

}  // namespace

// Sums that are kept in another type than their inputs would move twice the bytes: with four ranks a fifth slower (64 MiB).
bool Group::chains(uint64_t bytes) const {
  return room_.size >= kRanks && accumulator(call_.number) == call_.number && bytes >= kBlocks * room_.size * room_.slot;
}

// `add(block)` on each rank in turn, one round after another, and `take(block)` on all ranks in the round after. A block is
// in one of n+1 areas, all of one parity, and is taken before rank 0 uses its area again.
template <class Add, class Take>
void Group::chain(uint64_t blocks, Add add, Take take) {
  const uint64_t n = room_.size, own = room_.rank, parity = (round_ + 1) % 2;
  for (uint64_t round = 0; round < blocks + n; ++round) {
    const auto area = [&](uint64_t block) { return room_.stage(static_cast<int>(block % (n + 1)), parity); };
    if (round >= own && round - own < blocks) add(round - own, area(round - own));
    if (round >= n) take(round - n, area(round - n));
    if (round + 1 < blocks + n) meet();
    if (round == 0) compare();
  }
  if (round_ % 2 != parity) meet();  // the next operation's first round writes to the other parity
}

// This rank's link: adds `elements` of its own to what is in `area`, into `out`.
void Group::add_own(void* out, const void* area, const void* input, uint64_t elements) const {
  const bool scaled = call_.reduce == Reduce::scaled_sum, last = room_.rank + 1 == room_.size;
  const Reduce step = call_.reduce == Reduce::average && !last ? Reduce::sum : call_.reduce;
  if (room_.rank == 0 && !scaled) return copy(out, input, elements * call_.item);
  std::vector<const void*> parts{area, input};
  std::vector<double> factors{1.0, call_.factor};
  if (room_.rank == 0) parts = {input}, factors = {call_.factor};
  shardwise::reduce({call_.number, call_.number}, step, out, parts, factors, elements, room_.size);
}

// A block is a piece of every rank's part.
void Group::reduce_scatter_in_chain(const std::vector<const void*>& inputs, void* output) {
  const uint64_t step = aligned(room_.slot / room_.size), bytes = call_.count * call_.item;
  const auto length_of = [&](uint64_t block) { return std::min(step, bytes - block * step); };
  const Copy put = copier(bytes * room_.size);
  const auto add = [&](uint64_t block, char* area) {
    for (int to = 0; to < room_.size; ++to) {
      char* const sum = area + to * step;
      add_own(sum, sum, at(inputs[to], block * step), length_of(block) / call_.item);
    }
  };
  const auto take = [&](uint64_t block, const char* area) {
    put(at(output, block * step), area + room_.rank * step, length_of(block));
  };
  chain((bytes + step - 1) / step, add, take);
}

void Group::all_reduce_in_chain(const char* input, char* output, uint64_t bytes) {
  const uint64_t step = room_.slot;
  const Copy put = copier(bytes * room_.size);
  const auto length_of = [&](uint64_t block) { return std::min(step, bytes - block * step); };
  const auto add = [&](uint64_t block, char* area) {
    add_own(area, area, input + block * step, length_of(block) / call_.item);
  };
  const auto take = [&](uint64_t block, const char* area) { put(output + block * step, area, length_of(block)); };
  chain((bytes + step - 1) / step, add, take);
}

}  // namespace shardwise
