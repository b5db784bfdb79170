// The collectives between hosts that have a root, all-to-all and the barrier.
#include "hosts_exchange.h"

namespace shardwise {

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
