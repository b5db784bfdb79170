// The collectives of a group over several hosts: shared memory inside of each, connections between them.
//
// Where all hosts have the same number of ranks, a rank exchanges data with those of equal local index alone, directly with
// each of them, and every host's ranks share the rest through their memory. Where numbers differ every pair of ranks on
// different hosts exchanges what it has to: correct, not quick. Sums are made of each host's ranks in their order, kept in
// the accumulator's type, then of the hosts in theirs.
//
// Both ends of a connection know from their calls what comes over it. So that this holds, every operation begins with a
// heading: the call, and where sizes may differ between pairs these too. It is compared before the operation ends.
#pragma once

#include <memory>
#include <vector>

#include "group.h"
#include "wire.h"

namespace shardwise {

// Where the ranks of a group are.
struct Places {
  int rank;                            // this one, within the group
  std::vector<std::vector<int>> hosts; // the ranks of each
  std::vector<int> node, local;        // of each rank: its host, and its index there

  Places(int rank, std::vector<std::vector<int>> hosts);
  int size() const { return static_cast<int>(node.size()); }
  bool is_remote(int peer) const { return node[peer] != node[rank]; }
  bool uniform() const;
};

// Memory of an operation, which lives until the connections have let go of it, and is used again by the next one.
class Scratch {
 public:
  char* take(uint64_t bytes) {
    if (used_ == blocks_.size()) blocks_.emplace_back();
    Block& block = blocks_[used_++];
    if (block.bytes < bytes) block = {std::unique_ptr<char[]>(new char[bytes]), bytes};
    return block.memory.get();
  }
  void reset() {
    used_ = 0;
    for (Block& block : blocks_) {
      if (block.bytes > kKept) block = {};
    }
  }

 private:
  static constexpr uint64_t kKept = 16 << 20;
  struct Block {
    std::unique_ptr<char[]> memory;
    uint64_t bytes = 0;
  };
  std::vector<Block> blocks_;
  size_t used_ = 0;
};

class Hosts : public Group {
 public:
  // A round between hosts moves this much of each rank's data, half a staging area: links want smaller steps than memory.
  static constexpr uint64_t kRound = 256 << 10;

  Hosts(Room& room, Wire& wire, Places places);

  void all_gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout) override;
  void reduce_scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout) override;
  void all_reduce(Call call, const void* input, void* output, int64_t timeout) override;
  void broadcast(Call call, void* data, int64_t timeout) override;
  void all_to_all(Call call, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs, int64_t timeout) override;
  void gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout) override;
  void scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout) override;
  void reduce(Call call, const void* input, void* output, int64_t timeout) override;
  void barrier(Call call, int64_t timeout) override;

 private:
  struct Heading {
    Call call;
    uint64_t to_receiver, from_receiver;  // bytes of all-to-all
  };
  // One per peer: what it said, and up to where of its stream.
  struct Greeted {
    Heading said, heard;
    uint64_t until = 0;
    bool open = false;  // sent and not compared yet
  };
  class Exchange;  // rings of chunks to and from some peers, in collectives between hosts
  class Relay;     // a broadcast's blocks

  // Runs one operation: begins it, and where it fails lets nothing touch the caller's memory and tells all hosts.
  template <class Body>
  void operate(Call call, int64_t timeout, Body body);
  void break_room(const std::exception& error);
  void greet(const std::vector<int>& peers, const std::vector<Piece>* sent = nullptr, const std::vector<Piece>* expected = nullptr);
  void check_headings();
  [[noreturn]] void refuse_heading(int peer);
  template <class Ready>
  void await(Ready ready);
  void await_received(int peer, uint64_t position);
  void await_sent(int peer, uint64_t position);
  void await_all();
  void look_at_hosts();
  std::string missing() const override;

  void gather_pieces(const void* input, const std::vector<void*>& outputs);
  void gather_from_all(const void* input, const std::vector<void*>& outputs);
  void sum_pieces(const std::vector<const void*>& inputs, void* output);
  void sum_from_all(const std::vector<const void*>& inputs, void* output);
  void all_reduce_at_once(const char* input, char* output, uint64_t count);
  void all_reduce_in_pieces(const char* input, char* output, uint64_t count);
  void all_reduce_from_all(const char* input, char* output, uint64_t count);
  std::vector<int> with_root(int root) const;
  int leader(int node, int root) const;
  std::vector<int> helpers(int root) const;
  void partial(void* out, const std::vector<const void*>& inputs, uint64_t elements) const;
  void final_sum(void* out, const std::vector<const void*>& partials, uint64_t elements) const;
  void sum_all(void* out, const std::vector<const void*>& inputs, uint64_t elements) const;
  uint64_t accumulated(uint64_t elements) const { return elements * bytes_of(accumulator(call_.number)); }

  // How many chunks of `bytes` a rank may be ahead of each of its partners.
  uint64_t depth(uint64_t chunks, uint64_t bytes) const;

  int host_count() const { return static_cast<int>(places_.hosts.size()); }
  int rank_at(int node, int local) const { return places_.hosts[node][local]; }
  const std::vector<int>& locals() const { return places_.hosts[node_]; }

  Wire& wire_;
  const Places places_;
  const int node_;
  const bool uniform_;
  std::vector<int> remote_;    // all ranks of other hosts
  std::vector<int> partners_;  // whom headings are compared with: of equal local index, else all of `remote_`; the next host's first
  std::vector<Greeted> greeted_;
  Scratch scratch_;
};

}  // namespace shardwise
