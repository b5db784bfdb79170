// Gather, scatter, all-to-all and the barrier between hosts.
#include "hosts_exchange.h"

namespace shardwise {

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

namespace {

std::vector<Wire::Span> spans_of(const Piece& piece) {
  std::vector<Wire::Span> spans;
  piece.runs(0, piece.bytes, [&](char* memory, uint64_t length) { spans.push_back({memory, length}); });
  return spans;
}

}  // namespace

void Hosts::all_to_all(Call call, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(remote_, &inputs, &outputs);
    for (const int peer : remote_) {
      wire_.receive(peer, spans_of(outputs[peer]));
      wire_.send(peer, spans_of(inputs[peer]));
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
