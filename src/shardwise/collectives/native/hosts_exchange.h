// Chunks on their way between ranks of different hosts, and how many of them there may be.
#pragma once

#include "hosts.h"
#include "hosts_await.h"

namespace shardwise {

inline uint64_t chunks_of(uint64_t count, uint64_t step) { return (count + step - 1) / step; }

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

}  // namespace shardwise
