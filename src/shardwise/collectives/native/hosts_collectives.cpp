// The collectives between hosts. n ranks on H hosts with L ranks each, M bytes of the full buffer; docs/collectives.md has
// the costs.
#include "hosts.h"
#include "hosts_await.h"

namespace shardwise {
namespace {

constexpr uint64_t kUnderWay = 512 << 10;  // bytes between two ranks that one may be ahead of the other
constexpr uint64_t kDeepest = 64;          // the same in chunks
constexpr uint64_t kSmall = 32 << 10;      // up to this many bytes of all inputs, one exchange of everything is quicker

uint64_t chunks_of(uint64_t count, uint64_t step) { return (count + step - 1) / step; }

// How many chunks may be under way.
uint64_t depth(uint64_t chunks, uint64_t chunk_bytes) {
  return std::max<uint64_t>(1, std::min({chunks, kDeepest, kUnderWay / std::max<uint64_t>(chunk_bytes, 1)}));
}

}  // namespace

// Slots for chunks to and from each of some peers, used in turn.
class Hosts::Exchange {
 public:
  Exchange(Hosts& hosts, const std::vector<int>& peers, uint64_t slots, uint64_t bytes)
      : hosts_(hosts), slots_(slots), bytes_(bytes), out_(hosts.places_.size()), in_(out_.size()) {
    for (const int peer : peers) {
      out_[peer] = {hosts.scratch_.take(slots * bytes), std::vector<uint64_t>(slots)};
      in_[peer] = {hosts.scratch_.take(slots * bytes), std::vector<uint64_t>(slots)};
    }
  }

  // Where to put chunk `c` for `peer`: waits until what was there before has left.
  char* outgoing(int peer, uint64_t c) {
    hosts_.await_sent(peer, out_[peer].until[c % slots_]);
    return out_[peer].slot(c % slots_, bytes_);
  }
  void send(int peer, uint64_t c, uint64_t bytes) {
    out_[peer].until[c % slots_] = hosts_.wire_.send(peer, out_[peer].slot(c % slots_, bytes_), bytes);
  }
  // Where chunk `c` of `peer` goes; what was in that place is over.
  void expect(int peer, uint64_t c, uint64_t bytes) {
    in_[peer].until[c % slots_] = hosts_.wire_.receive(peer, in_[peer].slot(c % slots_, bytes_), bytes);
  }
  const char* incoming(int peer, uint64_t c) {
    hosts_.await_received(peer, in_[peer].until[c % slots_]);
    return in_[peer].slot(c % slots_, bytes_);
  }

 private:
  struct Slots {
    char* memory = nullptr;
    std::vector<uint64_t> until;  // the position of its connection at which a slot is free, or full
    char* slot(uint64_t index, uint64_t bytes) { return memory + index * bytes; }
  };
  Hosts& hosts_;
  const uint64_t slots_, bytes_;
  std::vector<Slots> out_, in_;
};

void Hosts::all_gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    uniform_ ? gather_pieces(input, outputs) : gather_from_all(input, outputs);
  });
}

// What comes from the partners goes straight to its place. Chunk by chunk, as soon as one is there from all of them, the
// host's ranks give each other what they have.
void Hosts::gather_pieces(const void* input, const std::vector<void*>& outputs) {
  const uint64_t bytes = call_.count * call_.item, step = aligned(room_.slot / host_count());
  std::vector<std::vector<uint64_t>> until(places_.size());
  for (const int peer : partners_) {
    until[peer].push_back(wire_.posted_in(peer));
    for (uint64_t offset = 0; offset < bytes; offset += step) {
      until[peer].push_back(wire_.receive(peer, at(outputs[peer], offset), std::min(step, bytes - offset)));
    }
    wire_.send(peer, input, bytes);
  }
  const auto stage = [&](uint64_t offset, uint64_t length) {
    for (int h = 0; h < host_count(); ++h) {
      const int peer = rank_at(h, room_.rank);
      if (h != node_ && length) await_received(peer, until[peer][offset / step + 1]);
      if (room_.size > 1) copy(mine() + h * step, at(h == node_ ? input : outputs[peer], offset), length);
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

void Hosts::reduce_scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    uniform_ ? sum_pieces(inputs, output) : sum_from_all(inputs, output);
  });
}

// Each rank adds what its host has for the ranks of its local index, sends those sums to them, and adds theirs `lag`
// chunks later.
void Hosts::sum_pieces(const std::vector<const void*>& inputs, void* output) {
  const uint64_t item = call_.item, step = aligned(room_.slot / places_.size()), elements = step / item;
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
      for (int h = 0; h < host_count(); ++h) {
        const int to = rank_at(h, room_.rank);
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

void Hosts::sum_from_all(const std::vector<const void*>& inputs, void* output) {
  const uint64_t item = call_.item, step = aligned(room_.slot / room_.size), bytes = call_.count * item;
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
  const uint64_t item = call_.item, step = aligned(room_.slot / places_.size()), elements = step / item;
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
      for (int h = 0; h < host_count(); ++h) {
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

void Hosts::all_reduce_from_all(const char* input, char* output, uint64_t count) {
  const uint64_t bytes = count * call_.item, step = room_.slot, chunks = chunks_of(bytes, step);
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

// The root sends to one rank of each host, which shows it to the others chunk by chunk.
void Hosts::broadcast(Call call, void* data, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    const uint64_t bytes = call.count * call.item, step = room_.slot;
    const int first = leader(node_, call.root), here = places_.local[first];
    std::vector<uint64_t> until{0};
    for (int h = 0; h < host_count() && places_.rank == call.root; ++h) {
      if (h != node_) wire_.send(leader(h, call.root), data, bytes);
    }
    for (uint64_t offset = 0; offset < bytes && places_.rank == first && first != call.root; offset += step) {
      until.push_back(wire_.receive(call.root, at(data, offset), std::min(step, bytes - offset)));
    }
    const auto stage = [&](uint64_t offset, uint64_t length) {
      if (room_.rank != here) return;
      if (first != call.root && length) await_received(call.root, until[offset / step + 1]);
      if (room_.size > 1) copy(mine(), at(data, offset), length);
    };
    const auto take = [&](uint64_t offset, uint64_t length) {
      if (room_.rank != here) copy(at(data, offset), theirs(here), length);
    };
    rounds(bytes, step, stage, take);
  });
}

void Hosts::gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(with_root(call.root));
    const uint64_t bytes = call.count * call.item;
    if (places_.is_remote(call.root)) {
      wire_.send(call.root, input, bytes);
      meet();
      return compare();
    }
    const bool root = places_.rank == call.root;
    std::vector<void*> here;
    for (const int peer : locals()) here.push_back(root ? outputs[peer] : nullptr);
    for (const int peer : remote_) {
      if (root) wire_.receive(peer, outputs[peer], bytes);
    }
    gather_here(places_.local[call.root], input, here);
  });
}

void Hosts::scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(with_root(call.root));
    const uint64_t bytes = call.count * call.item;
    if (places_.is_remote(call.root)) {
      wire_.receive(call.root, output, bytes);
      meet();
      return compare();
    }
    const bool root = places_.rank == call.root;
    std::vector<const void*> here;
    for (const int peer : locals()) here.push_back(root ? inputs[peer] : nullptr);
    for (const int peer : remote_) {
      if (root) wire_.send(peer, inputs[peer], bytes);
    }
    scatter_here(places_.local[call.root], here, output);
  });
}

// One rank of each host adds for all and sends the root its host's sum.
void Hosts::reduce(Call call, const void* input, void* output, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    const uint64_t bytes = call.count * call.item, step = room_.slot, wide = accumulated(step / call.item);
    const uint64_t chunks = chunks_of(bytes, step);
    const int first = leader(node_, call.root);
    const bool root = places_.rank == call.root, adds = places_.rank == first;
    std::vector<int> peers;
    for (int h = 0; h < host_count() && adds; ++h) {
      if (h != node_ && (root || leader(h, call.root) == call.root)) peers.push_back(leader(h, call.root));
    }
    Exchange exchange(*this, peers, 2, wide);
    char* const own = scratch_.take(wide);
    const auto expect = [&](uint64_t c) {
      for (const int peer : peers) {
        if (root && c < chunks) exchange.expect(peer, c, accumulated(std::min(step, bytes - c * step) / call.item));
      }
    };
    expect(0);
    expect(1);
    std::vector<const void*> parts(room_.size), partials(host_count());
    const auto stage = [&](uint64_t offset, uint64_t length) {
      if (!adds) copy(mine(), at(input, offset), length);
    };
    const auto take = [&](uint64_t offset, uint64_t length) {
      if (!adds || length == 0) return;
      const uint64_t c = offset / step, count = length / call.item;
      for (int l = 0; l < room_.size; ++l) parts[l] = l == room_.rank ? at(input, offset) : theirs(l);
      partial(root ? own : exchange.outgoing(call.root, c), parts, count);
      if (!root) return exchange.send(call.root, c, accumulated(count));
      for (int h = 0; h < host_count(); ++h) partials[h] = h == node_ ? own : exchange.incoming(leader(h, call.root), c);
      final_sum(at(output, offset), partials, count);
      expect(c + 2);
    };
    rounds(bytes, step, stage, take);
  });
}

void Hosts::all_to_all(Call call, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(remote_, &inputs, &outputs);
    for (const int peer : remote_) {
      wire_.receive(peer, outputs[peer].data, outputs[peer].bytes);
      wire_.send(peer, inputs[peer].data, inputs[peer].bytes);
    }
    std::vector<Piece> from, to;
    for (const int peer : locals()) from.push_back(inputs[peer]), to.push_back(outputs[peer]);
    all_to_all_here(from, to);
  });
}

// A rank's heading says that all ranks of its host are there.
void Hosts::barrier(Call call, int64_t timeout) {
  operate(call, timeout, [&] {
    meet();
    compare();
    greet(partners_);
  });
}

}  // namespace shardwise
