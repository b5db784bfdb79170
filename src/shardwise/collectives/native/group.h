// The collectives of one group of ranks on one host: blocking, one at a time, called by all ranks in the same order.
//
// Every operation is a sequence of rounds. In a round a rank writes to its own staging area, arrives at the barrier, waits
// until all have arrived, and reads the others' areas. There are two areas of each kind, used in turn: whoever writes to
// one of them has passed a barrier that its readers of two rounds ago had to reach first. So one barrier a round is enough.
//
// In the first round each rank also says what it was asked to do, and all compare: different calls are an error on all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "room.h"

namespace shardwise {

struct Piece {
  void* data;
  uint64_t bytes;
};

class Group {
 public:
  explicit Group(Room& room) : room_(room) {}

  // All of them throw Failure: a mismatch, a missing, dead or departed rank. Sizes are in elements of `call`. An output may
  // be its input, or for `all_gather` and `reduce_scatter` the input may be this rank's part of the output and vice versa.
  void all_gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout);
  void reduce_scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout);
  void all_reduce(Call call, const void* input, void* output, int64_t timeout);
  void broadcast(Call call, void* data, int64_t timeout);
  void all_to_all(Call call, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs, int64_t timeout);
  void gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout);
  void scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout);
  void reduce(Call call, const void* input, void* output, int64_t timeout);
  void barrier(Call call, int64_t timeout);

  uint64_t sequence() const { return call_.sequence; }

 private:
  template <class Stage, class Take>
  void rounds(uint64_t bytes, uint64_t step, Stage stage, Take take);
  void begin(Call call, int64_t timeout);
  void meet();
  void wait_for(uint32_t generation);
  void compare();
  void compare_sizes(uint64_t& most);
  void sum(void* out, const std::vector<const void*>& inputs, uint64_t bytes) const;
  void all_reduce_at_once(const char* input, char* output, uint64_t bytes);
  void all_reduce_in_parts(const char* input, char* output, uint64_t bytes);
  bool is_missing(int peer) const;
  void look_around();
  [[noreturn]] void give_up();

  // The areas to write to before the next barrier, and those to read after the last one.
  char* mine() const { return room_.stage(room_.rank, (round_ + 1) % 2); }
  const char* theirs(int rank) const { return room_.stage(rank, round_ % 2); }

  Room& room_;
  Call call_{};
  uint64_t round_ = 0;
  int64_t began_ = 0, timeout_ = 0;
};

}  // namespace shardwise
