// The memory that the ranks of one group share, who they are, and how their failures are told.
//
// The memory is a memfd: it has no name that others could open or that could be left behind, it needs no /dev/shm, and the
// kernel frees it with the last process that maps it, however that one ended. Peers reach it through /proc, which the
// kernel allows to the same user alone; a random token shows that they found the right one.
//
//   | Header | Member of rank 0, 1, ... | all-to-all sizes | staging areas, two of each kind | message rings |
//
// Pages are given by the kernel when they are touched first, so rings that nobody uses cost nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "numbers.h"
#include "wait.h"

namespace shardwise {

// What a rank was asked to do. Every field but `factor` has to be equal on all ranks.
enum class Kind : uint32_t {
  start, all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, gather, scatter, reduce, barrier, send, receive
};
const char* name(Kind kind);

// Whose tensors a call moves, as its caller has said: the digest is compared, the text is for messages.
struct Label {
  uint64_t digest;  // 0: nobody has said
  char text[88];
};

struct Call {
  uint64_t sequence;  // 1, 2, ... within the group
  Kind kind;
  Reduce reduce;
  int32_t dtype;  // the caller's code of it, for comparison
  Number number;  // the same for arithmetic
  int32_t root;
  uint32_t item;   // bytes of an element
  uint64_t count;  // elements: what one rank contributes, or of `all_reduce`, `broadcast` and `reduce` the whole; of complex
                   // numbers that are reduced their parts
  double factor;   // of this rank, for `Reduce::scaled_sum`
  bool is_complex; // its elements are the parts of complex numbers
  Label label;
};

// The text of a call that came over a connection need not end by itself.
inline void end_text(Call& call) { call.label.text[sizeof call.label.text - 1] = 0; }

struct alignas(64) Member {
  std::atomic<uint32_t> state;  // 0: not here yet, 1: here, 2: has left
  int32_t process;
  uint64_t born;                // the process's start time, since numbers of processes are used again
  uint64_t cores;               // the word for those it may use
  std::atomic<uint64_t> rounds; // barriers at which it has arrived
  std::atomic<int64_t> heard;   // when
  Call calls[2];                // by the parity of the sequence number
  std::atomic<uint64_t> announced; // the highest of them
  Signal bell;                  // rung when there is a message, or room for one
  std::atomic<uint32_t> failures; // errors of its program that it has told
  std::atomic<bool> failed;     // it has called nothing since the last of them
  char failure[512];            // that one
};

struct Header {
  uint64_t token[2];
  uint32_t size;
  alignas(64) std::atomic<uint64_t> arrivals;
  alignas(64) Signal generation;       // barriers that are complete
  alignas(64) std::atomic<uint32_t> broken;  // 0: no, 1: the reason is being written, 2: yes
  char reason[1024];
};

constexpr uint64_t kFrameBytes = 32 << 10;
constexpr uint64_t kFrames = 8;

// A piece of a message.
struct Frame {
  int32_t tag;
  int32_t dtype;
  uint64_t total;   // bytes of the whole message
  uint64_t offset;  // of this piece
  uint64_t length;
  char data[kFrameBytes];
};

// Messages of one rank to another one.
struct Ring {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) Frame frames[kFrames];
};

// Any error of the engine. Once one was raised the group is broken: later calls raise the same.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Room {
 public:
  // Makes the memory of a group of `size` ranks; throws Failure where the system refuses it.
  static int create(int size, const uint64_t token[2]);
  // How another process of this host opens it.
  static int open(int process, int descriptor);

  // `names` are the ranks by which messages call the members. Takes `descriptor` over.
  Room(int descriptor, int rank, int size, const uint64_t token[2], std::vector<int> names);
  // The same memory seen by another rank of this process, as the stress has it, so that ThreadSanitizer sees one memory.
  Room(const Room& other, int rank);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  Member& member(int rank) const { return reinterpret_cast<Member*>(memory_ + members_)[rank]; }
  uint64_t* sizes(int rank, uint64_t parity) const;  // bytes to every rank, then bytes from every rank
  char* stage(int rank, uint64_t parity) const;
  char* result(uint64_t parity) const;
  Ring& ring(int from, int to) const;

  void leave();
  // "rank 3 (process 1234) has died", "... has left the group" or "... has failed: ..."; empty while it is there. What the
  // rank did before it went is visible after this call, so whoever waits for it looks once more before giving up.
  std::string gone(int peer) const;
  // True once it has left as it should: whoever waits for one of several ranks may wait for another.
  bool left(int peer) const;
  // Tells an error of this rank's program. Ranks that wait for it, and have not failed as often, stop waiting.
  void tell_failure(const std::string& text);
  // This rank calls again.
  void resume();
  // Breaks the group for everyone and throws.
  [[noreturn]] void fail(const std::string& reason);
  // Ends what this rank alone waits for, within moments. The others learn of it when it leaves.
  void abandon() { abandoned_.store(true, std::memory_order_release); }
  void throw_if_broken() const;
  std::string called(int rank) const { return std::to_string(names[rank]); }

  const int rank;
  const int size;
  const uint64_t slot;  // bytes of a staging area
  const std::vector<int> names;

 private:
  void enter();

  char* memory_ = nullptr;
  bool owns_memory_ = true;
  std::atomic<bool> abandoned_{false};
  uint64_t bytes_, members_, sizes_, stages_, rings_;
};

std::string describe(const Call& call);
std::string seconds_since(int64_t then);

}  // namespace shardwise
