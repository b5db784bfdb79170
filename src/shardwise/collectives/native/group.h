// The collectives of one group of ranks on one host: blocking, one at a time, called by all ranks in the same order. `Hosts`
// (hosts.h) makes those of a group over several hosts of them.
//
// Every operation is a sequence of rounds. In a round a rank writes to its own staging area, arrives at the barrier, waits
// until all have arrived, and reads the others' areas. There are two areas of each kind, used in turn: whoever writes to
// one of them has passed a barrier that its readers of two rounds ago had to reach first. So one barrier a round is enough.
//
// In the first round each rank also says what it was asked to do, and all compare: different calls are an error on all.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cores.h"
#include "piece.h"
#include "room.h"

namespace shardwise {

class Group {
 public:
  explicit Group(Room& room) : room_(room) {}
  virtual ~Group() = default;

  // All of them throw Failure: a mismatch, a missing, dead or departed rank. Sizes are in elements of `call`. An output may
  // be its input, or for `all_gather` and `reduce_scatter` the input may be this rank's part of the output and vice versa.
  virtual void all_gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout);
  virtual void reduce_scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout);
  virtual void all_reduce(Call call, const void* input, void* output, int64_t timeout);
  virtual void broadcast(Call call, void* data, int64_t timeout);
  virtual void all_to_all(Call call, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs, int64_t timeout);
  virtual void gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout);
  virtual void scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout);
  virtual void reduce(Call call, const void* input, void* output, int64_t timeout);
  virtual void barrier(Call call, int64_t timeout);

  uint64_t sequence() const { return call_.sequence; }

 protected:
  // Moves `bytes` in rounds of `step`: `stage(offset, length)` before and `take(offset, length)` after each barrier.
  template <class Stage, class Take>
  void rounds(uint64_t bytes, uint64_t step, Stage stage, Take take) {
    uint64_t offset = 0;
    do {
      const uint64_t length = std::min(step, bytes - offset);
      stage(offset, length);
      meet();
      if (offset == 0) compare();
      take(offset, length);
      offset += length;
    } while (offset < bytes);
  }

  void begin(Call call, int64_t timeout);
  void meet();
  void compare();
  // The sum of one input a rank of this host, into `to`, which is the call's number or its accumulator.
  void sum(void* out, const std::vector<const void*>& inputs, uint64_t elements, Number to) const;
  // The same into an output that `put` writes.
  void sum_and_put(Copy put, void* out, const std::vector<const void*>& inputs, uint64_t elements) const;
  // The part of an operation on this host; `root` is a rank of the room.
  void all_gather_here(const void* input, const std::vector<void*>& outputs);
  void all_to_all_here(const std::vector<Piece>& inputs, const std::vector<Piece>& outputs);
  void gather_here(int root, const void* input, const std::vector<void*>& outputs);
  void scatter_here(int root, const std::vector<const void*>& inputs, void* output);

  // Called every now and then while waiting for ranks of this host; throws where the wait is in vain.
  void look_around();
  // The ranks that keep the others waiting, with what is known of them; after the timeout.
  virtual std::string missing() const;
  [[noreturn]] void give_up();
  static std::string last_seen(const std::string& called, const Call& last, int64_t heard);
  static const Call& last_call(const Member& member);

  // The areas to write to before the next barrier, and those to read after the last one.
  char* mine() const { return room_.stage(room_.rank, (round_ + 1) % 2); }
  const char* theirs(int rank) const { return room_.stage(rank, round_ % 2); }

  Room& room_;
  Call call_{};
  uint64_t round_ = 0;
  int64_t began_ = 0, timeout_ = 0;

 private:
  // For the sum that has begun, as long as what is returned lives. Copies alone gain nothing from a seat (measured).
  [[nodiscard]] Hold take_seat();
  void wait_for(uint32_t generation);
  void compare_sizes(uint64_t& most);
  void all_reduce_at_once(const char* input, char* output, uint64_t bytes);
  void all_reduce_in_parts(const char* input, char* output, uint64_t bytes);
  // chain.cpp
  bool chains(uint64_t bytes) const;
  template <class Add, class Take>
  void chain(uint64_t blocks, Add add, Take take);
  void add_own(void* out, const void* area, const void* input, uint64_t elements) const;
  void reduce_scatter_in_chain(const std::vector<const void*>& inputs, void* output);
  void all_reduce_in_chain(const char* input, char* output, uint64_t bytes);
  bool is_missing(int peer) const;

  Seat seat_;
};

inline const char* at(const void* data, uint64_t offset) { return static_cast<const char*>(data) + offset; }
inline char* at(void* data, uint64_t offset) { return static_cast<char*>(data) + offset; }

// Pieces of a staging area start where vectors like them to.
inline uint64_t aligned(uint64_t bytes) { return bytes / 64 * 64; }

// Whether two ranks were asked for different things.
bool differs(const Call& a, const Call& b);

// What an error says of calls that differ; `called` are the ranks. Those of labelled calls are out of step.
std::string difference(const std::vector<std::string>& called, const std::vector<Call>& calls);
constexpr const char* kOutOfStep = "the ranks are out of step";

}  // namespace shardwise
