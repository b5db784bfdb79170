// Making, finding and leaving the shared memory of a group; who is alive; how a failure reaches everyone.
#include "room.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "cores.h"

namespace shardwise {
namespace {

constexpr uint64_t kPage = 4096;
constexpr int64_t kReasonPatience = kNanoseconds;  // a reason is written in microseconds, unless its writer has died

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// A round moves this much of each rank's data: large enough that barriers cost little, small enough that what is in flight
// stays in the cores' own caches. Pieces of it for up to 64 ranks still fill pages.
constexpr uint64_t kSlotBytes = 512 << 10;

struct Plan {
  uint64_t members, sizes, stages, rings, bytes;
  explicit Plan(int n) {
    members = round_up(sizeof(Header), kPage);
    sizes = round_up(members + n * sizeof(Member), kPage);
    stages = round_up(sizes + 2ull * n * 2 * n * sizeof(uint64_t), kPage);
    rings = stages + 2 * (n + 1) * kSlotBytes;
    bytes = round_up(rings + static_cast<uint64_t>(n) * n * sizeof(Ring), kPage);
  }
};

// Start time of a process in clock ticks since boot; 0 if it is gone or only waits for its parent to notice its end.
uint64_t start_time(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  std::istringstream fields(line.substr(line.rfind(')') + 1));  // the name before it may hold anything
  std::string state, skipped;
  fields >> state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  uint64_t born = 0;
  fields >> born;
  return state == "Z" || state == "X" ? 0 : born;
}

[[noreturn]] void refuse(const std::string& what) {
  throw Failure("shardwise engine: " + what + ": " + std::strerror(errno));
}

}  // namespace

const char* name(Kind kind) {
  static const char* const names[] = {"start",      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all",
                                      "gather",     "scatter",    "reduce",         "barrier",    "send",      "recv"};
  return names[static_cast<uint32_t>(kind)];
}

std::string describe(const Call& call) {
  std::ostringstream text;
  text << name(call.kind) << " #" << call.sequence;
  if (call.kind != Kind::barrier && call.kind != Kind::start) {
    text << " (";
    if (call.kind != Kind::all_to_all) text << call.count << " x ";
    if (call.number == Number::other) {
      text << call.item << " bytes";
    } else {
      text << (call.is_complex ? "part of complex " : "") << name(call.number);
    }
    if (call.reduce != Reduce::none) text << ", " << name(call.reduce);
    if (call.root >= 0) text << ", root " << call.root;
    text << ")";
  }
  if (call.label.digest != 0) text << " of " << call.label.text;
  return text.str();
}

std::string seconds_since(int64_t then) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(now() - then) / kNanoseconds);
  return text;
}

int Room::create(int size, const uint64_t token[2]) {
  const int descriptor = memfd_create("shardwise", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) refuse("no shared memory (memfd_create)");
  const Plan plan(size);
  Header first{};
  std::memcpy(first.token, token, sizeof first.token);
  first.size = static_cast<uint32_t>(size);
  const bool made = ftruncate(descriptor, static_cast<off_t>(plan.bytes)) == 0 &&
                    pwrite(descriptor, first.token, sizeof first.token, 0) == sizeof first.token &&
                    pwrite(descriptor, &first.size, sizeof first.size, offsetof(Header, size)) == sizeof first.size;
  // Sealed, so that no process can cut off what others have mapped.
  if (!made || fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(descriptor);
    errno = error;
    refuse("no shared memory of " + std::to_string(plan.bytes >> 20) + " MiB");
  }
  return descriptor;
}

int Room::open(int process, int descriptor) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  const int found = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (found < 0) refuse("rank 0's shared memory cannot be opened through " + path);
  return found;
}

Room::Room(int descriptor, int rank, int size, const uint64_t token[2], std::vector<int> names)
    : rank(rank), size(size), slot(kSlotBytes), names(std::move(names)) {
  const Plan plan(size);
  bytes_ = plan.bytes, members_ = plan.members, sizes_ = plan.sizes, stages_ = plan.stages, rings_ = plan.rings;
  struct stat found {};
  const bool right_size = fstat(descriptor, &found) == 0 && static_cast<uint64_t>(found.st_size) == bytes_;
  void* at = right_size ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) : MAP_FAILED;
  const int error = errno;
  close(descriptor);
  if (!right_size) throw Failure("shardwise engine: rank 0's shared memory is not of this group: its size is another");
  errno = error;
  if (at == MAP_FAILED) refuse("shared memory of " + std::to_string(bytes_ >> 20) + " MiB cannot be mapped");
  memory_ = static_cast<char*>(at);
  if (std::memcmp(header().token, token, sizeof header().token) != 0 || header().size != static_cast<uint32_t>(size)) {
    munmap(memory_, bytes_);
    throw Failure("shardwise engine: rank 0's shared memory is not of this group: its token is another");
  }
  enter();
}

Room::Room(const Room& other, int rank)
    : rank(rank), size(other.size), slot(other.slot), names(other.names), memory_(other.memory_), owns_memory_(false),
      bytes_(other.bytes_), members_(other.members_), sizes_(other.sizes_), stages_(other.stages_), rings_(other.rings_) {
  enter();
}

void Room::enter() {
  Member& own = member(rank);
  own.process = getpid();
  own.born = start_time(own.process);
  own.cores = Cores().word();
  own.heard.store(now(), std::memory_order_relaxed);
  own.state.store(1, std::memory_order_release);
}

Room::~Room() {
  leave();
  if (owns_memory_) munmap(memory_, bytes_);
}

uint64_t* Room::sizes(int of, uint64_t parity) const {
  return reinterpret_cast<uint64_t*>(memory_ + sizes_) + (static_cast<uint64_t>(of) * 2 + parity) * 2 * size;
}

char* Room::stage(int of, uint64_t parity) const { return memory_ + stages_ + (parity * (size + 1) + of) * slot; }

char* Room::result(uint64_t parity) const { return stage(size, parity); }

Ring& Room::ring(int from, int to) const {
  return reinterpret_cast<Ring*>(memory_ + rings_)[static_cast<uint64_t>(from) * size + to];
}

void Room::leave() {
  member(rank).state.store(2, std::memory_order_release);
  header().generation.wake();
  for (int peer = 0; peer < size; ++peer) member(peer).bell.wake();
}

void Room::tell_failure(const std::string& text) {
  Member& own = member(rank);
  own.failed.store(false, std::memory_order_release);
  std::snprintf(own.failure, sizeof own.failure, "%s", text.c_str());
  own.failures.fetch_add(1, std::memory_order_release);
  own.failed.store(true, std::memory_order_release);
}

void Room::resume() {
  Member& own = member(rank);
  if (own.failed.load(std::memory_order_relaxed)) own.failed.store(false, std::memory_order_release);
}

void Room::throw_if_broken() const {
  if (abandoned_.load(std::memory_order_acquire)) throw Failure("shardwise engine: the process ended while this was under way");
  uint32_t broken = header().broken.load(std::memory_order_acquire);
  for (const int64_t until = now() + kReasonPatience; broken == 1; broken = header().broken.load(std::memory_order_acquire)) {
    if (now() > until) throw Failure("shardwise engine: a rank of this host failed, and died before it could say why");
    sched_yield();
  }
  if (broken == 2) throw Failure(header().reason);
}

void Room::fail(const std::string& reason) {
  uint32_t whole = 0;
  if (header().broken.compare_exchange_strong(whole, 1, std::memory_order_acq_rel)) {
    std::snprintf(header().reason, sizeof header().reason, "shardwise engine: %s", reason.c_str());
    header().broken.store(2, std::memory_order_release);
    header().generation.wake();
    for (int peer = 0; peer < size; ++peer) member(peer).bell.wake();
  }
  throw_if_broken();  // with the first reason, which is the same for all
  throw Failure(reason);
}

bool Room::left(int peer) const {
  const Member& other = member(peer);
  return other.state.load(std::memory_order_acquire) == 2 && !other.failed.load(std::memory_order_acquire);
}

std::string Room::gone(int peer) const {
  const Member& other = member(peer);
  const uint32_t state = other.state.load(std::memory_order_acquire);
  if (state == 0) return "";
  const std::string who = "rank " + called(peer) + " (process " + std::to_string(other.process) + ") ";
  const bool alone = other.failures.load(std::memory_order_acquire) > member(rank).failures.load(std::memory_order_relaxed);
  if (alone && other.failed.load(std::memory_order_acquire)) return who + "has failed: " + other.failure;
  if (state == 2) return who + "has left the group";
  return start_time(other.process) == other.born ? "" : who + "has died";
}

}  // namespace shardwise
