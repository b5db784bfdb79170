// All-gather, reduce-scatter and all-reduce between hosts with different numbers of ranks: every pair exchanges all it has to.
#include "hosts_exchange.h"

namespace shardwise {

void Hosts::gather_from_all(const void* input, const std::vector<void*>& outputs) {
  const uint64_t bytes = call_.count * call_.item;
  for (const int peer : remote_) {
    wire_.receive(peer, outputs[peer], bytes);
    wire_.send(peer, input, bytes);
  }
  std::vector<void*> here;
  for (const int peer : locals()) here.push_back(outputs[peer]);
  all_gather_here(input, here);
}

void Hosts::sum_from_all(const std::vector<const void*>& inputs, void* output) {
  const uint64_t item = call_.item, step = aligned(kRound / room_.size), bytes = call_.count * item;
  const uint64_t chunks = chunks_of(bytes, step);
  Exchange exchange(*this, remote_, 2, step);
  const auto length_of = [&](uint64_t c) { return std::min(step, bytes - c * step); };
  for (const int peer : remote_) {
    wire_.send(peer, inputs[peer], bytes);
    for (uint64_t c = 0; c < std::min<uint64_t>(2, chunks); ++c) exchange.expect(peer, c, length_of(c));
  }
  std::vector<const void*> parts(places_.size());
  const auto stage = [&](uint64_t offset, uint64_t length) {
    for (int l = 0; l < room_.size; ++l) copy(mine() + l * step, at(inputs[locals()[l]], offset), length);
  };
  const auto take = [&](uint64_t offset, uint64_t length) {
    if (length == 0) return;
    const uint64_t c = offset / step;
    for (int l = 0; l < room_.size; ++l) parts[locals()[l]] = theirs(l) + room_.rank * step;
    for (const int peer : remote_) parts[peer] = exchange.incoming(peer, c);
    sum_all(at(output, offset), parts, length / item);
    for (const int peer : remote_) {
      if (c + 2 < chunks) exchange.expect(peer, c + 2, length_of(c + 2));
    }
  };
  rounds(bytes, step, stage, take);
}

void Hosts::all_reduce_from_all(const char* input, char* output, uint64_t count) {
  const uint64_t bytes = count * call_.item, step = kRound, chunks = chunks_of(bytes, step);
  char* const kept = scratch_.take(bytes);  // what is still being sent when the output is written
  copy(kept, input, bytes);
  Exchange exchange(*this, remote_, 2, step);
  const auto length_of = [&](uint64_t c) { return std::min(step, bytes - c * step); };
  for (const int peer : remote_) {
    wire_.send(peer, kept, bytes);
    for (uint64_t c = 0; c < std::min<uint64_t>(2, chunks); ++c) exchange.expect(peer, c, length_of(c));
  }
  std::vector<const void*> parts(places_.size());
  const auto stage = [&](uint64_t offset, uint64_t length) { copy(mine(), kept + offset, length); };
  const auto take = [&](uint64_t offset, uint64_t length) {
    if (length == 0) return;
    const uint64_t c = offset / step;
    for (int l = 0; l < room_.size; ++l) parts[locals()[l]] = theirs(l);
    for (const int peer : remote_) parts[peer] = exchange.incoming(peer, c);
    sum_all(output + offset, parts, length / call_.item);
    for (const int peer : remote_) {
      if (c + 2 < chunks) exchange.expect(peer, c + 2, length_of(c + 2));
    }
  };
  rounds(bytes, step, stage, take);
}

}  // namespace shardwise
