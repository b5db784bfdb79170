// All-gather, reduce-scatter and all-reduce between hosts with the same number of ranks. docs/explanations/collectives.md has the costs.
#include "hosts_exchange.h"

namespace shardwise {
namespace {

constexpr uint64_t kPiece = 32 << 10;  // bytes that an all-gather sends a partner at a time, at most
constexpr uint64_t kSmall = 32 << 10;  // up to this many bytes of all inputs, one exchange of everything is quicker

}  // namespace

void Hosts::all_gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    uniform_ ? gather_pieces(input, outputs) : gather_from_all(input, outputs);
  });
}

// What comes from the partners goes straight to its place. Chunk by chunk, as soon as one is there from all of them, the
// host's ranks give each other what they have, and one more is sent: no partner gets far ahead of another, whose links
// would be idle at the end.
void Hosts::gather_pieces(const void* input, const std::vector<void*>& outputs) {
  const uint64_t bytes = call_.count * call_.item, step = aligned(std::min(kRound / host_count(), kPiece));
  const uint64_t lag = depth(chunks_of(bytes, step), step) * step;
  std::vector<std::vector<uint64_t>> until(places_.size());
  for (const int peer : partners_) {
    until[peer].push_back(wire_.posted_in(peer));
    for (uint64_t offset = 0; offset < bytes; offset += step) {
      until[peer].push_back(wire_.receive(peer, at(outputs[peer], offset), std::min(step, bytes - offset)));
    }
  }
  const auto send = [&](uint64_t from, uint64_t to) {
    for (uint64_t offset = from; offset < std::min(to, bytes); offset += step) {
      for (const int peer : partners_) wire_.send(peer, at(input, offset), std::min(step, bytes - offset));
    }
  };
  send(0, lag);
  const auto stage = [&](uint64_t offset, uint64_t length) {
    for (const int peer : partners_) await_received(peer, until[peer][length ? offset / step + 1 : 0]);
    send(offset + lag, offset + lag + step);
    for (int h = 0; h < host_count() && room_.size > 1; ++h) {
      copy(mine() + h * step, at(h == node_ ? input : outputs[rank_at(h, room_.rank)], offset), length);
    }
  };
  const auto take = [&](uint64_t offset, uint64_t length) {
    copy(at(outputs[places_.rank], offset), at(input, offset), length);
    for (int l = 0; l < room_.size; ++l) {
      for (int h = 0; l != room_.rank && h < host_count(); ++h) copy(at(outputs[rank_at(h, l)], offset), theirs(l) + h * step, length);
    }
  };
  rounds(bytes, step, stage, take);
}

void Hosts::reduce_scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    uniform_ ? sum_pieces(inputs, output) : sum_from_all(inputs, output);
  });
}

// Each rank adds what its host has for the ranks of its local index, sends those sums to them, and adds theirs `lag`
// chunks later.
void Hosts::sum_pieces(const std::vector<const void*>& inputs, void* output) {
  const uint64_t item = call_.item, step = aligned(kRound / places_.size()), elements = step / item;
  const uint64_t chunks = std::max<uint64_t>(1, chunks_of(call_.count, elements)), wide = accumulated(elements);
  const uint64_t lag = depth(chunks, wide), slots = lag + 1;
  const auto count_of = [&](uint64_t c) { return std::min(elements, call_.count - c * elements); };
  Exchange exchange(*this, partners_, slots, wide);
  char* const own = scratch_.take(slots * wide);
  const auto expect = [&](uint64_t c) {
    for (const int peer : partners_) {
      if (c < chunks) exchange.expect(peer, c, accumulated(count_of(c)));
    }
  };
  for (uint64_t c = 0; c < slots; ++c) expect(c);
  std::vector<const void*> parts(room_.size), partials(host_count());
  for (uint64_t round = 0; round < chunks + lag; ++round) {
    if (round < chunks) {
      const uint64_t from = round * step, count = count_of(round);
      for (int to = 0; to < places_.size(); ++to) {
        if (places_.local[to] == room_.rank) continue;  // what this rank adds itself stays where it is
        copy(mine() + to * step, at(inputs[to], from), count * item);
      }
      meet();
      if (round == 0) compare();
      for (int i = 1; i <= host_count(); ++i) {
        const int h = (node_ + i) % host_count(), to = rank_at(h, room_.rank);
        for (int l = 0; l < room_.size; ++l) parts[l] = l == room_.rank ? at(inputs[to], from) : theirs(l) + to * step;
        partial(h == node_ ? own + round % slots * wide : exchange.outgoing(to, round), parts, count);
        if (h != node_) exchange.send(to, round, accumulated(count));
      }
    }
    if (round < lag) continue;
    const uint64_t c = round - lag;
    for (int h = 0; h < host_count(); ++h) {
      partials[h] = h == node_ ? own + c % slots * wide : exchange.incoming(rank_at(h, room_.rank), c);
    }
    final_sum(at(output, c * step), partials, count_of(c));
    expect(c + slots);
  }
}

void Hosts::all_reduce(Call call, const void* input, void* output, int64_t timeout) {
  const char* from = static_cast<const char*>(input);
  char* to = static_cast<char*>(output);
  operate(call, timeout, [&] {
    greet(partners_);
    if (!uniform_) return all_reduce_from_all(from, to, call.count);
    const bool small = call.count * call.item * places_.size() <= kSmall;
    small ? all_reduce_at_once(from, to, call.count) : all_reduce_in_pieces(from, to, call.count);
  });
}

// Every rank makes its host's sum and exchanges the whole of it.
void Hosts::all_reduce_at_once(const char* input, char* output, uint64_t count) {
  const uint64_t wide = accumulated(count);
  char* const own = scratch_.take(wide);
  std::vector<const void*> parts(room_.size), partials(host_count());
  for (int h = 0; h < host_count(); ++h) {
    char* const others = h == node_ ? own : scratch_.take(wide);
    partials[h] = others;
    if (h != node_) wire_.receive(rank_at(h, room_.rank), others, wide);
  }
  copy(mine(), input, count * call_.item);
  meet();
  compare();
  for (int l = 0; l < room_.size; ++l) parts[l] = theirs(l);
  partial(own, parts, count);
  for (const int peer : partners_) wire_.send(peer, own, wide);
  await_all();
  final_sum(output, partials, count);
}

// Block by block, in stages that follow each other at a distance of `lag` rounds, for which the bytes are under way:
// every rank stages the block; adds its host's part of its local index and sends each host its piece; adds the hosts' sums
// of its own piece and sends the result to all; has the part of its local index whole and shows it to its host.
void Hosts::all_reduce_in_pieces(const char* input, char* output, uint64_t count) {
  const uint64_t item = call_.item, step = aligned(kRound / places_.size()), elements = step / item;
  const uint64_t block = step * places_.size(), part = step * host_count(), mine_at = part * room_.rank, bytes = count * item;
  const uint64_t chunks = chunks_of(bytes, block), wide = accumulated(elements);
  const uint64_t lag = depth(chunks, wide), slots = 2 * lag;
  const auto length_of = [&](uint64_t c) { return std::min(block, bytes - c * block); };
  // Bytes of a piece, which is nothing or less than others at the very end.
  const auto piece = [&](uint64_t c, int h) {
    const uint64_t from = mine_at + h * step;
    return length_of(c) > from ? std::min(step, length_of(c) - from) : 0;
  };
  const auto place = [&](uint64_t c, int h) { return output + c * block + mine_at + h * step; };
  // All of a block but the part of this rank's local index.
  const auto copy_others = [&](char* to, const char* from, uint64_t length) {
    copy(to, from, std::min(mine_at, length));
    if (mine_at + part < length) copy(to + mine_at + part, from + mine_at + part, length - mine_at - part);
  };
  Exchange exchange(*this, partners_, slots, wide);
  char* const own = scratch_.take(slots * wide);
  std::vector<std::vector<uint64_t>> until(places_.size(), std::vector<uint64_t>(chunks));
  // What a partner sends in its round: its host's sum of a block, and the result of an earlier one.
  const auto expect = [&](uint64_t round) {
    for (const int peer : partners_) {
      const int h = places_.node[peer];
      if (round < chunks) exchange.expect(peer, round, accumulated(piece(round, node_) / item));
      if (round >= lag && round - lag < chunks) until[peer][round - lag] = wire_.receive(peer, place(round - lag, h), piece(round - lag, h));
    }
  };
  for (uint64_t round = 0; round < lag; ++round) expect(round);
  std::vector<const void*> parts(room_.size), partials(host_count());
  for (uint64_t round = 0; round < chunks + 2 * lag; ++round) {
    if (round < chunks) copy_others(mine(), input + round * block, length_of(round));
    if (round >= 2 * lag) {
      const uint64_t c = round - 2 * lag;
      for (const int peer : partners_) await_received(peer, until[peer][c]);
      if (length_of(c) > mine_at) copy(room_.result((round_ + 1) % 2) + mine_at, place(c, 0), std::min(part, length_of(c) - mine_at));
    }
    meet();
    if (round == 0) compare();
    if (round < chunks) {
      for (int i = 1; i <= host_count(); ++i) {
        const int h = (node_ + i) % host_count();
        const uint64_t from = mine_at + h * step, elements_here = piece(round, h) / item;
        for (int l = 0; l < room_.size; ++l) parts[l] = l == room_.rank ? input + round * block + from : theirs(l) + from;
        const int to = rank_at(h, room_.rank);
        partial(h == node_ ? own + round % slots * wide : exchange.outgoing(to, round), parts, elements_here);
        if (h != node_) exchange.send(to, round, accumulated(elements_here));
      }
    }
    if (round >= lag && round - lag < chunks) {
      const uint64_t c = round - lag;
      for (int h = 0; h < host_count(); ++h) {
        partials[h] = h == node_ ? own + c % slots * wide : exchange.incoming(rank_at(h, room_.rank), c);
      }
      final_sum(place(c, node_), partials, piece(c, node_) / item);
      for (const int peer : partners_) wire_.send(peer, place(c, node_), piece(c, node_));
    }
    expect(round + lag);
    if (round >= 2 * lag) {
      const uint64_t c = round - 2 * lag;
      copy_others(output + c * block, room_.result(round_ % 2), length_of(c));
    }
  }
}

}  // namespace shardwise
